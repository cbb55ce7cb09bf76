"""The join: from one process's place to a process group that everyone agrees on, or one clear error.

Plain torch waits when anything about a job is inconsistent. Here a store comes first, and every rank posts its
*view* there: rank and layout, flags that must agree, versions, host, device. Rank 0 checks the views and every
rank gets the same verdict: go on, or one message that names the node, the field and both values.

The protocol, on a store that may still hold the keys of a run that died (torchrun's restarts, a file://):

    everyone   n = add(entries); set(n/view)
    rank 0     set(n/challenge, token)           for each entry; the token is new in each run
    everyone   set(n/response, token)            only the living answer, so the dead do not count
    rank 0     all ranks alive once, all views agree?  set(token/verdict)

and `init_process_group` runs under a prefix of that token, so that it never meets old keys either.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import cli, devices, meeting_file, network
from common.errors import RunError, UserError, before_exit
from common.layout import Worker, host_and_port, tcp_address
from common.report import say
from common.version import versions

SAY_EVERY_SECONDS = 4.0
POLL_SECONDS = 0.03
SIGN_SECONDS = 1.0
ANSWER_SECONDS = 4.0  # in which a store that is one answers its first question
LOCAL_DISK_SECONDS = 6.0  # a file:// that other machines do not see is given up after so long
LINGER_SECONDS = 4.0  # rank 0 stays so long after a refusal, for nodes that come late to hear it


@dataclass(frozen=True)
class Group:
    """A process group that is up: device, backend, every rank's view, and waits that say what they wait for."""

    worker: Worker
    device: torch.device
    backend: str
    views: list[dict]  # by rank
    store: dist.Store
    work_timeout_seconds: float
    timeout_seconds: float  # of one collective, and of the silence of a rank at work
    address: str  # where rank 0 met the others: tcp://host:port or file:///path
    turns: dict[str, int] = field(default_factory=dict)
    failures: dict[str, dict] = field(default_factory=dict)  # by turn, of this rank or heard of
    hearing: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def others_wait(self, what: str) -> Iterator[None]:
        """Rank 0 runs the body at its leisure; the other ranks wait on the store until it is done, not in a
        collective that times out. Every rank must enter; guard the work with `if worker.is_main`.

        When rank 0's body fails, the others raise UserError or RunError with the same message; when it gives no sign
        of life for --timeout, they say so.
        """
        turn = self._turn(what)
        if self.worker.is_main:
            with self._giving_signs(turn), self._announcing(turn, "rank 0"):
                yield
        else:
            with self._giving_signs(turn):
                self._wait(turn, "rank 0", what, watched=[0])
            yield

    @contextlib.contextmanager
    def first_on_node(self, what: str) -> Iterator[None]:
        """The first worker of each node runs the body first, then the node's others: for downloads and caches.

        Every rank must enter, and leaves when all have been through. When one fails, or gives no sign of life for
        --timeout, all raise the same.
        """
        turn = self._turn(what)
        mine = self.views[self.worker.rank]
        leader = next(view["rank"] for view in self.views if _node(view) == _node(mine))
        with self._giving_signs(turn):
            with self._announcing(turn, f"rank {self.worker.rank}"):
                if self.worker.rank != leader:
                    self._wait(turn, f"rank {leader}", what, watched=[leader])
                yield
            with self._announcing(turn, f"rank {self.worker.rank} waits"):
                self._all_through(turn, f"{what} on the other nodes")

    @contextlib.contextmanager
    def each_at_its_own_pace(self, what: str) -> Iterator[Callable[[], None]]:
        """Every rank runs the body, and leaves when all have been through: for work that takes one rank far longer
        than another. A rank that has done its part waits on the store, not in a collective that times out.

        The body gets a function to call between long pieces of work: it raises what another rank has announced as
        failed. Every rank must enter. When one fails, or gives no sign of life for --timeout, all raise the same.
        """
        turn = self._turn(what)
        with self._giving_signs(turn):
            with self._announcing(turn, f"rank {self.worker.rank}"):
                yield lambda: self._raise_failure(turn)
                self._raise_failure(turn)
            with self._announcing(turn, f"rank {self.worker.rank} waits"):
                self._all_through(turn, what)

    def _all_through(self, turn: str, what: str) -> None:
        """Wait until every rank has come here; the last one opens the door, so that each asks for one key only.

        Rank 0 watches all the others, and they watch rank 0: what it finds ends its process, or is announced.
        """
        if self.store.add(f"{turn}/through", 1) == self.worker.world_size:
            self.store.set(f"{turn}/all", "done")
        self._wait(turn, "all", what, watched=range(self.worker.world_size) if self.worker.is_main else [0])

    @contextlib.contextmanager
    def _giving_signs(self, turn: str) -> Iterator[None]:
        """Beside the body, count in the store: a collective would notice that a rank has died, a store does not. And
        hear of failures, for rank 0 leaves soon after one, with the store, while the body may still be at work."""
        over = threading.Event()

        def give_signs() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: the body will meet that
                while not over.wait(SIGN_SECONDS):
                    with limit(self.timeout_seconds, self.worker, "a question to the store (--timeout)"):
                        self.store.add(f"{turn}/signs/{self.worker.rank}", 1)
                        self._hear(turn)

        thread = threading.Thread(target=give_signs, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _silence(self, turn: str, watched: Iterable[int]) -> Callable[[], None]:
        """A function that raises RunError when one of these ranks has given no sign for --timeout."""
        last = {rank: (0, time.monotonic()) for rank in watched}
        looked = time.monotonic()

        def watch() -> None:
            nonlocal looked
            now = time.monotonic()
            if now - looked < SIGN_SECONDS:
                return
            looked = now
            for rank, (count, since) in last.items():
                if (signs := self.store.add(f"{turn}/signs/{rank}", 0)) != count:
                    last[rank] = signs, now
                elif now - since > self.timeout_seconds:
                    silence = f"has given no sign of life for {self.timeout_seconds:.0f} s (--timeout)"
                    raise RunError(f"{_place(self.views[rank])} {silence}: see its log")

        return watch

    def agree(self, **fields: object) -> None:
        """Raise the same UserError on every rank unless these values are the same on all. Collective."""
        view = {**self.views[self.worker.rank], "agree": {name: str(value) for name, value in fields.items()}}
        views = [None] * self.worker.world_size
        dist.all_gather_object(views, view)
        for other in views[1:]:
            if problem := _difference(views[0], other, ("agree",)):
                raise UserError(problem, same_on_every_rank=True)

    def _turn(self, what: str) -> str:
        number = self.turns[what] = self.turns.get(what, 0) + 1
        return f"turn/{what}/{number}"

    @contextlib.contextmanager
    def _announcing(self, turn: str, name: str) -> Iterator[None]:
        """Tell the others when the body is done, or what went wrong."""
        try:
            yield
            self.store.set(f"{turn}/{name}", "done")
        except BaseException as error:
            before_exit(error, lambda: self._linger(turn))
            mistake = isinstance(error, UserError) and not isinstance(error, RunError)
            failure = {"error": str(error) or type(error).__name__, "mistake": mistake}
            with self.hearing:
                if turn in self.failures:  # another rank has announced it
                    raise
                self.failures[turn] = failure
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                self.store.set(f"{turn}/failed", json.dumps(failure))
                self.store.add(f"{turn}/heard", 1)
            raise

    def _linger(self, turn: str) -> None:
        """Rank 0 stays for a while, until all have heard of a failure: the store may end with its process."""
        deadline = time.monotonic() + LINGER_SECONDS
        while self.worker.is_main and time.monotonic() < deadline:
            if self.store.add(f"{turn}/heard", 0) >= self.worker.world_size:
                return
            time.sleep(POLL_SECONDS)

    def _wait(self, turn: str, key: str, what: str, watched: Iterable[int]) -> None:
        """Wait until the store has this key of the turn, saying what for. Raises what another rank has announced as
        failed, and RunError where one of the `watched` gives no sign of life."""
        watch = self._silence(turn, watched)

        def ready() -> bool:
            watch()
            return self.store.check([f"{turn}/{key}"])

        with limit(self.work_timeout_seconds + LINGER_SECONDS, self.worker, f"the wait for {what} (--work-timeout)"):
            self._poll(turn, ready, what)

    def _hear(self, turn: str) -> dict | None:
        """The failure in this turn that is known, of this rank or another; the store counts who has heard of it."""
        with self.hearing:
            if turn not in self.failures and self.store.check([f"{turn}/failed"]):
                self.failures[turn] = json.loads(self.store.get(f"{turn}/failed"))
                self.store.add(f"{turn}/heard", 1)
            return self.failures.get(turn)

    def _raise_failure(self, turn: str) -> None:
        """Raise what another rank has announced as failed, where one has."""
        if failure := self._hear(turn):
            error = (UserError if failure["mistake"] else RunError)(failure["error"], same_on_every_rank=True)
            before_exit(error, lambda: self._linger(turn))
            raise error

    def _poll(self, turn: str, ready: Callable[[], bool], what: str) -> None:
        began = said = time.monotonic()
        while not ready():
            self._raise_failure(turn)
            now = time.monotonic()
            if now - began > self.work_timeout_seconds:
                limit = f"{self.work_timeout_seconds:.0f} s (--work-timeout)"
                raise RunError(f"gave up waiting for {what} after {limit}: see what that rank or node says")
            if now - said > 10 * SAY_EVERY_SECONDS and self.worker.local_rank == 0:
                said = now
                say(self.worker, f"waiting for {what} ({now - began:.0f} s)")
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def limit(seconds: float, worker: Worker, what: str) -> Iterator[None]:
    """End this process with a line when the body takes longer: for calls into torch that may not come back.

    A store whose host is frozen answers no call, and NCCL's connecting knows no time-out; no limit of ours inside
    such a call would be looked at.
    """

    def give_up() -> None:
        say(worker, f"error: {what} did not end within {seconds:.0f} s: is a node frozen or cut off?", error=True)
        os._exit(RunError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def process_group(worker: Worker, args: Namespace) -> Iterator[Group]:
    """Join the job, give the body a `Group`, and leave in order. Every rank must enter.

    Raises UserError on every rank when the nodes do not agree, RunError when one is missing at --join-timeout.
    """
    device, backend, problem = prepare(worker, args)
    joined = join(worker, args, device, backend, problem)
    connect(worker, args, device, backend, joined)
    group = Group(
        worker, device, backend, joined.views, joined.store, args.work_timeout, args.timeout, _address(worker, joined)
    )
    try:
        yield group
    except UserError as error:
        if error.same_on_every_rank and not group.failures:  # of one that was announced all have heard
            before_exit(error, lambda: _wait_until_left(worker, joined.store, LINGER_SECONDS))
        raise
    _leave(worker, joined.store)


@dataclass(frozen=True)
class Joined:
    """What the handshake gives: every rank's view, a store of this run alone, and the way to the other ranks."""

    store: dist.Store
    views: list[dict]  # by rank
    own_address: str  # under which the other nodes reach this one


def prepare(worker: Worker, args: Namespace) -> tuple[torch.device, str, str]:
    """Device, backend, and what is wrong here: on one of several nodes, a mistake is told to all by the join.

    Raises UserError where this node is the only one.
    """
    try:
        if worker.layout.problem:
            raise UserError(worker.layout.problem)
        devices.check_interface(args)
        return devices.choose_device(worker), devices.choose_backend(worker, args), ""
    except UserError as error:
        if worker.layout.nodes == 1:
            raise
        return torch.device("cpu"), "gloo", str(error)


def join(worker: Worker, args: Namespace, device: torch.device, backend: str, problem: str = "") -> Joined:
    """The handshake, without a connection between the ranks yet. Every rank must call this.

    A `problem` of this rank alone ends the run on every rank, and nobody waits for a rank that is not coming.
    Raises UserError or RunError on every rank as `process_group` does.
    """
    store, addresses = _open_store(worker, args)
    view = _view(worker, args, device, backend, addresses) | {"problem": problem}
    with limit(args.join_timeout + 5 * LINGER_SECONDS, worker, "joining (--join-timeout)"):
        verdict = _Join(worker, args, store, view).run()
    own = _own_address(args, addresses, verdict)
    _name_interface(args, own)
    return Joined(dist.PrefixStore(f"job/{verdict['token']}", store), verdict["views"], own)


def connect(worker: Worker, args: Namespace, device: torch.device, backend: str, joined: Joined) -> None:
    """Connect the ranks after `join`. Every rank must call this."""
    with limit(args.timeout, worker, "connecting the ranks (--timeout)"):
        dist.init_process_group(
            backend,
            store=joined.store,
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=timedelta(seconds=args.timeout),
            device_id=device if backend == "nccl" else None,
        )


def _address(worker: Worker, joined: Joined) -> str:
    """Where the ranks have met; where rank 0 listens on all of its addresses, the one that the others reach."""
    return worker.layout.init_method.replace("tcp://0.0.0.0:", f"tcp://{joined.own_address}:")


# --- the store --------------------------------------------------------------------------------------------------


def _open_store(worker: Worker, args: Namespace) -> tuple[dist.Store, dict[str, str]]:
    """The store where the ranks meet, and the addresses {"own", "master"} of the way there."""
    url = worker.layout.init_method
    if url.startswith("file://"):
        path = meeting_file.check(url)
        own = network.own_address(args.interface)
        return dist.FileStore(str(path), worker.world_size), {"own": own, "master": ""}
    host, port = host_and_port(url)
    if not network.resolve(host):
        raise UserError(
            f"{worker.layout.meeting[0]} is {host}, which {socket.gethostname()} cannot resolve: "
            "give a name or an address"
        )
    # A rank 0 that is told another machine's address is a mistake that the join there can name: -i 0 given twice.
    if worker.is_main and worker.layout.hosts_store and network.is_local(host):
        return _serve_store(worker, host, port, args)
    own, master = _wait_for_master(worker, host, port, args.join_timeout)
    store = _connect(host, port, args.join_timeout)
    if store is None:
        raise UserError(
            f"{url} answers, but not as node 0 of a run would: another program holds that port, "
            "or --master-addr and --master-port are not those of node 0",
            same_on_every_rank=True,
        )
    return store, {"own": own, "master": master}


def _connect(host: str, port: int, timeout_seconds: float) -> dist.TCPStore | None:
    """The store that is served at host:port; None where something else listens there.

    TCPStore waits without a limit for the first answer of whatever it meets, hence the thread: it is left behind.
    """
    found: list[dist.TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
            store.check(["join/host"])
            found.append(store)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return found[0] if found else None


def _serve_store(worker: Worker, host: str, port: int, args: Namespace) -> tuple[dist.Store, dict[str, str]]:
    timeout = timedelta(seconds=args.join_timeout)
    try:
        store = dist.TCPStore(
            "localhost" if host == "0.0.0.0" else host, port, is_master=True, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "in use" not in str(error):
            raise
        raise UserError(
            f"{worker.layout.meeting[1]} {port} on {socket.gethostname()} is held by {_holder(port)}: "
            "choose another port on every node, or end that program"
        ) from None
    own = network.own_address(args.interface) if host in ("0.0.0.0", "::") else network.resolve(host)[0]
    if worker.layout.gpus_per_node and worker.layout.nodes > 1:
        address = own if host in ("0.0.0.0", "::") else host
        for node in range(1, worker.layout.nodes):
            say(worker, f"on node {node} run: {_command_for(node, address, port)}")
    alone = worker.layout.nodes == 1 and not args.interface
    return store, {"own": "127.0.0.1" if alone else own, "master": ""}


def _command_for(node: int, address: str, port: int) -> str:
    """The command line of this process as another node must type it."""
    ours = ("-i", "--node-rank", "--master-addr", "--master-port", "--interface", "--out-dir")
    kept, skip = [], False
    for part in sys.argv[1:]:
        if not skip and part.partition("=")[0] not in ours and not re.fullmatch(r"-i\d+", part):
            kept.append(part)
        skip = part in ours
    return shlex.join([sys.argv[0], *kept, "-i", str(node), "--master-addr", address, "--master-port", str(port)])


def _holder(port: int) -> str:
    """Who listens on a local port: a run of ours says so itself in its store."""
    store = _connect("127.0.0.1", port, ANSWER_SECONDS)
    if store is not None and store.check(["join/host"]):
        return f"another run of ours ({store.get('join/host').decode()})"
    return "another program"


def _wait_for_master(worker: Worker, host: str, port: int, timeout_seconds: float) -> tuple[str, str]:
    """Wait until something listens at host:port, saying so. Returns our address and its, on that connection."""
    began = said = time.monotonic()
    while True:
        try:
            return network.source_address(host, port, timeout_seconds=2.0)
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        first = "node 0" if worker.layout.nodes else "rank 0"
        where = f"the master ({first}) at {tcp_address(host, port)} does not answer: {reason}"
        if now - began > timeout_seconds:
            raise RunError(
                f"{where}, for {timeout_seconds:.0f} s (--join-timeout): is {first} started, "
                f"and are {', '.join(dict.fromkeys(worker.layout.meeting))} and the firewall right?",
                same_on_every_rank=True,
            )
        if now - said > SAY_EVERY_SECONDS and worker.local_rank == 0:
            said = now
            say(worker, f"{where}; trying for {timeout_seconds - (now - began):.0f} s more")
        time.sleep(0.2)


def _own_address(args: Namespace, addresses: dict[str, str], verdict: dict) -> str:
    """Where the other ranks reach this node. The master's own workers take what the other nodes have reached."""
    if not args.interface and network.is_local(verdict["master"] or "localhost"):
        return verdict["master"] or addresses["own"]
    return addresses["own"]


def _name_interface(args: Namespace, own_address: str) -> None:
    """Tell gloo and NCCL the interface that reaches the other ranks, where the user named none.

    gloo would resolve this machine's host name instead, and that is often 127.0.1.1 or nothing at all.
    """
    interface = args.interface or network.interface_of(own_address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# --- the handshake ----------------------------------------------------------------------------------------------

LAYOUT_FIELDS = {"gpus_per_node": "-g/--gpus", "world_size": "world size", "nodes": "-n/--nodes"}


def _view(worker: Worker, args: Namespace, device: torch.device, backend: str, addresses: dict) -> dict:
    """What this rank believes, as plain JSON."""
    unchecked = args.node_flags | set(LAYOUT_FIELDS) | {"gpus", "node_flags"}
    flags = {name: value for name, value in vars(args).items() if name not in unchecked}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "nodes": worker.layout.nodes,
        "node_rank": worker.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"{device} ({name})",
        "gpu": "" if device.type == "cpu" or args.oversubscribe else str(torch.cuda.get_device_properties(device).uuid),
        "source": worker.layout.source,
        "addresses": addresses,
        "layout": {label: _shown(getattr(worker.layout, name)) for name, label in LAYOUT_FIELDS.items()},
        "versions": versions(),
        "backend": {"--backend": backend},
        "flags": {f"--{name.replace('_', '-')}": _shown(value) for name, value in flags.items()},
    }


def _shown(value: object) -> str:
    """A flag's value as a person would type it: (8, 2) as 8,2."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _node(view: dict) -> tuple:
    return view["node_rank"], view["host"]


def _place(view: dict) -> str:
    if view["nodes"] == 0:  # nobody tells the number of the node
        return f"{view['host']} (rank {view['rank']})"
    return f"node {view['node_rank']} ({view['host']}, rank {view['rank']})"


def _difference(first: dict, other: dict, sections: tuple[str, ...]) -> str | None:
    """The first field in which two views differ, as a sentence with both nodes and both values."""
    for section in sections:
        for name in first[section] | other[section]:
            mine, theirs = (view[section].get(name, "not given") for view in (first, other))
            if mine != theirs:
                places = f"{_place(other)} has {name} {theirs}, but {_place(first)} has {mine}"
                return f"{places}: make them the same on every node"
    return None


class _Join:
    """One rank's side of the handshake."""

    def __init__(self, worker: Worker, args: Namespace, store: dist.Store, view: dict):
        self.worker, self.args, self.store, self.view = worker, args, store, view
        self.began = self.said = time.monotonic()
        self.on_local_disk = _on_local_disk(worker)
        usual = args.join_timeout == cli.JOIN_TIMEOUT_SECONDS
        self.patience_seconds = LOCAL_DISK_SECONDS if self.on_local_disk and usual else args.join_timeout

    def run(self) -> dict:
        """Post our view and wait for the verdict; rank 0 also presides. Returns {"token", "master", "views"}."""
        self.entry = self.store.add("join/entries", 1)
        self.view["entry"] = self.entry
        self.store.set(f"join/{self.entry}/view", json.dumps(self.view))
        presiding = _Presider(self) if self.worker.is_main else None
        token = ""
        while True:
            if presiding:
                presiding.advance()
            token = self._answer_challenge(token)
            if token and (verdict := self._read(f"join/{token}/verdict")):
                break
            self._check_closed(token)
            self._check_time(presiding)
            time.sleep(POLL_SECONDS)
        verdict = json.loads(verdict)
        self.store.add(f"join/{token}/heard", 1)
        if presiding:
            presiding.linger(verdict)
        if problem := verdict.get("problem"):
            error = RunError if verdict.get("missing") else UserError
            raise error(problem, same_on_every_rank=True)
        holder = verdict["views"][self.worker.rank]
        if holder["entry"] != self.entry:  # came while the others were hearing the verdict
            raise UserError(_claimed_twice(holder, self.view))
        return verdict

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _answer_challenge(self, token: str) -> str:
        latest = self._read(f"join/{self.entry}/challenge") or ""
        if latest != token:
            self.store.set(f"join/{self.entry}/response", latest)
        return latest

    def _check_closed(self, token: str) -> None:
        """A store that rank 0 itself serves lives and ends with its run; one that is complete takes nobody in."""
        if (
            token
            or self.worker.is_main
            or not self.worker.layout.hosts_store
            or "tcp://" not in self.worker.layout.init_method
        ):
            return
        if taken := self._read("join/closed"):
            places = json.loads(taken)
            holder = places.get(str(self.worker.rank))
            raise UserError(
                f"rank {self.worker.rank} of {_place(self.view)} comes to a run that is complete: "
                + (f"the rank is held by {holder}" if holder else f"it has ranks 0 to {len(places) - 1}")
                + f". Another run of ours holds {self.worker.layout.init_method}: "
                "choose another --master-port on every node",
                same_on_every_rank=True,
            )

    def _check_time(self, presiding: "_Presider | None") -> None:
        now = time.monotonic()
        missing = presiding.missing() if presiding else "rank 0"
        if now - self.began > self.patience_seconds + (0 if presiding or self.on_local_disk else LINGER_SECONDS):
            mend = self.on_local_disk or "start it, or look at its log"
            problem = f"{missing} did not come within {self.patience_seconds:.0f} s (--join-timeout): {mend}"
            if presiding:
                presiding.decide(problem, missing=True)
            else:
                raise RunError(problem, same_on_every_rank=True)
        elif now - self.said > SAY_EVERY_SECONDS and self.worker.local_rank == 0:
            self.said = now
            if not presiding:
                missing = self._read("join/missing") or "rank 0"
            say(self.worker, f"waiting for {missing}; giving up in {self.patience_seconds - (now - self.began):.0f} s")


def _claimed_twice(first: dict, second: dict) -> str:
    places = " and ".join(f"{view['host']} (pid {view['pid']}, {view['source']})" for view in (first, second))
    return (
        f"rank {first['rank']} is claimed twice, by {places}: give every node a number of its own "
        "(-i/--node-rank, or --distributed-rank)"
    )


def _on_local_disk(worker: Worker) -> str:
    """What to do when nobody comes because a file:// is on a disk of this machine alone; empty where it is not."""
    url = worker.layout.init_method
    kind = url.startswith("file://") and meeting_file.local_file_system(Path(url.removeprefix("file://")))
    if not kind or worker.layout.nodes == 1:
        return ""
    return (
        f"{url} is on a disk of {socket.gethostname()} alone ({kind}), where no other machine looks: name a file in a "
        "folder that all nodes share, or use tcp://HOST:PORT (or wait longer, if all are on this machine)"
    )


class _Presider:
    """Rank 0's part: challenge every entry, compare the living, decide once."""

    def __init__(self, join: _Join):
        self.join, self.store, self.worker = join, join.store, join.worker
        self.token = secrets.token_hex(8)
        self.waiting: dict[int, dict] = {}  # entry -> view, challenged but silent: perhaps a run that died
        self.alive: dict[int, dict] = {}  # rank -> view
        self.entries = 0
        self.unseen: set[int] = set()  # entries whose view is not there yet; a process that died leaves one for ever
        self.heard_by = 0  # how many living processes there are to hear the verdict
        self.expected = self.worker.world_size  # how many there may be, by the largest world size that one believes in
        self.decided = False
        self.posted_missing = ""
        host = f"{socket.gethostname()} pid {os.getpid()}, {self.worker.layout.source}"
        self.store.set("join/host", host)

    def advance(self) -> None:
        """Take in new entries and answers, and decide when there is something to decide."""
        entries = self.store.add("join/entries", 0)
        self.unseen |= set(range(self.entries + 1, entries + 1))
        self.entries = entries
        for entry in sorted(self.unseen):
            if view := self.join._read(f"join/{entry}/view"):
                self.unseen.remove(entry)
                self.waiting[entry] = json.loads(view)
                self.store.set(f"join/{entry}/challenge", self.token)
        for entry in list(self.waiting):
            if self.join._read(f"join/{entry}/response") == self.token:
                self.heard_by += 1
                self.expected = max(self.expected, int(self.waiting[entry]["layout"]["world size"]))
                self._admit(self.waiting.pop(entry))
        if len(self.alive) == self.worker.world_size:
            self.decide()
        elif (missing := self.missing()) != self.posted_missing:
            self.posted_missing = missing
            self.store.set("join/missing", missing)

    def _admit(self, view: dict) -> None:
        mine = self.join.view
        # rank 0's own problem before another's, so that it does not matter who comes first
        troubled = next((one for one in (mine, view) if one["problem"]), None)
        problem = troubled and f"{_place(troubled)}: {troubled['problem']}"
        problem = problem or _difference(mine, view, ("versions", "layout", "backend", "flags"))
        if not problem and view["rank"] in self.alive:
            problem = _claimed_twice(self.alive[view["rank"]], view)
        problem = problem or self._same_gpu(view)
        if problem:
            self.decide(problem)
        self.alive.setdefault(view["rank"], view)

    def _same_gpu(self, view: dict) -> str:
        """Two ranks that each see one GPU may see the same: NCCL says little about that."""
        for other in self.alive.values():
            if view["gpu"] and view["gpu"] == other["gpu"] and view["rank"] != other["rank"]:
                return (
                    f"{_place(other)} and {_place(view)} have the same GPU, {view['device']}, {view['gpu']}: "
                    "give each rank its own (CUDA_VISIBLE_DEVICES, --device-id), or share it with --oversubscribe"
                )
        return ""

    def missing(self) -> str:
        """The ranks that have not come, by node where the layout tells: 'node 1 (ranks 8 to 9)'."""
        absent = [rank for rank in range(self.worker.world_size) if rank not in self.alive]
        sizes = self.worker.layout.gpus_per_node
        if sizes is None:
            return f"rank{'s' * (len(absent) > 1)} {_ranges(absent)} of {self.worker.world_size}"
        nodes = []
        for node, size in enumerate(sizes):
            first = sum(sizes[:node])
            here = [rank for rank in absent if first <= rank < first + size]
            if here:
                nodes.append(f"node {node} (rank{'s' * (len(here) > 1)} {_ranges(here)})")
        return " and ".join(nodes) or "the last answers"

    def decide(self, problem: str | None = None, missing: bool = False) -> None:
        if self.decided:
            return
        self.decided = True
        verdict = {"token": self.token, "problem": problem, "missing": missing}
        if not problem:
            verdict["views"] = [self.alive[rank] for rank in range(self.worker.world_size)]
            verdict["master"] = next(
                (view["addresses"]["master"] for view in verdict["views"] if self._remote(view)), ""
            )
            self._pass_over_the_dead()
            places = {rank: f"{view['host']} (pid {view['pid']})" for rank, view in self.alive.items()}
            self.store.set("join/closed", json.dumps(places))
        self.store.set(f"join/{self.token}/verdict", json.dumps(verdict))

    def _pass_over_the_dead(self) -> None:
        url = self.worker.layout.init_method
        if url.startswith("file://") and (dead := len(self.waiting) + len(self.unseen)):
            say(self.worker, f"{url} also holds {dead} processes of a run that has ended: they are passed over")

    def _remote(self, view: dict) -> bool:
        """Did this rank reach the master from outside, so that its word for the master's address counts?"""
        return bool(view["addresses"]["master"]) and _node(view) != _node(self.join.view)

    def linger(self, verdict: dict) -> None:
        """Keep the store until everyone has heard; after a refusal also a while for those still to come."""
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            everyone = self.heard_by >= self.expected or not verdict["problem"]
            if everyone and self.store.add(f"join/{self.token}/heard", 0) >= self.heard_by:
                return
            self.advance()
            time.sleep(POLL_SECONDS)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0 to 2, 5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _leave(worker: Worker, store: dist.Store) -> None:
    _wait_until_left(worker, store, 10.0)
    dist.destroy_process_group()
    if worker.is_main and worker.layout.init_method.startswith("file://"):
        Path(worker.layout.init_method.removeprefix("file://")).unlink(missing_ok=True)


def _wait_until_left(worker: Worker, store: dist.Store, seconds: float) -> None:
    """Rank 0, whose process may hold the store, goes last: another may still ask whether all are through a wait."""
    store.add("left", 1)
    deadline = time.monotonic() + seconds
    while worker.is_main and store.add("left", 0) < worker.world_size and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
