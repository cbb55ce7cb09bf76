"""A process's place among the members of a run that may come and go (--elastic), kept over all generations."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.elastic.standby import DEAD, Standby, states
from common.elastic.state import InMemoryState
from common.join.store import OpenStore
from common.join.view import RESUME, difference, layout_of
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.version import versions

CONNECT_SECONDS = 5.0  # at most, for an attempt of gloo to reach another member, which was there a moment ago
CONNECT_ATTEMPTS = 5  # of gloo, to reach a rank that has ended meanwhile
LATE_SECONDS = 10.0  # at most, for a rank whose machine answers, but for which a collective has waited
ADDRESSES = "addresses"  # of all members' standbys, a key of each member's own


class LetIn(Exception):
    """Raised on every rank between two steps, so that processes that wait are let in."""


@dataclass
class Membership:
    """What this process knows of the members, and how long it waits for one."""

    original: Worker  # as the launcher has placed it
    options: JoinOptions
    standby: Standby
    generation: int = 0
    views: list[dict] = field(default_factory=list)  # of this generation's members, by rank
    rank: int = -1  # in this generation
    opened: OpenStore | None = None  # where the members of this generation meet
    main: Any = None  # the store at --master-addr, which this process may serve
    cause: str = ""  # of the last change
    ends: str = ""  # why the run must save and end; empty while enough members are left
    state: InMemoryState | None = None  # of the optimisation
    interrupts: Any = None  # what handles signals, over all generations
    newcomers_wait: bool = False  # and may be let in between two steps
    is_connecting: bool = False  # the ranks of this generation: one may learn much later than another that this failed
    # Standbys at which a process that waits may find the leader; in a generation that joins, those of its ranks.
    leaders: list[str] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def address(self) -> str:
        return self.standby.address

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""
        return self.state.step if self.state else 0

    def work_with(self, rank: int, views: list[dict]) -> None:
        """Note the members of a generation that begins, and this process's rank among them."""
        self.rank, self.views, self.newcomers_wait = rank, views, False
        self.standby.store.set(ADDRESSES, json.dumps([address_of(view) for view in views]))

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks of a generation that joins have ended meanwhile."""
        known = states([self.leaders[rank] for rank in ranks])
        return [rank for rank, state in zip(ranks, known, strict=True) if state == DEAD]

    # --- how long to wait -------------------------------------------------------------------------------------------

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Use while the ranks of a generation are connected. `is_connecting` stays true where that fails."""
        self.is_connecting = True
        yield
        self.is_connecting = False

    @property
    def connect_seconds(self) -> float:
        """For one attempt to reach another member."""
        return min(self.options.timeout_seconds, CONNECT_SECONDS)

    @property
    def collective_seconds(self) -> float:
        """How long a collective waits for a rank; the others may wait `_late_seconds` more for it, --timeout in all."""
        return self.options.timeout_seconds - self._late_seconds

    @property
    def _late_seconds(self) -> float:
        """The end of --timeout, in which a rank may still come that a collective has waited for."""
        return min(LATE_SECONDS, self.options.timeout_seconds / 2)

    def patience_seconds(self, late: bool) -> float:
        """How long to wait for a member that is alive. `late` where a collective has waited for it already."""
        if self.is_connecting:
            return CONNECT_ATTEMPTS * self.connect_seconds
        return self._late_seconds if late else self.options.timeout_seconds

    # --- those that wait at this process's standby ------------------------------------------------------------------

    def claim(self) -> dict[str, dict[str, str]]:
        """What must be the same as in the run that this process wants to enter."""
        flags = {name: value for name, value in (self.options.agreed_flags or {}).items() if name != RESUME}
        return {"layout": layout_of(self.original.layout), "versions": versions(), "flags": flags}

    def read_new(self) -> None:
        """Read who has come to the standby. Refuse those whose layout, flags or versions differ from this run's."""
        self.standby.look()
        for number, one in list(self.standby.waiting.items()):
            if "claim" in one and (problem := self._difference(one)):
                self.standby.answer(number, {"refused": problem})

    def _difference(self, one: dict) -> str | None:
        other = {**one, "rank": one["original"], "nodes": self.original.layout.nodes, **one["claim"]}
        return difference({**self.views[self.rank], **self.claim()}, other, tuple(one["claim"]))

    def admissible(self, gone: Collection[int] = ()) -> list[tuple[int, dict]]:
        """(number, what it has written) of those that wait, and whose rank no member holds that is not `gone`."""
        held = {view["original"] for view in self.views if view["rank"] not in gone}
        return [(number, one) for number, one in sorted(self.standby.waiting.items()) if one["original"] not in held]


def address_of(view: dict) -> str:
    """Where the standby of a rank is."""
    return view["addresses"]["standby"]
