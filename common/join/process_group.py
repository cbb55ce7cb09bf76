"""The process group of a job: join, connect, work, leave.

Plain torch waits in silence when anything about a job is inconsistent. Here the ranks first open a store. The
handshake on it gives every rank the same verdict, and only then are the ranks connected. `join` and `connect` can be
called again on the open store, so that the members of a job may change (see docs/exactness.md).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import MembersChanged, UserError
from common.join import devices, interfaces, network
from common.join.connections import Connections, cut_off, ports_of
from common.join.ended import leave, post
from common.join.handshake import Handshake
from common.join.lost import naming_lost_rank, naming_lost_store, others_have_lost_contact, store_request
from common.join.store import OpenStore, open_store
from common.join.turn import Turn, Written, in_time
from common.join.view import difference, node_of, view_of
from common.join.waiting import limit, poll
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.launch.replacing import FINISHES, WORKS
from common.launch.within import within
from common.launch.worker import explain

LEAVE_SECONDS = 10.0
VERDICT_SECONDS = 40.0  # after --join-timeout, for rank 0 to say who is missing and for the others to read it
BACKEND_SECONDS = 4.0  # after --timeout, for the backend's own message
NOTICE_SECONDS = 2.0  # in which a rank in a collective notices that a connection is closed
LEFT_EARLY = (
    "left the training loop before the others: let the same number decide on every rank, such as run.is_done or one "
    "that is summed over all ranks"
)


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
    turns: Iterator[int] = field(default_factory=itertools.count)  # numbers of those to come
    since_all_met: list[Written] = field(default_factory=list)  # by this rank; all ranks may still need it
    others_go_on: bool = False  # without a rank that is lost (--elastic)
    connections: Connections = field(default_factory=Connections)  # to the other ranks, which are not there yet
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed when the group ends

    @contextlib.contextmanager
    def others_wait(self, what: str) -> Iterator[None]:
        """Rank 0 runs the body first. The other ranks wait on the store and run it afterwards, so guard rank 0's work
        with `if worker.is_main`. Every rank must call this.

        When rank 0's body fails, it ends, or its heartbeat stops for --timeout, the other ranks raise the same error.
        """
        turn = self._turn(what)
        with turn.heartbeat():
            if self.worker.is_main:
                with turn.announcing("rank 0"), self.in_time(what):
                    yield
                return
            turn.wait_for("rank 0", what, watched=[0])
        with self.in_time(f"this rank's own part of the work of {what},"):
            yield

    def in_time(self, what: str) -> contextlib.AbstractContextManager[None]:
        """End this rank if the body takes --work-timeout and more, after which the others have given up. For work on
        files, whose disk may hang: alone on its node, this rank would stay. A run of one rank has no such limit."""
        return in_time(self.worker, self.options.work_timeout_seconds, what)

    @contextlib.contextmanager
    def first_on_node(self, what: str) -> Iterator[None]:
        """The first worker of each node runs the body, then the node's others: for downloads and caches. All ranks
        leave together. Every rank must call this.

        When one rank fails or ends, or its heartbeat stops for --timeout, all ranks raise the same error.
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
    def run_independently(
        self, what: str, each_says_after_seconds: float | None = None
    ) -> Iterator[Callable[[], None]]:
        """Every rank runs the body, and all leave together: for work that takes one rank far longer than another.
        Every rank must call this. The first rank of each node says now and then for what it waits; with
        `each_says_after_seconds`, every rank does.

        Yields a function to call between long pieces of work: it raises the failure that another rank has announced.
        When one rank fails or ends, or its heartbeat stops for --timeout, all ranks raise the same error.
        """
        turn = self._turn(what)
        if each_says_after_seconds is not None:
            turn.say_every_seconds, turn.speaks = each_says_after_seconds, True
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

    def shared_counter(self, name: str) -> Callable[[], Iterator[int]]:
        """A function whose result counts 0, 1, 2, ... for all ranks together: each number goes to one rank only.

        Each call counts anew. Every rank must call the function as often as the others.
        """
        rounds = itertools.count()
        most = self.options.timeout_seconds, self.worker.rank, store_request(self.worker, self.views)
        instead = (lambda: cut_off(self.store)) if self.others_go_on else None

        def count() -> Iterator[int]:
            key = f"{name}/{next(rounds)}"
            if self.worker.is_main:
                self.since_all_met.append(Written(self.store, key))
            while True:
                with limit(*most, instead=instead):
                    number = self.store.add(key, 1) - 1
                yield number

        return count

    def all_come(self, what: str) -> bool:
        """Whether all ranks come here, within ten seconds of the first one; the same on every rank. For collectives
        where a rank may be alone. Every rank that is not lost must call this."""
        key = f"come/{what}/{next(self.turns)}"
        with limit(2 * LEAVE_SECONDS, self.worker.rank, what, instead=lambda: cut_off(self.store)):
            if self.store.add(key, 1) == self.worker.world_size:
                self.store.compare_set(f"{key}/verdict", "", "all")
            poll(lambda: self.store.check([f"{key}/verdict"]), LEAVE_SECONDS)
            return self.store.compare_set(f"{key}/verdict", "", "alone") == b"all"  # the first one to set it counts

    def agree(self, **values: object) -> None:
        """Raise the same UserError on every rank unless these values are the same on all. Every rank must call this."""
        view = {**self.views[self.worker.rank], "agree": {name: str(value) for name, value in values.items()}}
        views: list[dict] = [{}] * self.worker.world_size
        dist.all_gather_object(views, view)
        for other in views[1:]:
            if problem := difference(views[0], other, ("agree",)):
                raise UserError(problem, same_on_every_rank=True)

    def _turn(self, what: str) -> Turn:
        limits = self.options.timeout_seconds, self.options.work_timeout_seconds
        where = f"{what}/{next(self.turns)}", self.store, self.worker, self.views
        return Turn(*where, *limits, self.others_go_on, self.since_all_met, self.connections)


