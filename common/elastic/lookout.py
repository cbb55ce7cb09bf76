"""What goes on beside the training of a generation (--elastic): the rank that leads looks for processes that have come,
and writes the address of its standby into the store at --master-addr, where such a process looks for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from common.elastic.membership import Membership, address_of
from common.elastic.standby import ANSWER_SECONDS, reach
from common.errors import ExplainedError
from common.join.connections import Connections
from common.join.handshake import LEADER, leader_in
from common.join.store import serve
from common.join.view import place
from common.join.waiting import Every, poll
from common.launch.addresses import host_and_port

LOOK_SECONDS = 0.25  # between two looks of the leader for processes that have come
ANNOUNCE_SECONDS = 1.0  # between two looks at the store at --master-addr
COMPLETE_SECONDS = 1.0  # without another one, after which the processes that have come are let in
DISMISS_SECONDS = 3.0  # after the run: for processes that are about to come, and again until they have heard


@contextmanager
def looking_out(members: Membership, connections: Connections) -> Iterator[None]:
    """Use while the members of a generation work. The rank that leads looks for processes that have come. It, and the
    first member on node 0, keep the store at --master-addr."""
    stop = threading.Event()
    on_master = [view["rank"] for view in members.views if view["node_rank"] == 0]
    thread = None
    if members.leads or members.rank in on_master[:1]:
        target, given = (_look, (members, stop, connections)) if members.leads else (_keep_announcing, (members, stop))
        thread = threading.Thread(target=target, args=given, name="members", daemon=True)
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread:
            thread.join(3 * ANSWER_SECONDS)


def _look(members: Membership, stop: threading.Event, connections: Connections) -> None:
    here = {address_of(view) for view in members.views}
    came = dict[int, int]()  # number -> the optimizer steps done when it came
    is_time, last, count = Every(ANNOUNCE_SECONDS), time.monotonic(), 0
    while not stop.wait(LOOK_SECONDS):
        members.read_new()
        if any(one["standby"] in here for one in members.standby.waiting.values()):
            connections.close()  # a member waits for this one, which has not noticed yet
            return
        for number, one in list(members.standby.waiting.items()):
            _refuse_twice(members, number, one, came.setdefault(number, members.step))
        able = len(members.admissible())
        if able != count:
            last, count = time.monotonic(), able
        members.newcomers_wait = bool(count) and time.monotonic() - last > COMPLETE_SECONDS
        if is_time():
            _announce(members)


def _refuse_twice(members: Membership, number: int, one: dict, step_then: int) -> None:
    """Refuse a process whose rank or GPU another one holds, once that one is known to be alive: steps were done
    since."""
    holder = members.holder(one)
    if holder and members.step > step_then + 1:
        what = f"rank {one['original']}" if holder["original"] == one["original"] else f"the GPU of {one['host']}"
        problem = f"{what} is in the run already: {place(holder)}, pid {holder['pid']}"
        members.standby.answer(number, {"refused": problem})


def _keep_announcing(members: Membership, stop: threading.Event) -> None:
    while not stop.wait(ANNOUNCE_SECONDS):
        _announce(members)


def _announce(members: Membership) -> None:
    """Write where the leader is into the store at --master-addr. Serve one there, where this is node 0 and the process
    that did has ended."""
    layout, leader = members.original.layout, address_of(members.views[0])
    host, port = host_and_port(layout.init_method)
    store = reach(f"{'127.0.0.1' if host == '0.0.0.0' else host} {port}")
    with suppress(RuntimeError, OSError):
        if store is None and layout.node_rank == 0:
            store = members.main = serve(host, port)
        if store is not None and leader_in(store) != leader:
            store.set(LEADER, leader)


def leader_at(url: str) -> str:
    """The address of the standby of the rank that leads, from the store at --master-addr; empty where it has none."""
    host, port = host_and_port(url)
    store = reach(f"{host} {port}")
    if store is None:
        return ""
    with suppress(RuntimeError):
        return leader_in(store)
    return ""


def dismiss(members: Membership, error: ExplainedError | None = None) -> None:
    """The run is over, well or with an error: the rank that leads tells the processes that wait. Where a rank was lost,
    the one that replaces it may only just be coming."""
    if not members.leads:
        return

    def everyone_waits() -> bool:
        members.read_new()
        return len(members.views) + len(members.standby.waiting) >= members.numbers.expected

    poll(everyone_waits, DISMISS_SECONDS)
    numbers = list(members.standby.waiting)
    why = f": {error}" * (error is not None)
    for number in numbers:
        missed = " meanwhile, without this rank" * (not members.standby.waiting[number].get("stop"))
        ended = f"the run has ended{missed}{why}"
        members.standby.answer(number, {"ended": ended, "code": error.exit_code if error else 0})
    poll(lambda: members.standby.store.add("dismissed", 0) >= len(numbers), DISMISS_SECONDS)
