"""A change of the members (--elastic): those that are left, and those that have come, agree on the next generation.

    meet(members)      a member goes to the standby of the lowest rank that answers, which leads
    _lead              that rank waits for the members that are alive, decides, and tells them
    follow             each finds its place in the next generation from what the leader has told

The caller then raises MembersChanged, with which the trainer is called again in the new place.
"""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace

import torch.distributed as dist

from common.console import say
from common.elastic.membership import ADDRESSES, Membership, Numbers, address_of
from common.elastic.standby import ALIVE, ANSWER_SECONDS, DEAD, Visit, reach_unless_dead, states
from common.errors import Interrupted, MembersChanged, RunEnded, RunError, UserError
from common.join.connections import cut_off
from common.join.store import OpenStore, split
from common.join.view import node_of, places
from common.join.waiting import limit, poll
from common.launch.addresses import tcp_address
from common.launch.within import within

SILENT_SECONDS = 2.0  # without an answer from its machine: then the others go on without a rank
LEADS = "leads"  # a key of a standby, while its rank leads a change
NOBODY_LEADS = {"nobody": "leads"}
COME_AGAIN = {"come": "again"}  # the verdict for a process that did not answer when others were let in

Why = Callable[[dict[int, str]], str]  # what has happened to ranks, in words, from what is known of each


def meet(members: Membership, lost: Why, late: bool = False) -> MembersChanged:
    """Agree with the other members on those of the next generation. `lost` says in words what has happened to ranks;
    nothing where all are there, and others are to be let in. `late` where a collective of this rank has waited for
    another one for too long. Raises RunError where this process must end."""
    frozen: set[int] = set()
    until = time.monotonic() + SILENT_SECONDS
    # The rank that leads waits for busy ones, at most --timeout.
    seconds = members.options.timeout_seconds + members.options.join_timeout_seconds
    for view in members.staying:
        if view["rank"] >= members.rank:
            break
        address = address_of(view)  # where it has ended too, the next rank leads
        while (store := reach_unless_dead(address, until)) is not None:
            with suppress(RuntimeError):
                if verdict := attend(members, store, seconds, members.patience_seconds(late), late):
                    return follow(members, store, verdict)
                frozen.add(view["rank"])
                break
    return follow(members, members.standby.store, _lead(members, lost, frozen, late))


def attend(
    members: Membership, store: dist.Store, seconds: float, patience: float = math.inf, late: bool = False
) -> dict | None:
    """Come to the standby of the rank that leads, and wait for its verdict. None where it does not begin to lead within
    `patience` seconds: a frozen process, whose store may answer all the same; and where this process is to come again.
    Raises RuntimeError when the store has ended, or does not answer."""
    original, layout = members.original, members.original.layout
    me = {
        "standby": members.address,
        "original": original.rank if members.has_number else -1,
        "node_rank": layout.node_rank if members.has_number else -1,
        "local_rank": original.local_rank,
        "launch": layout.joins,
        "gpu": members.gpu,
        "host": socket.gethostname(),
        "predecessor": original.predecessor,
        "late": late,
    }
    if not members.views:
        me["claim"] = members.claim()
    most = members.patience_seconds(late), original.rank, "a request to the rank that leads (--timeout)"

    def cut() -> None:
        cut_off(store)

    with limit(*most, instead=cut):
        visit, began = Visit(store, me, members.options.secret), time.monotonic()

    def answer() -> dict | None:
        with limit(*most, instead=cut):
            # Asked before the verdict, which a leader posts before it deletes this key: so none is missed.
            may_come = time.monotonic() - began < patience or store.check([LEADS])
            if (verdict := visit.verdict()) or may_come:
                return verdict
            # Where it has gone on without this rank, this one waits to be let in.
            return NOBODY_LEADS if members.address in json.loads(store.get(ADDRESSES)) else None

    found = poll(answer, seconds, longest_pause_seconds=0.1) or NOBODY_LEADS
    if found is NOBODY_LEADS:
        with limit(*most, instead=cut):
            visit.leave()
    return None if found in (NOBODY_LEADS, COME_AGAIN) else found


# --- the rank that leads ----------------------------------------------------------------------------------------------


