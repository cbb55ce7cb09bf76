"""Members that come and go (--elastic): how a process becomes one, and what it does when another one is lost.

The time between two changes of the members is a *generation*. Each process serves a small store of its own, its
*standby* (standby.py), whose address all members learn in the handshake. When a rank is lost, the survivors meet at the
standby of the lowest rank that is left, which leads (change.py). When a process comes (back), it waits at the standby
of the rank that leads, which lets it in between two steps (lookout.py).
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from common.console import say
from common.elastic.change import LEADS, attend, follow, meet
from common.elastic.lookout import LOOK_SECONDS, dismiss, leader_at, looking_out
from common.elastic.membership import ADDRESSES, Change, Membership, Numbers, address_of
from common.elastic.standby import ALIVE, ANSWER_SECONDS, DEAD, REACH_SECONDS, SILENT, Standby, reach, states
from common.errors import ExplainedError, Left, MembersChanged, RankLost, RunError, before_exit
from common.join import ended, network
from common.join.connections import Connections
from common.join.handshake import leader_in
from common.join.lost import LINGER_SECONDS, MEET, TIMEOUTS, in_words, is_contact_lost
from common.join.store import OpenStore, open_store, split
from common.join.view import layout_of, places
from common.join.waiting import poll
from common.launch.addresses import host_and_port, is_loopback
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.launch.replacing import WAITS
from common.launch.within import within

CAUSE_SECONDS = 0.3  # for the supervisor of a lost rank to post why it has ended
NOBODY_SECONDS = 20.0  # without an answer from any member, after which a process that waits gives up


def open_members(worker: Worker, options: JoinOptions) -> tuple[OpenStore, Membership]:
    """Where to join, and this process's membership. Raises MembersChanged where it was let into a run under way."""
    if worker.membership:
        return worker.membership.opened, worker.membership
    if worker.board and worker.board.leader:  # other workers of this node are members
        standby = Standby(_address_towards(worker.board.leader, options), options.secret)
        raise prepare(Membership(worker, options, standby), worker.board.leader)
    opened = open_store(worker, options)
    here, host = opened.own_address, host_and_port(worker.layout.init_method)[0]
    if is_loopback(here) and (worker.layout.nodes == 1 or not is_loopback(host)):
        # Node 0's workers reach the store by loopback; others, and machines that join, do not.
        here = network.own_address(options.interface)
    nodes = max(worker.layout.nodes, 1)
    layout = layout_of(worker.layout)
    numbers = Numbers(worker.world_size, nodes, expected=worker.world_size, layout=layout)
    standby = Standby(here, options.secret)
    return opened, Membership(worker, options, standby, opened=opened, main=opened.store, numbers=numbers)


def _address_towards(standby: str, options: JoinOptions) -> str:
    """This node's address on the route to a standby, under which its rank reaches this process."""
    with suppress(OSError):
        if not options.interface:
            return network.source_address(*split(standby), REACH_SECONDS)[0]
    return network.own_address(options.interface)


def prepare(members: Membership, leader: str) -> MembersChanged:
    """Call the trainer with this process alone, until it has loaded its data and built its model: what is wrong with
    them ends no run, and no run waits for them. `leader` is where the rank that leads the run is."""
    members.prepares_for, original = leader, members.original
    if original.board and not original.board.leader:
        original.board.leader = leader  # of a node that comes back: its supervisor learns that there is a run
    alone = replace(
        original.layout,
        world_size=1,
        first_rank=0,
        local_world_size=1,
        first_local_rank=0,
        gpus_per_node=None,
        spawn=False,
    )
    place = replace(original, layout=alone, rank=0, local_rank=0, membership=members)
    return MembersChanged(replace(place, originals=(original.rank,)))


def enter(members: Membership) -> MembersChanged:
    """Wait at the standby of the rank that leads until it lets this process in, which is prepared."""
    leader, members.prepares_for = members.prepares_for, ""
    original, seconds, began = members.original, members.options.join_timeout_seconds, time.monotonic()
    if members.has_number or original.local_rank == 0:
        number = original.rank if members.has_number else None
        say("the run is under way: waiting to be let in between two steps", number)
    if original.board:
        original.board.note(original, WAITS)
    members.leaders, heard = [leader, *members.leaders], began
    while (left := seconds - (time.monotonic() - began)) > 0:
        board = original.board  # which other workers of this node keep up to date
        known = [leader_at(original.layout.init_method), board.leader if board else "", *members.leaders]
        for address in dict.fromkeys(known):
            store = reach(address) if address else None
            if store is not None:
                heard = time.monotonic()
                with suppress(RuntimeError, ValueError):  # its process has ended: another one leads
                    if store.check([ADDRESSES]):
                        members.leaders = json.loads(store.get(ADDRESSES))
                    if may_lead(store, address) and (verdict := attend(members, store, left)):
                        change = follow(members, store, verdict)
                        _say_where_the_log_is(change.worker, verdict["members"][0])
                        return change
        if time.monotonic() - heard > NOBODY_SECONDS:
            raise RunError("no member of the run answers any more: has it ended? See the logs of the other nodes")
        time.sleep(LOOK_SECONDS)
    raise RunError(f"the members of the run have let nobody in for {seconds:.0f} s (--join-timeout): see their log")


