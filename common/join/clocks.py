"""How far the clocks of the nodes differ, measured over the store, so that their times can stand on one axis.

A node asks rank 0 for its clock, as in NTP (RFC 5905): the answer is as old as half of the round trip, give or take
that half. Of several round trips the shortest tells most. The processes of one node have one clock.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

ROUND_TRIPS = 8


def seconds_ahead(
    store: dist.Store, name: str, rank: int, ranks_of_nodes: Sequence[Sequence[int]], timeout_seconds: float
) -> tuple[float, float]:
    """How many seconds `time.perf_counter()` of this rank's node is ahead of rank 0's, and by how much this may be off.

    The first rank of each node asks, one node after the other; the others of its node read what it has found. `name`
    must be new on this store. Every rank must call this. Raises torch's error of the store where a rank does not answer
    within `timeout_seconds`.
    """
    limit = timedelta(seconds=timeout_seconds)
    for first, *_ in ranks_of_nodes:
        if first != 0 and rank == 0:
            _answer(store, f"{name}/{first}", limit)
    first = next(ranks[0] for ranks in ranks_of_nodes if rank in ranks)
    if first == 0:
        return 0.0, 0.0
    if rank == first:
        ahead, off = _ask(store, f"{name}/{first}", limit)
        store.set(f"{name}/{first}/found", f"{ahead!r} {off!r}")
    store.wait([f"{name}/{first}/found"], limit)
    ahead, off = map(float, store.get(f"{name}/{first}/found").split())
    return ahead, off


def _ask(store: dist.Store, name: str, limit: timedelta) -> tuple[float, float]:
    trips = []
    for number in range(ROUND_TRIPS):
        asked = time.perf_counter()
        store.set(f"{name}/ask{number}", "")
        store.wait([f"{name}/answer{number}"], limit)  # the value is read later: that would be a round trip more
        trips.append((asked, time.perf_counter()))
    answers = store.get(f"{name}/answers{ROUND_TRIPS}").decode().split()
    off, ahead = min(
        ((came - asked) / 2, (asked + came) / 2 - float(answer))
        for (asked, came), answer in zip(trips, answers, strict=True)
    )
    return ahead, off


def _answer(store: dist.Store, name: str, limit: timedelta) -> None:
    answers = []
    for number in range(ROUND_TRIPS):
        store.wait([f"{name}/ask{number}"], limit)
        answers.append(repr(time.perf_counter()))
        store.set(f"{name}/answer{number}", "")
    store.set(f"{name}/answers{ROUND_TRIPS}", " ".join(answers))