def _lead(members: Membership, lost: Why, frozen: Collection[int], late: bool) -> dict:
    """Wait for the members that are alive, decide, say so, and tell them."""
    standby, original = members.standby, members.original
    standby.store.set(LEADS, "")
    here, missing = _wait_for_members(members, frozen, late)
    problem = _minority(members.staying, here, missing)  # the members that are here read it too
    new = [] if problem else _newcomers(members, [*missing, *members.leaving])
    chosen = [_member(members.views[rank]) for rank in sorted(here)] + [_member(one) for one in new]
    causes = list(filter(None, [lost(missing)]))
    if new:
        who = places({**one, "rank": one["original"], "nodes": members.numbers.nodes} for one in new)
        before = " and ".join(sorted({one["predecessor"] for one in new if one["predecessor"] and not causes}))
        causes.append(f"let in {who}" + f", whose process {before}" * bool(before))
    minimum = members.options.elastic or 1
    few = f"{len(chosen)} of {members.numbers.expected} ranks are left, fewer than --elastic {minimum}"
    gone = [members.views[rank] for rank in missing]
    # One that joins again after it was lost gets another number.
    members.numbers.expected -= len(members.leaving) + sum(view["original"] >= original.run_size for view in gone)
    verdict = {
        "generation": members.generation + 1,
        "members": chosen,
        "cause": "; ".join(causes) or "the process that was to be let in does not answer any more",
        "ends": few if len(chosen) < minimum else "",
        "problem": problem,
        "address": members.address,
        "numbers": asdict(members.numbers),
        "lost": [members.views[rank] for rank, state in missing.items() if state != DEAD],
    }
    if not problem:
        say(f"members  {verdict['cause']}", rank=0)
    told = {one["standby"] for one in chosen}
    for number in [number for number, one in standby.waiting.items() if one["standby"] in told]:
        standby.answer(number, verdict)
    standby.store.delete_key(LEADS)
    return verdict


def _wait_for_members(members: Membership, frozen: Collection[int], late: bool) -> tuple[set[int], dict[int, str]]:
    """(here, missing): the ranks that have come to this one, and what is known of the others. It waits for one that is
    busy, at most --timeout (longer where it may not know yet that connecting has failed; less where a collective has
    waited for it already, `late` here or on another rank), and for one that is silent, two seconds; not for those that
    are `frozen`."""
    ranks = {address_of(view): view["rank"] for view in members.staying}
    began = time.monotonic()
    heard = dict.fromkeys(ranks.values(), began)
    pause = 0.02
    while True:
        members.read_new()
        present = [one for one in members.standby.waiting.values() if one["standby"] in ranks]
        here = {members.rank, *(ranks[one["standby"]] for one in present)}
        late = late or any(one.get("late") for one in present)
        missing = [rank for rank in ranks.values() if rank not in here]
        known = dict(zip(missing, states([address_of(members.views[rank]) for rank in missing]), strict=True))
        now = time.monotonic()
        heard |= {rank: now for rank, state in known.items() if state == ALIVE}
        silent = [rank for rank in missing if now - heard[rank] > SILENT_SECONDS]
        is_over = now - began > members.patience_seconds(late)
        if is_over or all(known[rank] == DEAD or rank in silent or rank in frozen for rank in missing):
            return here, known
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)


def _minority(views: list[dict], here: set[int], missing: dict[int, str]) -> str:
    """Why this side of a network that is split must not go on: the other one may; empty where it may go on."""
    voters = len(views) - list(missing.values()).count(DEAD)
    if 2 * len(here) > voters or (2 * len(here) == voters and views[0]["rank"] in here):
        return ""
    who = places(view for view in views if view["rank"] in missing)
    return (
        f"lost contact with {who}: these may go on, and {len(here)} of {voters} ranks are no majority, so this "
        "side ends: is the network split? Start it again where the others are not running"
    )


