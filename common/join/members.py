"""Members that come and go (--elastic): who is there, who leads, and how the others find out.

The time between two changes of the members is a *generation*. Each process serves a small store of its own, its
*standby*, whose address all members learn in the handshake. When a rank is lost, the survivors meet at the standby of
the lowest rank that is left, which leads. When a process comes (back), it waits at the standby of the rank that leads,
which lets it in between two steps (standby.py). The leader writes the address of its standby into the store at
--master-addr, where a process that comes looks for it.
"""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from common.console import say
from common.errors import MembersChanged, RankLost, RunEnded, RunError, UserError
from common.join import ended, network
from common.join.connections import Connections
from common.join.handshake import LEADER, leader_in
from common.join.lost import TIMEOUTS, in_words, is_contact_lost, within
from common.join.standby import (
    ALIVE,
    ANSWER_SECONDS,
    DEAD,
    SILENT,
    Standby,
    Visit,
    reach,
    reach_unless_dead,
    split,
    states,
)
from common.join.store import OpenStore, open_store, serve
from common.join.view import RESUME, difference, layout_of, node_of, place, places
from common.join.waiting import Every, poll
from common.launch.addresses import host_and_port, tcp_address
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.version import versions

CONNECT_SECONDS = 5.0  # at most, for an attempt of gloo to reach another member, which was there a moment ago
CONNECT_ATTEMPTS = 5  # of gloo, to reach a rank that has ended meanwhile
SILENT_SECONDS = 2.0  # without an answer from its machine: then the others go on without a rank
LATE_SECONDS = 10.0  # at most, for a rank whose machine answers, but for which a collective has waited
CAUSE_SECONDS = 0.3  # for the supervisor of a lost rank to post why it has ended
LOOK_SECONDS = 0.25  # between two looks of the leader for processes that have come
COMPLETE_SECONDS = 1.0  # without another one, after which the processes that have come are let in
ADDRESSES = "addresses"  # of all members' standbys
NOBODY_LEADS = {"nobody": "leads"}
LEADS = "leads"  # is there while the rank leads a change
DISMISS_SECONDS = 3.0  # after the run, for processes that are about to come
NOBODY_SECONDS = 20.0  # without an answer from any member, after which a process that waits gives up


class LetIn(Exception):
    """Raised on every rank between two steps, so that processes that wait are let in."""


