"""Open the store where the ranks meet: rank 0 serves it, at an address that all know or that it writes into a file, or
the launcher serves it."""

import contextlib
import errno
import ipaddress
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import say
from common.errors import RankLost, RunError, UserError
from common.join import interfaces, meeting_file, network
from common.join.meeting_file import Place
from common.join.waiting import Every, limit, poll
from common.launch.addresses import WILDCARDS, host_and_port, is_loopback, tcp_address
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.version import ROOT

SAY_EVERY_SECONDS = 4.0
ANSWER_SECONDS = 6.0  # in which a store answers its first request; torch may wait 5 s for a name server in it
CONNECT_SECONDS = 2.0
LOOK_SECONDS = 0.1  # between two looks whether a process that does not answer has ended
REQUEST_TIMEOUT = timedelta(seconds=300)  # of a store, for a key that is not there yet
HOST = "served by"  # the key whose value says which process serves the store
NOT_STARTED = os.strerror(errno.ECONNREFUSED)  # nothing listens there yet: no error while this node waits
BACKLOG = 2048  # connections that wait to be accepted, as torch has it
_waiting: dict[tuple[str, int], threading.Thread] = {}  # for the store at this address, which has not answered in time


@dataclass(frozen=True)
class OpenStore:
    """A store that answers, and the addresses of the connection to it."""

    store: dist.Store
    own_address: str  # of this node, on the route to the master
    master_address: str  # of the master, as this rank reached it; empty on the rank that serves the store
    leads: bool  # this rank compares the views of all. One that reached another rank 0 does not, even as rank 0
    forget: Callable[[], None] = lambda: None  # takes away what the others have needed to find it


def open_store(worker: Worker, options: JoinOptions) -> OpenStore:
    """Open the store at the layout's `init_method`. Waits for the master, at most --join-timeout.

    Raises UserError for an address or port that cannot be right, RunError when the master does not answer.
    """
    url = worker.layout.init_method
    if worker.layout.meets_at_file:
        return _open_by_file(worker, meeting_file.check(url), options)
    host, port = host_and_port(url)
    if not network.resolve(host):
        raise UserError(
            f"{worker.layout.meeting[0]} is {host}, which {socket.gethostname()} cannot resolve: "
            "give a name or an address"
        )
    # A rank 0 with another machine's address (-i 0 typed twice) joins there, and the handshake reports the duplicate.
    if worker.is_main and worker.layout.hosts_store and network.is_local(host):
        return _serve(worker, host, port, options)
    store, seconds = None, options.join_timeout_seconds
    until = time.monotonic() + seconds
    while store is None:
        own, master = _wait_for_master(worker, host, port, seconds, until)
        # The first rank of a node finds out whether the port is another program's. The others are patient: torch looks
        # up the name of each connection, and a name server may drop requests when many ranks start at once.
        store = connect(host, port, seconds if worker.local_rank else ANSWER_SECONDS)
        if store is None and network.listens(host, port, CONNECT_SECONDS):
            raise UserError(
                f"{url} answers, but not as node 0 of a run would: another program holds that port, node 0 is frozen, "
                "or --master-addr and --master-port are not those of node 0",
                same_on_every_rank=True,
            )
    leads = worker.is_main and not worker.layout.hosts_store  # the launcher serves the store
    if leads:
        _name_run(store, worker)
    return OpenStore(store, own, master, leads)


def _open_by_file(worker: Worker, path: Path, options: JoinOptions) -> OpenStore:
    """Rank 0: serve the store and write where. The others: wait until it has."""
    seconds = meeting_file.patience_seconds(worker.layout, options.join_timeout_seconds)
    is_time, found = Every(SAY_EVERY_SECONDS), ""

    def meet() -> OpenStore | None:
        nonlocal found
        place, found = meeting_file.read(path), ""
        if place:
            found = (
                f"; {path} says that it listens at {place.host} port {place.port}, which does not answer for this run"
            )
            if opened := _reach(place):  # rank 0 looks too: two processes may claim to be it
                return opened
        return _serve_by_file(worker, path, place, options) if worker.is_main else None

    def report(elapsed: float) -> None:
        if worker.local_rank == 0 and is_time():
            say(f"waiting for rank 0{found}; giving up in {seconds - elapsed:.0f} s", worker.rank)

    with limit(seconds + 3 * ANSWER_SECONDS, worker.rank, "meeting at the file (--join-timeout)"):
        opened = poll(meet, seconds, report) or meet()
    if opened is None:
        fix = meeting_file.advice_for_local_disk(worker.layout) or "start it, or look at its log"
        raise RankLost(
            f"rank 0 did not join within {seconds:.0f} s (--join-timeout){found}: {fix}", same_on_every_rank=True
        )
    return opened


