"""The process group of a job: join, connect, work, leave.

Plain torch waits in silence when anything about a job is inconsistent. Here the ranks first open a store. The
handshake on it gives every rank the same verdict, and only then are the ranks connected. `join` and `connect` can be
called again on the open store, so that the members of a job may change (see docs/exactness.md).
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.errors import ExplainedError, RankLost, UserError, before_exit
from common.join import devices, network
from common.join import ended as ended_ranks
from common.join.connections import Connections, cut_off
from common.join.elastic.members import enter, meet_again, open_members, surviving
from common.join.elastic.membership import CONNECT_ATTEMPTS, LetIn, Membership
from common.join.handshake import RunUnderWay, shake_hands
from common.join.lost import is_contact_lost, naming_lost_rank, naming_lost_store, store_request
from common.join.store import OpenStore, open_store
from common.join.turn import Turn
from common.join.view import difference, node_of, view_of
from common.join.waiting import limit, poll
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.launch.replacing import FINISHES, WORKS

LEAVE_SECONDS = 10.0
LINGER_SECONDS = 20.0  # rank 0, whose process may serve the store, stays at most this long after an error of all ranks
VERDICT_SECONDS = 40.0  # after --join-timeout, for rank 0 to say who is missing and for the others to read it
BACKEND_SECONDS = 4.0  # after --timeout, for the backend's own message
REJOIN_SECONDS = 20.0  # for the members of the next generation, which are all there


@dataclass(frozen=True)
class Group:
    """A process group that is up: this rank's device, all ranks' views, and ways to wait that print what for."""

    worker: Worker
    device: torch.device
    backend: str
    views: list[dict]  # by rank
    store: dist.Store
    address: str  # where the ranks have met: tcp://host:port or file:///path
    options: JoinOptions
    turns: dict[str, Turn] = field(default_factory=dict)  # by name, all that have been entered
    members: Membership | None = None  # with --elastic
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed when the group ends

    @contextlib.contextmanager
    def others_wait(self, what: str) -> Iterator[None]:
        """Rank 0 runs the body first. The other ranks wait on the store and run it afterwards, so guard rank 0's work
        with `if worker.is_main`. Every rank must call this.

        When rank 0's body fails, or its heartbeat stops for --timeout, the other ranks raise the same error.
        """
        turn = self._turn(what)
        with turn.heartbeat():
            if self.worker.is_main:
                with turn.announcing("rank 0"):
                    yield
                return
            turn.wait_for("rank 0", what, watched=[0])
        yield

    @contextlib.contextmanager
    def first_on_node(self, what: str) -> Iterator[None]:
        """The first worker of each node runs the body, then the node's others: for downloads and caches. All ranks
        leave together. Every rank must call this.

        When one rank fails, or its heartbeat stops for --timeout, all ranks raise the same error.
        """
        turn = self._turn(what)
        mine = self.views[self.worker.rank]
        first = next(view["rank"] for view in self.views if node_of(view) == node_of(mine))
        with turn.heartbeat():
            with turn.announcing(f"rank {self.worker.rank}"):
                if self.worker.rank != first:
                    turn.wait_for(f"rank {first}", what, watched=[first])
                yield
            with turn.announcing(f"rank {self.worker.rank} waits"):
                turn.wait_for_all(f"{what} on the other nodes")

    @contextlib.contextmanager
    def each_at_its_own_pace(self, what: str) -> Iterator[Callable[[], None]]:
        """Every rank runs the body, and all leave together: for work that takes one rank far longer than another.
        Every rank must call this.

        Yields a function to call between long pieces of work: it raises the failure that another rank has announced.
        When one rank fails, or its heartbeat stops for --timeout, all ranks raise the same error.
        """
        turn = self._turn(what)
        with turn.heartbeat():
            with turn.announcing(f"rank {self.worker.rank}"):
                yield turn.raise_failure
                turn.raise_failure()
            with turn.announcing(f"rank {self.worker.rank} waits"):
                turn.wait_for_all(what)

    @property
    def ranks_of_nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        nodes: dict[tuple[int, str], list[int]] = {}
        for view in self.views:
            nodes.setdefault(node_of(view), []).append(view["rank"])
        return list(nodes.values())

    def numbers(self, name: str) -> Callable[[], Iterator[int]]:
        """A function whose result counts 0, 1, 2, ... for all ranks together: each number goes to one rank only.

        Each call counts anew. Every rank must call the function as often as the others.
        """
        rounds = itertools.count()
        most = self.options.timeout_seconds, self.worker.rank, store_request(self.worker, self.views)
        instead = (lambda: cut_off(self.store)) if self.members else None

        def count() -> Iterator[int]:
            key = f"{name}/{next(rounds)}"
            while True:
                with limit(*most, instead=instead):
                    number = self.store.add(key, 1) - 1
                yield number

        return count

    def agree(self, **values: object) -> None:
        """Raise the same UserError on every rank unless these values are the same on all. Every rank must call this."""
        view = {**self.views[self.worker.rank], "agree": {name: str(value) for name, value in values.items()}}
        views: list[dict] = [{}] * self.worker.world_size
        dist.all_gather_object(views, view)
        for other in views[1:]:
            if problem := difference(views[0], other, ("agree",)):
                raise UserError(problem, same_on_every_rank=True)

    @property
    def has_failed(self) -> bool:
        """True if this rank knows of an announced failure."""
        return any(turn.failure for turn in self.turns.values())

    def let_in(self) -> NoReturn:
        """Between two steps: end this generation, and let processes in that wait. Every rank must call this."""
        raise LetIn

    def _turn(self, what: str) -> Turn:
        name = f"{what}/{len(self.turns)}"
        limits = self.options.timeout_seconds, self.options.work_timeout_seconds
        goes_on = self.members is not None
        turn = self.turns[name] = Turn(name, self.store, self.worker, self.views, *limits, goes_on)
        return turn


@contextlib.contextmanager
def process_group(worker: Worker, options: JoinOptions) -> Iterator[Group]:
    """Join the job, give the body a `Group`, and leave in order. Every rank must call this.

    Raises UserError on every rank when the nodes do not agree, RunError when one is missing at --join-timeout, or when
    a rank is lost.
    """
    device, backend, problem = choose(worker, options)
    members: Membership | None = None
    if options.elastic:
        opened, members = open_members(worker, options)
        joined = _join_members(members, worker, options, opened, device, backend, problem)
    else:
        opened = open_store(worker, options)
        with naming_lost_store(worker):
            joined = join(worker, options, opened, device, backend, problem)
    # Where rank 0 listens on all of its addresses, show the one that the others reach.
    address = worker.layout.init_method.replace("tcp://0.0.0.0:", f"tcp://{joined.own_address}:")
    group = Group(worker, device, backend, joined.views, joined.store, address, options, members=members)
    connections = Connections()
    lost = (
        surviving(members, worker, joined.views, joined.store, connections, lambda: disconnect(worker, joined, members))
        if members
        else naming_lost_rank(worker, joined.views, joined.store, connections)
    )
    with _finishing(group), lost:  # a rank that is lost is named before what is left is closed
        with members.connecting() if members else contextlib.nullcontext():
            connect(worker, options, device, backend, joined, members)
        connections.note()
        try:
            yield group
        except ExplainedError as error:
            if error.same_on_every_rank and not group.has_failed:  # all ranks know of an announced failure already
                before_exit(error, lambda: _wait_until_all_have_left(worker, joined.store, LINGER_SECONDS))
            raise
        disconnect(worker, joined, members)
    if worker.is_main and worker.layout.init_method.startswith("file://"):
        Path(worker.layout.init_method.removeprefix("file://")).unlink(missing_ok=True)


@contextlib.contextmanager
def _finishing(group: Group) -> Iterator[None]:
    """Close what is to be closed when the group ends; the supervisor of this node waits for that."""
    worker = group.worker
    if worker.board:
        worker.board.note(worker, WORKS)
    with group.at_end:
        try:
            yield
        finally:
            if worker.board:
                worker.board.note(worker, FINISHES)
    if worker.board:
        worker.board.note(worker, WORKS)  # the trainer's own code; after an error it is about to end


def choose(worker: Worker, options: JoinOptions) -> tuple[torch.device, str, str]:
    """(device, backend, problem). On one of several nodes an error becomes `problem`, which the join reports on every
    node. Where this node is the only one, it is raised as UserError."""
    try:
        if worker.layout.problem:
            raise UserError(worker.layout.problem)
        devices.check_interface(options.interface)
        return devices.choose_device(worker), devices.choose_backend(worker, options.backend), ""
    except UserError as error:
        if worker.layout.nodes == 1:
            raise
        return torch.device("cpu"), "gloo", str(error)


@dataclass(frozen=True)
class Joined:
    """What the handshake gives: a store of this generation alone, every rank's view, and this node's address."""

    store: dist.Store
    views: list[dict]  # by rank
    own_address: str  # under which the other nodes reach this one


def join(
    worker: Worker,
    options: JoinOptions,
    opened: OpenStore,
    device: torch.device,
    backend: str,
    problem: str = "",
    generation: int = 0,
    members: Membership | None = None,
) -> Joined:
    """Do the handshake with all ranks, without connecting them yet. Every rank must call this.

    A `problem` of this rank ends the run on every rank, so that no other rank waits for this one. Raises
    UserError or RunError on every rank, as `process_group` does. May be called again on the same store, with the next
    `generation` on every rank.
    """
    addresses = {"own": opened.own_address, "master": opened.master_address}
    if members:
        addresses["standby"] = members.address
        if backend == "nccl":
            problem = problem or "--elastic: NCCL's ranks cannot be connected anew yet: use --backend gloo"
    view = view_of(worker, options, device, backend, addresses, problem)
    seconds = options.join_timeout_seconds
    instead = (lambda: cut_off(opened.store)) if generation else None  # the others of a run that goes on are left
    with limit(seconds + VERDICT_SECONDS, worker.rank, "joining (--join-timeout)", instead=instead):
        where = opened.store, view, seconds, opened.leads, options.secret, generation
        ended = members.ended if members and generation else None
        verdict = shake_hands(worker, *where, elastic=members is not None, ended=ended)
    own = opened.own_address
    if not options.interface and network.is_local(verdict.master_address or "localhost"):
        own = verdict.master_address or own  # the master's own workers take the address that other nodes have reached
    _name_interface(options, own)
    return Joined(verdict.store, verdict.views, own)


def _join_members(
    members: Membership,
    worker: Worker,
    options: JoinOptions,
    opened: OpenStore,
    device: torch.device,
    backend: str,
    problem: str,
) -> Joined:
    """As `join`, for ranks that come and go. Raises MembersChanged where a run is under way, and where a member is lost
    while the next generation joins."""
    if not members.generation:
        try:
            with naming_lost_store(worker):
                return join(worker, options, opened, device, backend, problem, members=members)
        except RunUnderWay as run:
            leader = run.leader
        raise enter(members, leader)
    soon = replace(options, join_timeout_seconds=min(options.join_timeout_seconds, REJOIN_SECONDS))
    try:
        return join(worker, soon, opened, device, backend, problem, members.generation, members)
    except (RankLost, RuntimeError) as error:
        if not (isinstance(error, RankLost) or is_contact_lost(error)):
            raise
    raise meet_again(members)


def _name_interface(options: JoinOptions, own_address: str) -> None:
    """Tell gloo and NCCL the interface that reaches the other ranks, where the user named none.

    gloo would resolve this machine's host name instead, which is often 127.0.1.1 or nothing at all.
    """
    interface = options.interface or network.interface_of(own_address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def connect(
    worker: Worker,
    options: JoinOptions,
    device: torch.device,
    backend: str,
    joined: Joined,
    members: Membership | None = None,
) -> None:
    """Connect the ranks after `join`. Every rank must call this. To join again, first `disconnect`."""
    # The backend has the same timeout and a better error message: this limit is a little longer. A member that is lost
    # now must not end the others (--elastic): gloo tries several times, each as long.
    attempt = members.connect_seconds if members else options.timeout_seconds
    seconds = attempt * (CONNECT_ATTEMPTS if members else 1) + BACKEND_SECONDS
    with limit(seconds, worker.rank, "connecting the ranks (--timeout)"):
        try:
            dist.init_process_group(
                backend,
                store=joined.store,
                rank=worker.rank,
                world_size=worker.world_size,
                timeout=timedelta(seconds=attempt),
                device_id=device if backend == "nccl" else None,
            )
        except RuntimeError:
            _forget_failed_group()
            raise
    if members:
        _set_timeout(members.collective_seconds)


def _set_timeout(seconds: float) -> None:
    """Of the collectives to come."""
    has_its_name = hasattr(dist, "set_timeout")  # torch 2.11 has the function, but under another name
    set_timeout = dist.set_timeout if has_its_name else dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=seconds))


def _forget_failed_group() -> None:
    """torch counts process groups, names their keys in the store by that number, and counts one that failed too. This
    process would never meet others that have made fewer, unless it counts from 0 again, as after the end of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def disconnect(worker: Worker, joined: Joined, members: Membership | None = None) -> None:
    """Destroy the process group once all ranks are done with it (waits at most LEAVE_SECONDS): a rank that closed its
    connections earlier could break another's last collective. Every rank must call this. `join` and `connect` may
    follow."""
    instead = (lambda: cut_off(joined.store)) if members else None
    with limit(3 * LEAVE_SECONDS, worker.rank, "leaving the process group", instead=instead):
        joined.store.add("done", 1)
        poll(lambda: joined.store.add("done", 0) >= worker.world_size, LEAVE_SECONDS)
        dist.destroy_process_group()
        _wait_until_all_have_left(worker, joined.store, LEAVE_SECONDS)


def _wait_until_all_have_left(worker: Worker, store: dist.Store, seconds: float) -> None:
    """Rank 0, whose process may serve the store, leaves last: another that runs may still make requests to it."""
    store.add("left", 1)
    if worker.is_main:
        poll(lambda: store.add("left", 0) + len(ended_ranks.posted(store)) >= worker.world_size, seconds)
