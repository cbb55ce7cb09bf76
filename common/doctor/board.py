"""How the ranks exchange what they have found: on the store of the join, without a process group."""

import json
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from common.doctor.finding import Finding
from common.join.waiting import poll

LEAVE_SECONDS = 3.0


class Board:
    """One rank's access to the exchange. A rank that does not answer in time is left out."""

    def __init__(self, rank: int, world_size: int, store: dist.Store):
        self.rank, self.world_size, self.store = rank, world_size, dist.PrefixStore("doctor", store)
        self.silent: dict[int, str] = {}  # rank -> the stage in which it stopped answering
        self.waiting_for: list[str] = []  # ranks, while this one waits

    def exchange(self, stage: str, value: object, seconds: float) -> dict[int, Any]:
        """Post `value` (JSON) and return every rank's, by rank. Every rank must call this.

        A rank that does not post within `seconds` is left out from then on.
        """
        everyone = [rank for rank in range(self.world_size) if rank not in self.silent]
        self.barrier(stage, everyone, seconds, json.dumps(value))
        here = [rank for rank in everyone if self.store.check([f"{stage}/{rank}"])]
        self.silent |= {rank: stage for rank in everyone if rank not in here}
        return {rank: json.loads(self.store.get(f"{stage}/{rank}")) for rank in here}

    def barrier(self, stage: str, ranks: Iterable[int], seconds: float, post: str = "") -> None:
        """Wait until all of `ranks` have called this, at most `seconds`. Each of them must call this."""
        self.store.set(f"{stage}/{self.rank}", post)
        keys = [f"{stage}/{rank}" for rank in ranks]
        self.waiting_for = [f"rank {rank}" for rank in ranks if rank != self.rank]
        poll(lambda: self.store.check(keys), seconds)
        self.waiting_for = []

    def findings(self, places: dict[int, str]) -> list[Finding]:
        """A finding for each rank that stopped answering."""
        fix = "see its log: is the process alive, and does the link to its node work?"
        found = [(f"rank {rank}, {places[rank]}", f"stopped answering while {at}") for rank, at in self.silent.items()]
        return [Finding("error", where, problem, fix) for where, problem in found]

    def leave(self) -> None:
        """Rank 0, whose process may hold the store, leaves last. Every rank must call this."""
        self.store.add("left", 1)
        if self.rank == 0:
            poll(lambda: self.store.add("left", 0) >= self.world_size - len(self.silent), LEAVE_SECONDS)