@contextlib.contextmanager
def process_group(worker: Worker, options: JoinOptions) -> Iterator[Group]:
    """Join the job, give the body a `Group`, and leave in order. Every rank must call this.

    Raises UserError on every rank when the nodes do not agree, RunError when one is missing at --join-timeout, or when
    a rank is lost.
    """
    device, backend, problem = choose(worker, options)
    opened = open_store(worker, options)
    with naming_lost_store(worker):
        joined = join(worker, options, opened, device, backend, problem)
    group = group_of(worker, options, device, backend, joined)
    connections = group.connections
    # A rank that is lost is named before what is left is closed.
    with finishing(group), naming_lost_rank(worker, joined.views, joined.store, connections):
        connect(worker, options, device, backend, joined)
        connections.note(*ports_of(joined.store))
        wait_for_connected(backend)
        yield group
        disconnect(worker, joined, connections)


def group_of(
    worker: Worker, options: JoinOptions, device: torch.device, backend: str, joined: "Joined", elastic: bool = False
) -> Group:
    """The group that `connect` will make of those that have joined."""
    # Where rank 0 listens on all of its addresses, show the one that the others reach.
    address = worker.layout.init_method.replace("tcp://0.0.0.0:", f"tcp://{joined.own_address}:")
    return Group(worker, device, backend, joined.views, joined.store, address, options, others_go_on=elastic)


@contextlib.contextmanager
def finishing(group: Group) -> Iterator[None]:
    """Close what is to be closed when the group ends, for at most --work-timeout; the supervisor of this node waits for
    that."""
    worker, raised = group.worker, list[BaseException]()

    def give_up() -> int | None:
        """Do what would follow, and return the exit code."""
        within(LEAVE_SECONDS, group.at_end.close)  # the rest of it
        return explain(worker, raised[0]) if raised and not isinstance(raised[0], MembersChanged) else None

    if worker.board:
        worker.board.note(worker, WORKS)
    with contextlib.ExitStack() as limited, group.at_end:
        try:
            yield
        except BaseException as error:
            raised.append(error)
            raise
        finally:
            if worker.board:
                worker.board.note(worker, FINISHES)
            most = group.options.work_timeout_seconds, worker.rank
            limited.enter_context(
                limit(*most, "what this rank writes in the end (--work-timeout)", before_exit=give_up)
            )
    if worker.board:
        worker.board.note(worker, WORKS)  # the trainer's own code; after an error it is about to end