def _reach(place: Place) -> OpenStore | None:
    """The store of a run whose ranks meet now; None where that run is gone."""
    with contextlib.suppress(OSError, RuntimeError):
        own, master = network.source_address(place.host, place.port, CONNECT_SECONDS)
        store = connect(place.host, place.port, ANSWER_SECONDS)
        if store and store.check([place.key]):
            return OpenStore(store, own, master, leads=False)
    return None


def _serve_by_file(worker: Worker, path: Path, gone: Place | None, options: JoinOptions) -> OpenStore | None:
    """None where another process has become rank 0 at this moment. `gone` is where a run that died was."""
    interface = options.interface or next(filter(None, map(os.environ.get, interfaces.VARIABLES.values())), None)
    own = "127.0.0.1" if worker.layout.nodes == 1 and not interface else network.own_address(interface)
    store, port = serve_at(own)
    place = Place(own, port, secrets.token_hex(8))
    _name_run(store, worker)
    store.set(place.key, "")
    if not meeting_file.write(path, place, instead_of=gone):
        return None
    return OpenStore(store, own, "", leads=True, forget=lambda: meeting_file.remove(path, place))


def _serve(worker: Worker, host: str, port: int, options: JoinOptions) -> OpenStore:
    """Rank 0: serve the store in this process, and print the command for each other node."""
    timeout = timedelta(seconds=options.join_timeout_seconds)
    try:
        store = serve(host, port, timeout)
    except (OSError, RuntimeError) as error:  # torch's DistNetworkError is a RuntimeError
        if "in use" not in str(error):
            raise
        raise UserError(
            f"{worker.layout.meeting[1]} {port} on {socket.gethostname()} is held by {_holder(host, port)}: "
            "choose another port on every node, or end that program"
        ) from None
    _name_run(store, worker)
    own = network.own_address(options.interface) if host in WILDCARDS else network.resolve(host)[0]
    if worker.layout.gpus_per_node and worker.layout.nodes > 1:
        address = own if host in WILDCARDS else host
        for node in range(1, worker.layout.nodes):
            say(f"on node {node} run: {_command_for(node, address, port)}", worker.rank)
    alone = worker.layout.nodes == 1 and not options.interface
    return OpenStore(store, "127.0.0.1" if alone else own, "", leads=True)


def serve(host: str, port: int, timeout: timedelta = REQUEST_TIMEOUT) -> dist.TCPStore:
    """A store that this process serves at an address of this machine. Raises OSError or RuntimeError."""
    listens: dict[str, Any] = {"master_listen_fd": _listen_at(host, port)} if _is_address(host) else {}
    server = "localhost" if host == "0.0.0.0" else host
    return dist.TCPStore(server, port, is_master=True, timeout=timeout, wait_for_workers=False, **listens)


def _is_address(host: str) -> bool:
    """True for an address of one interface. A name may mean one address here, and another one on the other nodes."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _listen_at(host: str, port: int) -> int:
    """A socket that listens at this address alone; torch would listen on all interfaces. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener.detach()


def serve_at(host: str) -> tuple[dist.TCPStore, int]:
    """A store that this process serves at this address, and its port, which the system has chosen."""
    listener = _listen_at(host, 0)
    with socket.socket(fileno=os.dup(listener)) as same:
        port = same.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=REQUEST_TIMEOUT, wait_for_workers=False, master_listen_fd=listener
    ), port


def _name_run(store: dist.Store, worker: Worker) -> None:
    """Say whose store this is, for another run that finds the port taken."""
    store.set(HOST, f"{socket.gethostname()} pid {os.getpid()}, {worker.layout.source}")