@dataclass
class Membership:
    """This process's place among the members, kept over all generations."""

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
    held: Any = None  # the state of the optimisation, for the record room
    interrupts: Any = None  # the signals that have come, for the record room
    copies: list[int] = field(default_factory=list)  # ranks with files on their node's own disk, for the record room
    newcomers_wait: bool = False  # and may be let in between two steps
    is_connecting: bool = False  # the ranks of this generation: one may learn much later than another that this failed
    leaders: list[str] = field(default_factory=list)  # standbys at which a process that waits may find the leader

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def address(self) -> str:
        return self.standby.address

    # --- joining --------------------------------------------------------------------------------------------------

    def enter(self, leader: str) -> MembersChanged:
        """Wait at the standby of the rank that leads until it lets this process in."""
        rank, seconds, began = self.original.rank, self.options.join_timeout_seconds, time.monotonic()
        say("the run is under way: waiting to be let in between two steps", rank)
        self.leaders, heard = [leader], began
        while (left := seconds - (time.monotonic() - began)) > 0:
            board = self.original.board  # which other workers of this node keep up to date
            known = [_leader_at(self.original.layout.init_method), board.leader if board else "", *self.leaders]
            for address in dict.fromkeys(known):
                store = reach(address) if address else None
                if store is not None:
                    heard = time.monotonic()
                    with suppress(RuntimeError, ValueError):  # its process has ended: another one leads
                        if store.check([ADDRESSES]):
                            self.leaders = json.loads(store.get(ADDRESSES))
                        if verdict := self._attend(store, left):
                            change = self._change(store, verdict)
                            if change.worker.local_rank == 0:
                                first = places([{**verdict["members"][0], "rank": 0, "nodes": 1}])
                                say(f"let in; the log of the run is that of {first}", change.worker.rank)
                            return change
            if time.monotonic() - heard > NOBODY_SECONDS:
                raise RunError("no member of the run answers any more: has it ended? See the logs of the other nodes")
            time.sleep(LOOK_SECONDS)
        raise RunError(f"the members of the run have let nobody in for {seconds:.0f} s (--join-timeout): see their log")

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

    def _patience_seconds(self, late: bool) -> float:
        """How long to wait for a member that is alive. `late` where a collective has waited for it already."""
        if self.is_connecting:
            return CONNECT_ATTEMPTS * self.connect_seconds
        return self._late_seconds if late else self.options.timeout_seconds

    @contextmanager
    def surviving(
        self,
        worker: Worker,
        views: list[dict],
        store: dist.Store,
        connections: Connections,
        leave: Callable[[], None],
    ) -> Iterator[None]:
        """Use while the members of a generation work, whose `views` are by rank. Raises MembersChanged after a rank was
        lost, and where members are to change. `leave` leaves the process group in order."""
        self.rank, self.views, self.newcomers_wait = worker.rank, views, False
        if worker.board:
            worker.board.leader = address_of(views[0])
        self.standby.store.set(ADDRESSES, json.dumps([address_of(view) for view in views]))
        try:
            with self._looking(connections):
                yield
        except LetIn:
            leave()
            change = self.meet()
        except Exception as error:
            if not (is_contact_lost(error) or isinstance(error, RankLost)):
                if getattr(error, "same_on_every_rank", False):
                    self._dismiss()
                else:
                    cause = ended.cause_of(error)
                    within(ANSWER_SECONDS, lambda: ended.post(store, worker.rank, cause))
                raise
            connections.close()  # the other ranks, which may wait for this one, notice it now
            if dist.is_initialized():
                dist.destroy_process_group()
            late = any(sign in str(error) for sign in TIMEOUTS)
            change = self.meet(lambda states: _why(states, views, store), late)
        else:
            self._dismiss()
            return
        raise change

    @contextmanager
    def _looking(self, connections: Connections) -> Iterator[None]:
        """While the body runs, the leader looks for processes that have come. It, and the first member on node 0, keep
        the store at --master-addr."""
        stop = threading.Event()
        on_master = [view["rank"] for view in self.views if view["node_rank"] == 0]
        thread = None
        if self.leads or self.rank in on_master[:1]:
            target, given = (self._look, (stop, connections)) if self.leads else (self._keep_announcing, (stop,))
            thread = threading.Thread(target=target, args=given, name="members", daemon=True)
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if thread:
                thread.join(3 * ANSWER_SECONDS)

    def _keep_announcing(self, stop: threading.Event) -> None:
        while not stop.wait(1.0):
            self._announce()

    def _look(self, stop: threading.Event, connections: Connections) -> None:
        members = {address_of(view) for view in self.views}
        came = dict[int, int]()  # number -> the optimizer steps done when it came
        is_time, last, count = Every(1.0), time.monotonic(), 0
        while not stop.wait(LOOK_SECONDS):
            self._read_new()
            if any(one["standby"] in members for one in self.standby.waiting.values()):
                connections.close()  # a member waits for this one, which has not noticed yet
                return
            for number, one in list(self.standby.waiting.items()):
                self._refuse_twice(number, one, came.setdefault(number, self._step))
            able = len(self._admissible())
            if able != count:
                last, count = time.monotonic(), able
            self.newcomers_wait = bool(count) and time.monotonic() - last > COMPLETE_SECONDS
            if is_time():
                self._announce()

    def _announce(self) -> None:
        """Write where the leader is into the store at --master-addr. Serve one there, where this is node 0 and the
        process that did has ended."""
        host, port = host_and_port(self.original.layout.init_method)
        store = reach(f"{'127.0.0.1' if host == '0.0.0.0' else host} {port}")
        with suppress(RuntimeError, OSError):
            if store is None and self.original.layout.node_rank == 0:
                store = self.main = serve(host, port)
            if store is not None and leader_in(store) != address_of(self.views[0]):
                store.set(LEADER, address_of(self.views[0]))

    def _read_new(self) -> None:
        self.standby.look()
        for number, one in list(self.standby.waiting.items()):
            if "claim" in one and (problem := self._difference(one)):
                self.standby.answer(number, {"refused": problem})

    def _difference(self, one: dict) -> str | None:
        """What a process that waits has otherwise than this run: its layout, a flag, a version."""
        other = {**one, "rank": one["original"], "nodes": self.original.layout.nodes, **one["claim"]}
        return difference({**self.views[self.rank], **self._claim()}, other, tuple(one["claim"]))

    def _claim(self) -> dict[str, dict[str, str]]:
        """What must be the same as in the run that this process wants to enter."""
        flags = {name: value for name, value in (self.options.agreed_flags or {}).items() if name != RESUME}
        return {"layout": layout_of(self.original.layout), "versions": versions(), "flags": flags}

    @property
    def _step(self) -> int:
        return self.held.step if self.held else 0

    def _refuse_twice(self, number: int, one: dict, step_then: int) -> None:
        """Refuse a process whose rank another one holds, once that one is known to be alive: steps were done since."""
        holder = next((view for view in self.views if view["original"] == one["original"]), None)
        if holder and self._step > step_then + 1:
            problem = f"rank {one['original']} is in the run already: {place(holder)}, pid {holder['pid']}"
            self.standby.answer(number, {"refused": problem})

    def _admissible(self, gone: Collection[int] = ()) -> list[tuple[int, dict]]:
        """Those that wait, and whose rank no member holds that is not `gone`."""
        held = {view["original"] for view in self.views if view["rank"] not in gone}
        return [(number, one) for number, one in sorted(self.standby.waiting.items()) if one["original"] not in held]

    def _dismiss(self) -> None:
        """The run is over: tell the processes that wait. Where a rank was lost, the one that replaces it may only just
        be coming."""
        if not self.leads:
            return

        def everyone_waits() -> bool:
            self._read_new()
            return len(self.views) + len(self.standby.waiting) >= self.original.world_size

        poll(everyone_waits, DISMISS_SECONDS)
        numbers = list(self.standby.waiting)
        for number in numbers:
            self.standby.answer(number, {"ended": True})
        poll(lambda: self.standby.store.add("dismissed", 0) >= len(numbers), ANSWER_SECONDS)

    # --- a change of the members ------------------------------------------------------------------------------------

    def meet(self, lost: Callable[[dict[int, str]], str] | None = None, late: bool = False) -> MembersChanged:
        """Agree with the other members on those of the next generation. `lost` says in words what has happened to
        ranks; None between two steps, when others are to be let in. `late` where a collective of this rank has
        waited for another one for too long. Raises RunError where this process must end."""
        if not self.views:  # it was let in, but has never worked
            return self.enter(self.leaders[0])
        frozen: set[int] = set()
        until = time.monotonic() + SILENT_SECONDS
        for view in self.views:
            if view["rank"] == self.rank:
                return self._change(self.standby.store, self._lead(lost, frozen, late))
            address = address_of(view)  # where it has ended too, the next rank leads
            while (store := reach_unless_dead(address, until)) is not None:
                with suppress(RuntimeError):
                    if verdict := self._attend(
                        store, self.options.join_timeout_seconds, self._patience_seconds(late), late
                    ):
                        return self._change(store, verdict)
                    frozen.add(view["rank"])
                    break
        raise RunError("the other members of this run cannot be reached, and go on without this rank if they can")

    def _attend(self, store: dist.Store, seconds: float, patience: float = math.inf, late: bool = False) -> dict | None:
        """Come to the standby of the rank that leads, and wait for its verdict. None where it does not begin to lead
        within `patience` seconds: a frozen process, whose store may answer all the same."""
        layout = self.original.layout
        me = {
            "standby": self.address,
            "original": self.original.rank,
            "node_rank": layout.node_rank,
            "host": socket.gethostname(),
            "predecessor": self.original.predecessor,
            "late": late,
        }
        if not self.views:
            me["claim"] = self._claim()
        visit, began = Visit(store, me, self.options.secret), time.monotonic()

        def answer() -> dict | None:
            if verdict := visit.verdict():
                return verdict
            if time.monotonic() - began < patience or store.check([LEADS]):
                return None
            # Where it has gone on without this rank, this one waits to be let in.
            return NOBODY_LEADS if self.address in json.loads(store.get(ADDRESSES)) else None

        found = poll(answer, seconds, longest_pause_seconds=0.1) or NOBODY_LEADS
        if found is NOBODY_LEADS:
            visit.leave()
            return None
        return found

    def _lead(self, lost: Callable[[dict[int, str]], str] | None, frozen: Collection[int], late: bool) -> dict:
        """Wait for the members that are alive, decide, say so, and tell them."""
        self.standby.store.set(LEADS, "")
        here, missing = self._wait_for_members(frozen, late)
        problem = self._minority(here, missing)  # the members that are here read it too
        new = [] if problem else self._newcomers(missing)
        members = [_member(self.views[rank]) for rank in sorted(here)] + [_member(one) for _, one in new]
        causes = [lost(missing)] if lost else []
        if new:
            who = places({**one, "rank": one["original"], "nodes": self.original.layout.nodes} for _, one in new)
            before = " and ".join(sorted({one["predecessor"] for _, one in new if one["predecessor"] and not lost}))
            causes.append(f"let in {who}" + f", whose process {before}" * bool(before))
        minimum = self.options.elastic or 1
        few = f"{len(members)} of {self.original.world_size} ranks are left, fewer than --elastic {minimum}"
        verdict = {
            "generation": self.generation + 1,
            "members": members,
            "cause": "; ".join(causes) or "the process that was to be let in has ended",
            "ends": few if len(members) < minimum else "",
            "problem": problem,
            "address": self.address,
            "lost": [self.views[rank] for rank, state in missing.items() if state != DEAD],
        }
        if not problem:
            say(f"members  {verdict['cause']}", rank=0)
        told = {one["standby"] for one in members}
        for number in [number for number, one in self.standby.waiting.items() if one["standby"] in told]:
            self.standby.answer(number, verdict)
        self.standby.store.delete_key(LEADS)
        return verdict

    def _minority(self, here: set[int], missing: dict[int, str]) -> str:
        """Why this side of a network that is split must not go on: the other one may; empty where it may go on."""
        voters = len(self.views) - list(missing.values()).count(DEAD)
        if 2 * len(here) > voters or (2 * len(here) == voters and 0 in here):
            return ""
        who = places(self.views[rank] for rank in sorted(missing))
        return (
            f"lost contact with {who}: these may go on, and {len(here)} of {voters} ranks are no majority, so this "
            "side ends: is the network split? Start it again where the others are not running"
        )

    def _wait_for_members(self, frozen: Collection[int], late: bool) -> tuple[set[int], dict[int, str]]:
        """(here, missing): the ranks that have come to this one, and what is known of the others. It waits for one that
        is busy, at most --timeout (longer where it may not know yet that connecting has failed; less where a collective
        has waited for it already, `late` here or on another rank), and for one that is silent, two seconds; not for
        those that are `frozen`."""
        ranks = {address_of(view): view["rank"] for view in self.views}
        began = time.monotonic()
        heard = dict.fromkeys(ranks.values(), began)
        pause = 0.02
        while True:
            self._read_new()
            present = [one for one in self.standby.waiting.values() if one["standby"] in ranks]
            here = {self.rank, *(ranks[one["standby"]] for one in present)}
            late = late or any(one.get("late") for one in present)
            missing = [rank for rank in ranks.values() if rank not in here]
            known = dict(zip(missing, states([address_of(self.views[rank]) for rank in missing]), strict=True))
            now = time.monotonic()
            heard |= {rank: now for rank, state in known.items() if state == ALIVE}
            silent = [rank for rank in missing if now - heard[rank] > SILENT_SECONDS]
            is_over = now - began > self._patience_seconds(late)
            if is_over or all(known[rank] == DEAD or rank in silent or rank in frozen for rank in missing):
                return here, known
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)

    def _newcomers(self, gone: Collection[int]) -> list[tuple[int, dict]]:
        """The processes that wait and are alive, by their original ranks; of several with one rank the last."""
        waiting = self._admissible(gone)
        found = states([one["standby"] for _, one in waiting])
        alive = [one for one, state in zip(waiting, found, strict=True) if state == ALIVE]
        last = {one["original"]: (number, one) for number, one in alive}
        for number, one in waiting:
            if last.get(one["original"], (0, one))[0] != number:  # it has died, or was replaced
                del self.standby.waiting[number]
        return [last[original] for original in sorted(last)]

    def _change(self, store: dist.Store, verdict: dict) -> MembersChanged:
        """This process's place in the next generation. Raises RunError where there is none, RunEnded after the run."""
        if "ended" in verdict:
            store.add("dismissed", 1)
            raise RunEnded("the run has ended meanwhile, without this rank")
        if "refused" in verdict:
            raise UserError(f"this run is under way, and {verdict['refused']}", same_on_every_rank=True)
        if verdict["problem"]:
            raise RunError(verdict["problem"], same_on_every_rank=True)
        for view in verdict["lost"]:
            self._end_frozen(view)
        self.generation, self.cause, self.ends = verdict["generation"], verdict["cause"], verdict["ends"]
        members, layout = verdict["members"], self.original.layout
        rank = next(index for index, one in enumerate(members) if one["standby"] == self.address)
        mine = node_of(members[rank])
        here = [index for index, one in enumerate(members) if node_of(one) == mine]
        host, port = split(verdict["address"])
        changed = replace(
            layout,
            world_size=len(members),
            first_rank=here[0],
            local_world_size=len(here),
            first_local_rank=0,
            gpus_per_node=None,
            init_method=f"tcp://{tcp_address(host, port)}",
            spawn=False,
        )
        self.opened = OpenStore(store, split(self.address)[0], "" if rank == 0 else host, leads=rank == 0)
        self.leaders = [one["standby"] for one in members]
        worker = replace(
            self.original,
            layout=changed,
            rank=rank,
            local_rank=here.index(rank),
            membership=self,
            originals=tuple(one["original"] for one in members),
        )
        return MembersChanged(worker)

    def _end_frozen(self, view: dict) -> None:
        """End a process of this machine that is alive and counts as lost: it would hold the run's files, and go on by
        itself when it wakes up. Its supervisor starts another one."""
        mine = self.views[self.rank] if self.views else {"pid_space": "", "host": ""}
        is_here = (view["pid_space"], view["host"]) == (mine["pid_space"], mine["host"])
        if is_here and view["pid"] != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(view["pid"], signal.SIGKILL)


