"""The process group of a run whose members may change: each generation is one call of `elastic_group`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from common.elastic.alone import alone
from common.elastic.members import meet_again, open_members, prepare, surviving
from common.elastic.membership import CONNECT_ATTEMPTS, Membership
from common.elastic.run import ElasticMembers
from common.errors import RankLost, UserError
from common.join.connections import ports_of
from common.join.handshake import RunUnderWay
from common.join.lost import is_contact_lost, naming_lost_store
from common.join.process_group import (
    Group,
    Joined,
    choose,
    connect,
    disconnect,
    finishing,
    group_of,
    join,
    set_timeout,
    wait_for_connected,
)
from common.join.store import OpenStore
from common.join.view import gpu_of
from common.launch.layout import Worker
from common.launch.options import JoinOptions

REJOIN_SECONDS = 20.0  # for the members of the next generation, which are all there


@contextmanager
def elastic_group(worker: Worker, options: JoinOptions) -> Iterator[tuple[Group, ElasticMembers]]:
    """The process group of the members in this generation, as `process_group`.

    Raises MembersChanged where these change: the caller then begins again, in the place that this names.
    """
    device, backend, problem = choose(worker, options)
    if backend == "nccl":
        problem = problem or "--elastic: NCCL's ranks cannot be connected anew yet: use --backend gloo"
    opened, membership = open_members(worker, options)
    membership.gpu = gpu_of(device, options)
    if membership.prepares_for:
        if problem:
            raise UserError(problem)
        with alone(worker, options, device, membership) as group:
            yield group, ElasticMembers(group, membership)
        raise AssertionError("a process that prepares waits to be let in before it trains")
    joined = _join(membership, worker, options, opened, device, backend, problem)
    group = group_of(worker, options, device, backend, joined, elastic=True)
    leave = partial(disconnect, worker, joined)
    with finishing(group), surviving(membership, worker, joined.views, joined.store, group.connections, leave):
        with membership.connecting():
            connect(worker, options, device, backend, joined, membership.connect_seconds, CONNECT_ATTEMPTS)
            set_timeout(membership.collective_seconds)
            group.connections.note(*ports_of(joined.store), *membership.store_ports(joined.views))
            wait_for_connected(backend)
        yield group, ElasticMembers(group, membership)
        leave()


def _join(
    membership: Membership,
    worker: Worker,
    options: JoinOptions,
    opened: OpenStore,
    device: torch.device,
    backend: str,
    problem: str,
) -> Joined:
    """As `join`, for ranks that come and go. Raises MembersChanged where a run is under way, and where a member is lost
    while the next generation joins."""
    what, standby = (device, backend, problem), membership.address
    if not membership.generation:
        try:
            with naming_lost_store(worker):
                return join(worker, options, opened, *what, standby=standby)
        except RunUnderWay as run:
            leader = run.leader
        raise prepare(membership, leader)
    soon = replace(options, join_timeout_seconds=min(options.join_timeout_seconds, REJOIN_SECONDS))
    try:
        return join(worker, soon, opened, *what, membership.generation, standby, membership.ended)
    except (RankLost, RuntimeError) as error:
        if not (isinstance(error, RankLost) or is_contact_lost(error)):
            raise
    raise meet_again(membership)