def connect(host: str, port: int, answer_seconds: float, gives_up: bool = False) -> dist.TCPStore | None:
    """The store that is served at host:port; None where it does not answer in this time: something else listens there.

    TCPStore waits without a timeout for the first reply of whatever listens. So a thread connects, and may never end:
    while one waits for a store, such as that of a stopped process, no other one is started. Where nothing listens any
    more, TCPStore tries again and again, for five minutes. With `gives_up` this ends as soon as the machine refuses a
    connection, and the thread after some seconds, with a line in the log: for a process that may just be ending.
    """

    def wait_for(thread: threading.Thread) -> bool:
        until = time.monotonic() + answer_seconds
        while thread.is_alive() and time.monotonic() < until:
            thread.join(min(answer_seconds, LOOK_SECONDS))
            if gives_up and thread.is_alive() and network.listens(host, port, LOOK_SECONDS) is False:
                break
        return not thread.is_alive()

    if (waiting := _waiting.get((host, port))) and not wait_for(waiting):
        return None
    found: list[dist.TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            timeout = timedelta(seconds=2 * answer_seconds + 1) if gives_up else REQUEST_TIMEOUT
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
            store.check([HOST])
            store.set_timeout(REQUEST_TIMEOUT)
            found.append(store)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    if not wait_for(thread):
        _waiting[host, port] = thread
    return found[0] if found else None


def split(address: str) -> tuple[str, int]:
    """Host and port of a store's address, such as "10.0.0.1 4711". Raises ValueError."""
    host, _, port = address.rpartition(" ")
    return host, int(port)


def _wait_for_master(worker: Worker, host: str, port: int, timeout_seconds: float, until: float) -> tuple[str, str]:
    """Wait until something listens at host:port, and say so; `time.monotonic()` is `until` when `timeout_seconds` are
    over. Returns (our address, its) of that connection."""
    first = "node 0" if worker.layout.nodes else "rank 0"
    address, reason, is_time = tcp_address(host, port), "", Every(SAY_EVERY_SECONDS)

    def reach() -> tuple[str, str] | None:
        nonlocal reason
        try:
            return network.source_address(host, port, CONNECT_SECONDS)
        except OSError as error:
            reason = error.strerror or str(error)
            return None

    def report(elapsed: float) -> None:
        if worker.local_rank == 0 and is_time():
            unusual = "" if reason == NOT_STARTED else f" ({reason})"
            left = until - time.monotonic()
            say(f"waiting for {first} at {address}{unusual}; giving up in {left:.0f} s", worker.rank)

    addresses = poll(reach, until - time.monotonic(), report)
    if addresses is None:
        raise RunError(
            f"the master ({first}) at {address} does not answer: {reason}, for {timeout_seconds:.0f} s "
            f"(--join-timeout): is {first} started, and are {', '.join(dict.fromkeys(worker.layout.meeting))} "
            f"and the firewall right?{elsewhere(worker)}",
            same_on_every_rank=True,
        )
    return addresses


def elsewhere(worker: Worker) -> str:
    """A hint where the address to meet at means each machine itself, as localhost does; else empty."""
    layout = worker.layout
    host = host_and_port(layout.init_method)[0] if layout.init_method.startswith("tcp://") else ""
    if layout.nodes == 1 or not is_loopback(host):
        return ""
    return f" {host} is each machine itself: for nodes on several machines, {layout.meeting[0]} is an address of node 0"


def _command_for(node: int, address: str, port: int) -> str:
    """The command line of this process as another node must type it."""
    ours = ("-i", "--node-rank", "--master-addr", "--master-port", "--interface", "--out-dir")
    kept, skip = [], False
    for part in sys.argv[1:]:
        if not skip and part.partition("=")[0] not in ours and not re.fullmatch(r"-i\d+", part):
            kept.append(part)
        skip = part in ours
    return shlex.join([*program(), *kept, "-i", str(node), "--master-addr", address, "--master-port", str(port)])


def program() -> list[str]:
    """How to start this program: by its name if PATH finds it there, otherwise with the Python that runs here."""
    script, python = Path(sys.argv[0]), Path(sys.executable)
    if shutil.which(script.name) == sys.argv[0]:
        return [script.name]
    in_folder = python.is_relative_to(Path.cwd())  # a checkout's own, which is there on the other node too
    start = [str(python.relative_to(Path.cwd()) if in_folder else python)]
    if script.name == "__main__.py" and script.is_relative_to(ROOT):
        return [*start, "-m", ".".join(script.parent.relative_to(ROOT).parts)]
    return [*start, sys.argv[0]]


def _holder(host: str, port: int) -> str:
    """Who listens on a local port. A run of this project names itself in its store."""
    store = connect("127.0.0.1" if host in WILDCARDS else host, port, ANSWER_SECONDS)
    if store is not None and store.check([HOST]):
        return f"another run of ours ({store.get(HOST).decode()})"
    return "another program"