def choose(worker: Worker, options: JoinOptions) -> tuple[torch.device, str, str]:
    """(device, backend, problem). On one of several nodes an error becomes `problem`, which the join reports on every
    node. Where this node is the only one, it is raised as UserError."""
    try:
        if worker.layout.problem:
            raise UserError(worker.layout.problem)
        backend = devices.choose_backend(worker, options.backend)
        if not worker.membership:  # later the variables are those that `name_interface` has set
            interfaces.check(options, backend, worker.layout)
        return devices.choose_device(worker), backend, ""
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
    standby: str = "",
    ended: Callable[[Sequence[int]], list[int]] | None = None,
) -> Joined:
    """Do the handshake with all ranks, without connecting them yet. Every rank must call this.

    A `problem` of this rank ends the run on every rank, so that no other rank waits for this one. Raises
    UserError or RunError on every rank, as `process_group` does. May be called again on the same store, with the next
    `generation` on every rank. With --elastic, `standby` is where the others can reach this process, and `ended` says
    which of the ranks that are to join again have ended.
    """
    addresses = {"own": opened.own_address, "master": opened.master_address}
    if standby:
        addresses["standby"] = standby
    view = view_of(worker, options, device, backend, addresses, problem)
    seconds = options.join_timeout_seconds
    instead = (lambda: cut_off(opened.store)) if generation else None  # the others of a run that goes on are left
    with limit(seconds + VERDICT_SECONDS, worker.rank, "joining (--join-timeout)", instead=instead):
        where = opened.store, view, seconds, opened.leads, options.secret, generation
        try:
            verdict = Handshake(worker, *where, elastic=bool(standby), ended=ended).run()
        finally:
            opened.forget()
    own = opened.own_address
    if not options.interface and network.is_local(verdict.master_address or "localhost"):
        own = verdict.master_address or own  # the master's own workers take the address that other nodes have reached
    interfaces.name_interface(worker, options, own)
    return Joined(verdict.store, verdict.views, own)


def connect(
    worker: Worker,
    options: JoinOptions,
    device: torch.device,
    backend: str,
    joined: Joined,
    attempt_seconds: float | None = None,
    attempts: int = 1,
) -> None:
    """Connect the ranks after `join`. Every rank must call this. To join again, first `disconnect`.

    The backend may try several times, each as long as `attempt_seconds`, by default --timeout.
    """
    devices.spare_ddp(worker, backend)
    attempt = attempt_seconds or options.timeout_seconds
    # The backend has the same timeout and a better error message: this limit is a little longer.
    with limit(attempt * attempts + BACKEND_SECONDS, worker.rank, "connecting the ranks (--timeout)"):
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


def wait_for_connected(backend: str) -> None:
    """Wait until all ranks are connected: gloo's are so one by one, and one that ended early would leave those that
    still do. Every rank must call this, after it has noted its connections."""
    if backend == "gloo":
        dist.barrier()


def set_timeout(seconds: float) -> None:
    """Of the collectives to come."""
    has_its_name = hasattr(dist, "set_timeout")  # torch 2.11 has the function, but under another name
    set_it = dist.set_timeout if has_its_name else dist.distributed_c10d._set_pg_timeout
    set_it(timedelta(seconds=seconds))


def _forget_failed_group() -> None:
    """torch counts process groups, names their keys in the store by that number, and counts one that failed too. This
    process would never meet others that have made fewer, unless it counts from 0 again, as after the end of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def disconnect(worker: Worker, joined: Joined, connections: Connections | None = None) -> None:
    """Destroy the process group once all ranks are done with it (waits at most LEAVE_SECONDS): a rank that closed its
    connections earlier could break another's last collective. Every rank must call this. `join` and `connect` may
    follow.

    A rank that is not done by then has work of its own, or waits in a collective for this rank, which will not come.
    The `connections` to it, if they are gloo's, are closed; where it waited, both raise UserError. Without
    `connections` (--elastic) the others go on, also where the store does not answer."""
    instead = None if connections else (lambda: cut_off(joined.store))
    with limit(3 * LEAVE_SECONDS + NOTICE_SECONDS, worker.rank, "leaving the process group", instead=instead):
        joined.store.add("done", 1)
        all_are = poll(lambda: joined.store.add("done", 0) >= worker.world_size, LEAVE_SECONDS)
        if connections and not all_are:
            post(joined.store, worker.rank, LEFT_EARLY, is_mistake=True)
            if dist.get_backend() == dist.Backend.GLOO:  # NCCL's are needed to take its communicator down
                connections.close()
            if poll(lambda: others_have_lost_contact(joined.store), NOTICE_SECONDS):
                raise UserError(f"this rank {LEFT_EARLY}")
        dist.destroy_process_group()
        leave(worker, joined.views, joined.store, LEAVE_SECONDS)
