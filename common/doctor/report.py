"""What an examination has found so far, as JSON and as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.doctor.finding import Finding
from common.launch.layout import Layout


@dataclass
class Report:
    """Tables of plain dictionaries, and the findings. They are empty until their stage has run."""

    layout: Layout
    backend: str = ""
    nodes: list[dict] = field(default_factory=list)  # see node.py
    links: list[dict] = field(default_factory=list)  # see mesh.py
    ranks: list[dict] = field(default_factory=list)  # see speed.py
    all_reduce: list[dict] = field(default_factory=list)  # see speed.py
    advice: str = ""  # see advice.py
    findings: list[Finding] = field(default_factory=list)

    def count_errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it, errors before warnings."""
        layout = {name: getattr(self.layout, name) for name in ("source", "world_size", "gpus_per_node")}
        layout |= {"rendezvous": self.layout.init_method, "backend": self.backend}
        tables = {name: getattr(self, name) for name in ("nodes", "links", "ranks", "all_reduce", "advice")}
        findings = [vars(finding) for finding in sorted(self.findings, key=lambda one: one.level)]
        return {"layout": layout, **tables, "findings": findings, "ok": not self.count_errors()}


def render(report: dict, whole: bool) -> str:
    """The report as text: with all tables, or with the findings alone."""
    parts = [_head(report["layout"]), "" if whole else "the tables are on node 0"]
    if whole:
        parts += [_node(node, len(report["nodes"]) > 1) for node in report["nodes"]]
        parts += [_links(report), _ranks(report), _all_reduce(report)]
    parts.append(_findings(report))
    if whole and report["advice"]:
        own = "for your own model: python -m common.predict --doctor FILE"
        parts.append(f"advice   {report['advice']}\n         {own}")
    return "\n\n".join(filter(None, parts))


def _head(layout: dict) -> str:
    sizes, count = layout["gpus_per_node"], layout["world_size"]
    nodes = f" on {len(sizes)} node{'s' * (len(sizes) > 1)} ({','.join(map(str, sizes))})" if sizes else ""
    return f"doctor: {count} process{'es' * (count > 1)}{nodes}, from {layout['source']}, {layout['backend']}"


def _node(node: dict, several: bool) -> str:
    versions, shm, disk = node["versions"], node["shm"], node["disk"]
    nccl = f", NCCL {node['nccl']}" if node["nccl"] else ""
    cuda = f"CUDA {node['cuda']}{nccl}" if node["cuda"] else "without CUDA"
    gpus = [f"{gpu['name']} {gpu['memory_gb']} GB" if gpu["memory_gb"] else gpu["name"] for gpu in node["gpus"]]
    reaches = node.get("endpoint", {}).get("interface") if several else None
    lines = {
        "system": f"{node['system']}, {node['cores']} cores",
        "memory": f"{node['free_memory_gb']:.1f} of {node['memory_gb']:.1f} GB free",
        "software": f"Python {versions['python']}, torch {versions['torch']} ({cuda}), code {versions['code']}",
        "backends": ", ".join(node["backends"]),
        "driver": node["driver"] or "none",
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none visible",
        "on GPUs": ", ".join(f"{entry['name']} (pid {entry['pid']})" for entry in node["gpu_processes"]) or "nothing",
        "network": "; ".join(_interface(entry, reaches) for entry in node["interfaces"]),
        "disk": f"{disk['free_gb']:.1f} GB free in {disk['path']}",
        "/dev/shm": f"{shm['free_gb']:.1f} of {shm['total_gb']:.1f} GB free" if shm else "none",
        "settings": " ".join(f"{name}={value}" for name, value in node["settings"].items()) or "none",
    }
    return "\n".join([node["place"], *(f"  {name:<10}{value}" for name, value in lines.items())])


def _interface(entry: dict, reaches: str | None) -> str:
    speed = f", {entry['mbit_per_second']} Mbit/s" if entry["mbit_per_second"] else ""
    used = ", reaches the others" if entry["name"] == reaches else ""
    return f"{entry['name']} ({', '.join(entry['addresses']) or 'no address'}{speed}{used})"


def _links(report: dict) -> str:
    places = {rank["rank"]: rank["place"] for rank in report["ranks"]}
    rows = [("link", "latency", "rate", "clocks differ by")]
    for link in report["links"]:
        ends = f"{places.get(link['from'], link['from'])} -> {places.get(link['to'], link['to'])}"
        if link.get("error"):
            rows.append((ends, link["error"], "", ""))
        else:
            latency, clock = f"{link['latency_ms']:.3f} ms", f"{link['clock_ms']:.1f} ms"
            rows.append((ends, latency, _rate(link["mbit_per_second"]), clock))
    return _table(rows)


def _rate(mbit_per_second: float | None) -> str:
    if mbit_per_second is None:
        return "not measured"
    return f"{mbit_per_second:.0f} Mbit/s" if mbit_per_second < 1000 else f"{mbit_per_second / 1e3:.1f} Gbit/s"


def _ranks(report: dict) -> str:
    rows: list[tuple[str, ...]] = [("rank", "where", "device", "memory free", "fp32", "bf16", "bf16 is")]
    for rank in report["ranks"]:
        memory = f"{rank['free_gb']} of {rank['memory_gb']} GB" if rank["memory_gb"] else "-"
        device = rank["name"] if rank["device"] == "cpu" else f"{rank['device']} {rank['name']}"
        speeds = [f"{rank[name]:.3f} TFLOP/s" if rank[name] else "-" for name in ("fp32_tflops", "bf16_tflops")]
        rows.append((str(rank["rank"]), rank["place"], device, memory, *speeds, rank["bf16"]))
    return _table(rows)


def _all_reduce(report: dict) -> str:
    rows = [("all-reduce", "time", "rate")]
    for row in report["all_reduce"]:
        time, rate = "left out", f"would take about {row.get('expected_ms', 0) / 1e3:.0f} s"
        if row["ms"] is not None:
            time, rate = f"{row['ms']:.3f} ms", f"{row['gb_per_second']:.3g} GB/s"
        rows.append((_size(row["bytes"]), time, rate))
    return _table(rows)


def _size(size: int) -> str:
    for unit in ("B", "KB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} MB"


def _findings(report: dict) -> str:
    lines = []
    for finding in report["findings"]:
        lines.append(f"{finding['level']:<9}{finding['where']}: {finding['problem']}")
        lines.append(f"         fix: {finding['fix']}")
    if report["ok"]:
        lines.append("fit to train" + (", with warnings" if report["findings"] else ": nothing found"))
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns; empty where there is only the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) if len(lines) > 1 else ""
