"""A process's place among the members of a run that may come and go (--elastic), kept over all generations."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.elastic.standby import DEAD, Standby, states
from common.elastic.state import InMemoryState
from common.join.handshake import LEADER
from common.join.store import OpenStore, split
from common.join.view import RESUME, difference, layout_of
from common.launch.addresses import host_and_port
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.version import versions

CONNECT_SECONDS = 5.0  # at most, for an attempt of gloo to reach another member, which was there a moment ago
CONNECT_ATTEMPTS = 5  # of gloo, to reach a rank that has ended meanwhile
LATE_SECONDS = 10.0  # at most, for a rank whose machine answers, but for which a collective has waited
ADDRESSES = "addresses"  # of all members' standbys, a key of each member's own
COMPARED = ("layout", "versions", "flags", "data")  # what a process claims that wants to be let in


class Change(Exception):
    """Raised on every rank between two steps: processes that wait are let in, and the ranks `leaving` leave, because of
    `why`."""

    def __init__(self, leaving: Collection[int] = (), why: str = ""):
        super().__init__(why)
        self.leaving, self.why = leaving, why


@dataclass
class Numbers:
    """The numbers of ranks and nodes that a run has given. They are not given again."""

    ranks: int = 0  # as the launchers have placed them, and then in the order in which they were let in
    nodes: int = 0
    joined: dict[str, int] = field(default_factory=dict)  # node ranks of the machines that have joined, by `launch`
    expected: int = 0  # processes that are there or may come again
    layout: dict[str, str] = field(default_factory=dict)  # with which the run was started

    def node_of(self, launch: str) -> int:
        """The node rank of a machine that joins."""
        if launch not in self.joined:
            self.joined[launch], self.nodes = self.nodes, self.nodes + 1
        return self.joined[launch]

    def next_rank(self) -> int:
        self.ranks, self.expected = self.ranks + 1, self.expected + 1
        return self.ranks - 1


@dataclass
class Membership:
    """What this process knows of the members, and how long it waits for one."""

    original: Worker  # as the launcher has placed it; with --join, as it was let in
    options: JoinOptions
    standby: Standby
    gpu: str = ""  # the UUID of this process's, which no other one may have
    generation: int = 0
    has_worked_in: int = 0  # the last generation whose ranks were connected
    # Where the rank that leads the run was, while this process prepares to be let in: it loads its data and builds its
    # model by itself.
    prepares_for: str = ""
    # What this process has loaded, by name, which others must have too; None before that.
    loaded: dict[str, str] | None = None
    numbers: Numbers = field(default_factory=Numbers)
    views: list[dict] = field(default_factory=list)  # of this generation's members, by rank
    rank: int = -1  # in this generation
    opened: OpenStore | None = None  # where the members of this generation meet
    main: Any = None  # the store at --master-addr, which this process may serve
    cause: str = ""  # of the last change
    has_led: bool = False  # this process, and has said how others join
    ends: str = ""  # why the run must save and end; empty while enough members are left
    state: InMemoryState | None = None  # of the optimisation
    interrupts: Any = None  # what handles signals, over all generations
    newcomers_wait: bool = False  # and may be let in between two steps
    asked_to_stop: bool = False  # by somebody who waits at this process's standby (--stop)
    leaving: Collection[int] = ()  # ranks of this generation that are not in the next one, by their own will
    is_connecting: bool = False  # the ranks of this generation: one may learn much later than another that this failed
    # Standbys at which a process that waits may find the leader; in a generation that joins, those of its ranks.
    leaders: list[str] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def has_number(self) -> bool:
        """Whether it has a rank and a node rank: a machine that joins is given them when it is let in (--join)."""
        return not self.original.layout.joins or bool(self.generation)

    @property
    def address(self) -> str:
        return self.standby.address

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""
        return self.state.step if self.state else 0

    def work_with(self, rank: int, views: list[dict]) -> None:
        """Note the members of a generation that begins, and this process's rank among them."""
        self.rank, self.views, self.newcomers_wait, self.leaving = rank, views, False, ()
        self.standby.store.set(ADDRESSES, json.dumps([address_of(view) for view in views]))
        self.standby.store.set(LEADER, address_of(views[0]))
        self.standby.post_run(self.run())
        self.standby.forget_generations(self.has_worked_in)  # a rank of that one may still say why it has ended
        self.has_worked_in = self.generation

    @property
    def staying(self) -> list[dict]:
        """The views of the ranks that are to be in the next generation."""
        return [view for view in self.views if view["rank"] not in self.leaving]

    def store_ports(self, views: list[dict]) -> list[int]:
        """Of the stores that these members serve, and of that at --master-addr."""
        url = self.original.layout.init_method
        main = [host_and_port(url)[1]] if url.startswith("tcp://") else []
        return [split(address_of(view))[1] for view in views] + main

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
        layout, agreed = self.original.layout, self.options.agreed_flags or {}
        flags = {name: value for name, value in agreed.items() if name != RESUME}
        sections = {"versions": versions(), "flags": flags, "data": self.loaded or {}}
        return sections if layout.joins else {"layout": layout_of(layout), **sections}

    def run(self) -> dict[str, Any]:
        """What somebody outside of the run must know, who wants to join it or to end it (--join, --stop)."""
        here = split(self.address)[0]
        meets = self.original.layout.init_method.replace("tcp://0.0.0.0:", f"tcp://{here}:")
        members = [address_of(view) for view in self.views]
        return {"flags": dict(self.options.flags), "size": self.original.run_size, "meets": meets, "members": members}

    def read_new(self) -> None:
        """Read who has come to the standby. Refuse those whose layout, flags, versions or data are not the run's."""
        self.standby.look()
        for number, one in list(self.standby.waiting.items()):
            if one.get("stop"):
                self.asked_to_stop = True
            elif "claim" in one and self.loaded is not None and (problem := self._difference(one)):
                self.standby.answer(number, {"refused": problem})

    def _difference(self, one: dict) -> str | None:
        other = {**one, "rank": one["original"], "nodes": self.numbers.nodes, **one["claim"]}
        mine = {**self.views[self.rank], "nodes": self.numbers.nodes, **self.claim(), "layout": self.numbers.layout}
        return difference(mine, other, tuple(section for section in COMPARED if section in one["claim"]))

    def admissible(self, gone: Collection[int] = ()) -> list[tuple[int, dict]]:
        """(number, what it has written) of those that wait, whose rank and GPU no member holds that is not `gone`."""
        if self.loaded is None:  # with which theirs would be compared
            return []
        waiting = [(number, one) for number, one in sorted(self.standby.waiting.items()) if "claim" in one]
        return [(number, one) for number, one in waiting if self.holder(one, gone) is None]

    def holder(self, one: dict, gone: Collection[int] = ()) -> dict | None:
        """The view of the member that is not `gone`, and has the rank or the GPU of one that waits."""
        has_its_gpu = {view["rank"] for view in self.views if view["gpu"] and view["gpu"] == one["gpu"]}
        for view in self.views:
            if view["rank"] not in gone and (view["original"] == one["original"] or view["rank"] in has_its_gpu):
                return view
        return None


def address_of(view: dict) -> str:
    """Where the standby of a rank is."""
    return view["addresses"]["standby"]
