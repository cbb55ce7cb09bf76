"""A model of one training step: what each rank computes, and how much of the exchange nothing else hides.

    rank r computes      share / speed seconds: a third of it forward, the rest backward
    gradients            are exchanged in pieces during the backward of the last micro-batch, as DDP does (1 MB first,
                         then 25 MB each), each when the slowest rank has it; one is sent while another is on its way
    an exchange          of n bytes between W ranks takes what the doctor has measured on these ranks; or, in a ring,
                         2 (W - 1) latencies, and every link carries 2 (W - 1) / W x n bytes each way; the slowest
                         link counts

A step ends when the slowest rank has computed and the last piece is exchanged. What does not depend on the share,
such as loading and the optimizer, comes besides; so does an exchange of a few numbers every 1 to 5 seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from common.record.clock import seconds_between_exchanges
from common.uneven.plan import fastest, split

WORTH_A_FLAG = 0.95  # advise a flag that brings the time of a step below this part
FORWARD = 1 / 3  # of forward and backward
FIRST_PIECE, PIECE = 2**20, 25 * 2**20  # bytes, of DDP's buckets
MANY = 1e9  # bytes, of which a latency is a small part


@dataclass(frozen=True)
class Link:
    """What joins two ranks: bytes a second each way, and the seconds that a message takes one way."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """The ranks of each node, and what each can do."""

    nodes: tuple[int, ...]  # ranks of each node, such as (8, 2)
    speeds: tuple[float, ...]  # samples a second of forward and backward, by rank
    fixed: tuple[float, ...]  # seconds of a step whatever the share, by rank: loading, the optimizer
    inside: Link  # between the ranks of a node
    between: Link  # between nodes
    measured: tuple[tuple[float, float], ...] = ()  # all-reduces of all ranks: (bytes, seconds), by bytes

    @property
    def ranks_of_nodes(self) -> list[range]:
        return [range(end - size, end) for end, size in zip(accumulate(self.nodes), self.nodes, strict=True)]

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes over all ranks."""
        if len(self.measured) < 2:
            return all_reduce(size, len(self.speeds), self.between if len(self.nodes) > 1 else self.inside)
        pairs = [*pairwise(self.measured)]
        (small, quick), (large, slow) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
        return max(self.measured[0][1], quick + (slow - quick) * (size - small) / (large - small))


@dataclass(frozen=True)
class Way:
    """How to train: the flags, in numbers."""

    balanced: bool = False
    compressed: float = 1.0  # the bytes that are exchanged, as a part of the gradients'
    sync_every: int = 0  # 0: nodes exchange in every step

    @property
    def flags(self) -> str:
        found = ["--balance auto"] * self.balanced + ["--compress bf16"] * (self.compressed < 1)
        found += [f"--sync-every {self.sync_every}"] * (self.sync_every > 0)
        return " ".join(found) or "equal shares"


@dataclass(frozen=True)
class Step:
    """What a step takes, in seconds."""

    shares: tuple[int, ...]  # samples, by rank
    computing: tuple[float, ...]  # by rank
    exchange: float  # after the slowest rank has computed
    fixed: float  # of the slowest rank
    reports: float = 0.0  # the part of the time, besides, that the ranks' reports take

    @property
    def seconds(self) -> float:
        return (max(self.computing) + self.exchange + self.fixed) * (1 + self.reports)

    @property
    def waiting(self) -> list[float]:
        """By rank, for the slowest."""
        return [max(self.computing) - one for one in self.computing]


def predict(cluster: Cluster, global_batch: int, gradients: float, way: Way, micro_batches: int = 1) -> Step:
    """A step of `global_batch` samples, in so many micro-batches, whose gradients have so many bytes."""
    costs = [1 / speed for speed in cluster.speeds]
    weights = fastest(costs, cluster.fixed, float(global_batch)) if way.balanced else [1.0] * len(costs)
    shares = split(global_batch, weights)
    computing = tuple(share * cost for share, cost in zip(shares, costs, strict=True))
    last, slowest = 1 / micro_batches, max(computing)
    if not way.sync_every:
        exchange = _left_over(slowest, last, gradients, lambda size: cluster.all_reduce(size * way.compressed))
    else:
        ends = []
        for ranks in cluster.ranks_of_nodes:
            of_node = partial(all_reduce, ranks=len(ranks), link=cluster.inside)
            ready = max(computing[rank] for rank in ranks)
            ends.append(ready + _left_over(ready, last, gradients, of_node))
        outer = all_reduce(gradients, len(cluster.nodes), cluster.between)
        spread = max(all_reduce(gradients, size, cluster.inside) for size in cluster.nodes) / 2
        exchange = max(ends) - slowest + (outer + spread) / way.sync_every
    report = cluster.all_reduce(0.0) if len(shares) > 1 else 0.0
    return Step(shares, computing, exchange, max(cluster.fixed), report / seconds_between_exchanges(report))


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.rate)


def _left_over(computing: float, last: float, gradients: float, seconds_of: Callable[[float], float]) -> float:
    """Seconds until all pieces are exchanged, after the slowest rank has computed. `last` is the part of its computing
    that the last micro-batch takes, `seconds_of(bytes)` the time of an exchange."""
    a_byte, latency = (seconds_of(2 * MANY) - seconds_of(MANY)) / MANY, seconds_of(0.0)
    end, free, done = 0.0, 0.0, 0.0
    while done < gradients:
        piece = min(FIRST_PIECE if not done else PIECE, gradients - done)
        done += piece
        ready = computing * (1 - last * (1 - FORWARD) * (1 - done / gradients))
        free = max(free, ready) + piece * a_byte  # the links carry one piece after the other,
        end = max(end, free + latency, ready + seconds_of(piece))  # while others are on their way
    return max(0.0, end - computing)


def ways(cluster: Cluster, sync_every: int) -> list[Way]:
    """What a person can choose from."""
    exact = [Way(), Way(balanced=True)] if max(cluster.speeds) > min(cluster.speeds) else [Way()]
    halved = [replace(way, compressed=0.5) for way in exact] if len(cluster.speeds) > 1 else []
    rarer = [replace(way, sync_every=sync_every) for way in exact] if len(cluster.nodes) > 1 else []
    return exact + halved + rarer


def advice(steps: dict[Way, Step]) -> str:
    """One line of flags: the exact ones first, and others where they pay."""
    best = Way()
    for way, step in steps.items():
        if step.seconds < steps[best].seconds * WORTH_A_FLAG:
            best = way
    if best == Way():
        return "nothing to change: no flag would make a step 5 % faster"
    exact_ways = [way for way in steps if way.compressed == 1 and not way.sync_every]
    exact = min(exact_ways, key=lambda way: steps[way].seconds)
    if best == exact:
        return f"{best.flags} (the result stays the same)"
    return f"{best.flags} (changes the result: see docs/unequal-machines.md); the fastest exact way: {exact.flags}"