def _newcomers(members: Membership, gone: Collection[int]) -> list[dict]:
    """The processes that wait and are alive, by their original ranks; of several with one rank the last. The others are
    told, but for those whose machines refuse the connection: they have ended. Those of machines that join are given
    numbers."""
    waiting = members.admissible(gone)
    found = states([one["standby"] for _, one in waiting])
    alive = [one for one, state in zip(waiting, found, strict=True) if state == ALIVE]
    joining = [one for _, one in alive if one["original"] < 0]
    for one in sorted(joining, key=lambda one: (one["launch"], one["local_rank"])):
        one |= {"original": members.numbers.next_rank(), "node_rank": members.numbers.node_of(one["launch"])}
    last = {one["original"]: (number, one) for number, one in alive}
    for (number, one), state in zip(waiting, found, strict=True):
        if state == DEAD:
            del members.standby.waiting[number]
        elif state != ALIVE and one["standby"] not in members.standby.silent:
            members.standby.silent.add(one["standby"])
            members.standby.answer(number, COME_AGAIN)
        elif state != ALIVE:
            host, port = split(one["standby"])
            fix = "open that port, or name the --interface that reaches the other nodes"
            who = f"rank {one['original']}" if one["original"] >= 0 else "this process"
            unreachable = f"{who} cannot be reached at {host}, port {port}: {fix}"
            members.standby.answer(number, {"refused": unreachable})
        elif last[one["original"]][0] != number:
            again = f"rank {one['original']} has come again since, from {last[one['original']][1]['host']}"
            members.standby.answer(number, {"refused": again})
    return [last[original][1] for original in sorted(last)]


def _member(view: dict) -> dict:
    """What a verdict says of a member; `view` is its view, or what it has written at the standby."""
    standby = view["standby"] if "standby" in view else address_of(view)
    return {"standby": standby, **{name: view[name] for name in ("original", "node_rank", "host")}}


# --- each member ------------------------------------------------------------------------------------------------------


def follow(members: Membership, store: dist.Store, verdict: dict) -> MembersChanged:
    """This process's place in the next generation. Raises RunError where there is none, RunEnded after the run, and
    Interrupted where it has been interrupted."""
    if "ended" in verdict:
        within(ANSWER_SECONDS, lambda: store.add("dismissed", 1))
        if verdict["code"] == Interrupted.exit_code:
            raise Interrupted(verdict["ended"], same_on_every_rank=True)
        if verdict["code"]:
            raise RunError(verdict["ended"], same_on_every_rank=True)
        raise RunEnded(verdict["ended"])
    if "refused" in verdict:
        raise UserError(f"this run is under way, and {verdict['refused']}", same_on_every_rank=True)
    if verdict["problem"]:
        raise RunError(verdict["problem"], same_on_every_rank=True)
    for view in verdict["lost"]:
        _end_frozen(members, view)
    members.generation, members.cause, members.ends = verdict["generation"], verdict["cause"], verdict["ends"]
    everyone = verdict["members"]
    rank = next(index for index, one in enumerate(everyone) if one["standby"] == members.address)
    here = [index for index, one in enumerate(everyone) if node_of(one) == node_of(everyone[rank])]
    host, port = split(verdict["address"])
    members.numbers = Numbers(**verdict["numbers"])
    me = everyone[rank]
    placed = replace(members.original.layout, node_rank=me["node_rank"])
    members.original = replace(members.original, rank=me["original"], layout=placed)
    layout = replace(
        placed,
        nodes=members.numbers.nodes,
        world_size=len(everyone),
        first_rank=here[0],
        local_world_size=len(here),
        first_local_rank=0,
        gpus_per_node=None,
        init_method=f"tcp://{tcp_address(host, port)}",
        spawn=False,
    )
    members.opened = OpenStore(store, split(members.address)[0], "" if rank == 0 else host, leads=rank == 0)
    members.leaders = [one["standby"] for one in everyone]
    worker = replace(
        members.original,
        layout=layout,
        rank=rank,
        local_rank=here.index(rank),
        membership=members,
        originals=tuple(one["original"] for one in everyone),
    )
    return MembersChanged(worker)


def _end_frozen(members: Membership, view: dict) -> None:
    """End a process of this machine that is alive and counts as lost: it would hold the run's files, and go on by
    itself when it wakes up. Its supervisor starts another one."""
    mine = members.views[members.rank] if members.views else {"pid_space": "", "host": ""}
    is_here = (view["pid_space"], view["host"]) == (mine["pid_space"], mine["host"])
    if is_here and view["pid"] != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view["pid"], signal.SIGKILL)