def may_lead(store: dist.Store, address: str) -> bool:
    """Whether the process with this standby leads the members, or is about to, because the one that did has ended."""
    leader = leader_in(store)
    return leader in ("", address) or store.check([LEADS]) or states([leader]) == [DEAD]


def _say_where_the_log_is(worker: Worker, leader: dict) -> None:
    if worker.local_rank == 0:
        say(f"let in; the log of the run is that of {places([{**leader, 'rank': 0, 'nodes': 1}])}", worker.rank)


def meet_again(members: Membership) -> MembersChanged:
    """After a member was lost while a generation joined."""
    if not members.views:  # this process was let in, but has never worked
        members.prepares_for = members.leaders[0]
        return enter(members)

    def why(states: dict[int, str]) -> str:
        gone = [members.views[rank] for rank in sorted(states)]  # also those that were lost before
        lost = [view for view in gone if address_of(view) in members.leaders]
        return f"lost {places(lost)}, while the ranks joined" if lost else "a member was lost while the ranks joined"

    return meet(members, why)


@contextmanager
def surviving(
    members: Membership,
    worker: Worker,
    views: list[dict],
    store: dist.Store,
    connections: Connections,
    leave: Callable[[], None],
) -> Iterator[None]:
    """Use while the members of a generation work, whose `views` are by rank. Raises MembersChanged after a rank was
    lost, and where members are to change. `leave` leaves the process group in order."""
    members.work_with(worker.rank, views)
    if worker.board:
        worker.board.leader = address_of(views[0])
        worker.board.note_rank(worker)
    try:
        with looking_out(members, connections):
            yield
    except Change as asked:
        with suppress(RuntimeError):  # another rank was lost at this moment
            leave()
        _leave_at_once(connections)
        members.leaving = asked.leaving
        if worker.rank in asked.leaving:
            left = f"{asked.why}: after step {members.step} this node has left the run, which goes on"
            raise Left(f"{left}: {places(members.staying)}", same_on_every_rank=True) from None
        said = [f"{places(views[rank] for rank in asked.leaving)} left: {asked.why}"] if asked.leaving else []
        change = meet(members, lambda states: "; ".join(said + [_why(states, views, store)] * bool(states)))
    except Exception as error:
        if not (is_contact_lost(error) or isinstance(error, RankLost)):
            if isinstance(error, ExplainedError) and error.same_on_every_rank:
                dismiss(members, error)
                if not hasattr(error, "before_exit"):  # a turn waits until all know of its failure
                    before_exit(error, partial(ended.leave, worker, views, store, LINGER_SECONDS))
            else:
                within(ANSWER_SECONDS, partial(ended.post_error, store, worker.rank, error))
            raise
        _leave_at_once(connections)  # the other ranks, which may wait for this one, notice it now
        within(0.0, lambda: store.set(MEET, ""))  # and those that wait on the store, which may not answer
        late = any(sign in str(error) for sign in TIMEOUTS)
        change = meet(members, lambda states: _why(states, views, store), late)
    else:
        dismiss(members)
        return
    raise change


def _leave_at_once(connections: Connections) -> None:
    connections.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _why(states: dict[int, str], views: list[dict], store: dist.Store) -> str:
    """What has happened to these ranks, in words."""
    if not states:
        return "a connection was lost"

    def posted() -> dict[int, str]:
        return (
            poll(lambda: states.keys() <= (found := ended.posted(store, views)).keys() and found, CAUSE_SECONDS) or {}
        )

    causes = within(ANSWER_SECONDS, posted) or {}
    silent = {SILENT: "does not answer", ALIVE: "did not stop its step within --timeout"}
    words = {rank: causes.get(rank) or silent.get(state, "") for rank, state in states.items()}
    return f"lost {places(views[rank] for rank in sorted(states))}: {in_words(words)}"
