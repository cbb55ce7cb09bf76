"""What an examination has found so far."""

from typing import Any

from common.doctor.finding import Finding
from common.launch.layout import Layout


class Report:
    """Tables of plain dictionaries, and the findings. They are empty until their stage has run."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.backend = ""
        self.nodes: list[dict] = []  # see node.py
        self.links: list[dict] = []  # see mesh.py
        self.ranks: list[dict] = []  # see speed.py
        self.all_reduce: list[dict] = []  # see speed.py
        self.advice = ""  # see advice.py
        self.findings: list[Finding] = []

    def count_errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it, errors before warnings."""
        return {
            "layout": {
                "source": self.layout.source,
                "world_size": self.layout.world_size,
                "gpus_per_node": self.layout.gpus_per_node,
                "rendezvous": self.layout.init_method,
                "backend": self.backend,
            },
            "nodes": self.nodes,
            "links": self.links,
            "ranks": self.ranks,
            "all_reduce": self.all_reduce,
            "advice": self.advice,
            "findings": [finding.as_dict() for finding in sorted(self.findings, key=lambda one: one.level)],
            "ok": not self.count_errors(),
        }
