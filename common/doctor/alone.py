"""What a rank finds out alone, before it joins: its node, its network interface, its device."""

import os
import socket
from dataclasses import dataclass, field, replace

import torch

from common.doctor import diagnosis, node, speed
from common.doctor.finding import Finding, from_error
from common.errors import UserError
from common.join import devices, interfaces, network
from common.launch.layout import Worker
from common.launch.options import JoinOptions


@dataclass
class Alone:
    """What a rank has found before it joins."""

    join: JoinOptions  # without an interface that cannot work, so that the nodes can still meet
    facts: dict  # of the node; empty on all but its first rank
    device: torch.device
    backend: str
    usable: bool = True  # False: this rank cannot train, and takes part in the examination on the CPU
    findings: list[Finding] = field(default_factory=list)

    def note_unusable(self, where: str, error: Exception) -> None:
        self.usable, self.device = False, torch.device("cpu")
        self.findings.append(from_error(where, error))


def place(worker: Worker) -> str:
    """This node, for messages: "node 1 (nodeb)"."""
    return f"node {worker.node_rank} ({socket.gethostname()})"


def look(worker: Worker, join: JoinOptions) -> Alone:
    """Look at this node, and choose the device and backend as the trainers do. What fails becomes a finding."""
    first_here = worker.local_rank == 0
    about = {"place": place(worker), "node": worker.node_rank, "rank": worker.rank}
    facts = {**about, **node.collect()} if first_here else {}
    mine = Alone(join, facts, torch.device("cpu"), join.backend)
    where = _where(worker)
    try:
        mine.device = devices.choose_device(worker)
        torch.zeros(1, device=mine.device)
    except (UserError, RuntimeError) as error:
        mine.note_unusable(where, error)
    try:
        mine.backend = devices.choose_backend(worker, join.backend)
    except UserError as error:
        mine.note_unusable(where, error)
    findings = _look_at_network(worker, mine)
    mine.findings += findings if first_here else []
    return mine


def measured(worker: Worker, mine: Alone) -> dict:
    """Measure this rank's device, and return all that the other ranks should know, as plain JSON."""
    rank = None
    try:
        rank = speed.rank_facts(worker.rank, mine.device)
    except RuntimeError as error:
        mine.note_unusable(_where(worker), error)
    findings = [finding.as_dict() for finding in mine.findings]
    return {"facts": mine.facts, "rank": rank, "usable": mine.usable, "findings": findings}


def _look_at_network(worker: Worker, mine: Alone) -> list[Finding]:
    """The findings about this node's interfaces. One that cannot work is taken out of the options and the environment,
    so that the nodes can meet all the same."""
    here = place(worker)
    findings = diagnosis.judge_network(here, network.local_addresses(), worker.layout.nodes)
    if wrong := interfaces.wrong_here(mine.join, mine.backend, worker.layout):
        findings.append(Finding("error", here, *wrong))
        mine.join = replace(mine.join, interface=None)
        for variable in interfaces.VARIABLES.values():
            os.environ.pop(variable, None)
    return findings


def _where(worker: Worker) -> str:
    return f"rank {worker.rank}, {place(worker)}"