def open_members(worker: Worker, options: JoinOptions) -> tuple[OpenStore, Membership]:
    """Where to join, and this process's membership. Raises MembersChanged where it was let into a run under way."""
    if worker.membership:
        return worker.membership.opened, worker.membership
    if worker.board and worker.board.leader:  # other workers of this node are members
        member = _membership(worker, options, network.own_address(options.interface))
        raise member.enter(worker.board.leader)
    opened = open_store(worker, options)
    here, host = opened.own_address, host_and_port(worker.layout.init_method)[0]
    if worker.layout.nodes != 1 and _is_loopback(here) and not _is_loopback(host):
        here = network.own_address(options.interface)  # node 0's workers reach the store by loopback, the others do not
    return opened, _membership(worker, options, here, opened)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _membership(worker: Worker, options: JoinOptions, host: str, opened: OpenStore | None = None) -> Membership:
    standby = Standby(host, options.secret)
    return Membership(worker, options, standby, opened=opened, main=opened and opened.store)


def _member(view: dict) -> dict:
    """What a verdict says of a member; `view` is its view, or what it has written at the standby."""
    standby = view["standby"] if "standby" in view else address_of(view)
    return {"standby": standby, **{name: view[name] for name in ("original", "node_rank", "host")}}


def _why(states: dict[int, str], views: list[dict], store: dist.Store) -> str:
    """What has happened to these ranks, in words."""
    if not states:
        return "a connection was lost"

    def posted() -> dict[int, str]:
        return poll(lambda: states.keys() <= (found := ended.posted(store)).keys() and found, CAUSE_SECONDS) or {}

    causes = within(ANSWER_SECONDS, posted) or {}
    silent = {SILENT: "does not answer", ALIVE: "did not stop its step within --timeout"}
    words = {rank: causes.get(rank) or silent.get(state, "") for rank, state in states.items()}
    return f"lost {places(views[rank] for rank in sorted(states))}: {in_words(words)}"


def address_of(view: dict) -> str:
    """Where the standby of a rank is."""
    return view["addresses"]["standby"]


def _leader_at(url: str) -> str:
    """The address of the standby of the rank that leads, from the store at --master-addr; empty where it has none."""
    host, port = host_and_port(url)
    store = reach(f"{host} {port}")
    if store is None:
        return ""
    with suppress(RuntimeError):
        return leader_in(store)
    return ""
