"""What a rank finds out alone, before it joins: its node, its network interface, its device."""

import os
import socket
from dataclasses import replace

import torch

from common.doctor import diagnosis, node, speed
from common.doctor.finding import Finding, from_error
from common.errors import UserError
from common.join import devices, interfaces, network
from common.launch.layout import Worker
from common.launch.options import JoinOptions


class Alone:
    """What a rank has found before it joins. What fails becomes a finding."""

    def __init__(self, worker: Worker, join: JoinOptions):
        """Look at this node, and choose the device and backend as the trainers do."""
        self.worker, self.place = worker, place(worker)
        self.join = join  # without an interface that cannot work, so that the nodes can still meet
        self.device, self.backend = torch.device("cpu"), join.backend
        self.usable = True  # False: this rank cannot train, and takes part in the examination on the CPU
        self.findings: list[Finding] = []
        self.facts: dict = {}  # of the node; empty on all but its first rank
        if worker.local_rank == 0:
            self.facts = {"place": self.place, "node": worker.node_rank, "rank": worker.rank, **node.collect()}
        try:
            self.device = devices.choose_device(worker)
            torch.zeros(1, device=self.device)
        except (UserError, RuntimeError) as error:
            self._note_unusable(error)
        try:
            self.backend = devices.choose_backend(worker, join.backend)
        except UserError as error:
            self._note_unusable(error)
        findings = self._look_at_network()
        self.findings += findings if self.facts else []

    def _note_unusable(self, error: Exception) -> None:
        self.usable, self.device = False, torch.device("cpu")
        self.findings.append(from_error(f"rank {self.worker.rank}, {self.place}", error))

    def _look_at_network(self) -> list[Finding]:
        """The findings about this node's interfaces. One that cannot work is taken out of the options and the
        environment, so that the nodes can meet all the same."""
        layout = self.worker.layout
        findings = diagnosis.judge_network(self.place, network.local_addresses(), layout.nodes)
        if wrong := interfaces.wrong_here(self.join, self.backend, layout):
            findings.append(Finding("error", self.place, *wrong))
            self.join = replace(self.join, interface=None)
            for variable in interfaces.VARIABLES.values():
                os.environ.pop(variable, None)
        return findings

    def measured(self) -> dict:
        """Measure this rank's device, and return all that the other ranks should know, as plain JSON."""
        rank = None
        try:
            rank = speed.rank_facts(self.worker.rank, self.device)
        except RuntimeError as error:
            self._note_unusable(error)
        return {"facts": self.facts, "rank": rank, "usable": self.usable, "findings": [*map(vars, self.findings)]}


def place(worker: Worker) -> str:
    """This node, for messages: "node 1 (nodeb)"."""
    return f"node {worker.node_rank} ({socket.gethostname()})"
