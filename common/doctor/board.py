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
        self.store.set(f"{stage}/{self.rank}", json.dumps(value))
        self._wait(stage, everyone, seconds)
        posts = {}
        for rank in everyone:
            if self.store.check([f"{stage}/{rank}"]):
                posts[rank] = json.loads(self.store.get(f"{stage}/{rank}"))
            else:
                self.silent[rank] = stage
        return posts

    def barrier(self, stage: str, ranks: Iterable[int], seconds: float) -> None:
        """Wait until all of `ranks` have called this, at most `seconds`. Each of them must call this."""
        self.store.set(f"{stage}/{self.rank}", "")
        self._wait(stage, ranks, seconds)

    def _wait(self, stage: str, ranks: Iterable[int], seconds: float) -> None:
        keys = [f"{stage}/{rank}" for rank in ranks]
        self.waiting_for = [f"rank {rank}" for rank in ranks if rank != self.rank]
        poll(lambda: self.store.check(keys), seconds)
        self.waiting_for = []

    def findings(self, places: dict[int, str]) -> list[Finding]:
        """A finding for each rank that stopped answering."""
        fix = "see its log: is the process alive, and does the link to its node work?"
        return [
            Finding("error", f"rank {rank}, {places[rank]}", f"stopped answering while {stage}", fix)
            for rank, stage in self.silent.items()
        ]

    def leave(self) -> None:
        """Rank 0, whose process may hold the store, leaves last. Every rank must call this."""
        self.store.add("left", 1)
        if self.rank == 0:
            expected = self.world_size - len(self.silent)
            poll(lambda: self.store.add("left", 0) >= expected, LEAVE_SECONDS)
