"""A model of one training step: what each rank computes, and how much of the exchange nothing else hides.

    rank r computes      share / speed seconds: a third of it forward, the rest backward
    gradients            are exchanged in pieces during backward, as DDP does (1 MB first, then 25 MB each), one after
                         another, each when the slowest rank has it
    an exchange          of n bytes between W ranks in a ring takes 2 (W - 1) latencies, and every link carries
                         2 (W - 1) / W x n bytes each way; the slowest link counts

A step ends when the slowest rank has computed and the last piece is exchanged; then the optimizer takes its step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.uneven.balance import fastest
from common.uneven.batching import split

FORWARD = 1 / 3  # of forward and backward
FIRST_PIECE, PIECE = 2**20, 25 * 2**20  # bytes, of DDP's buckets


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
    updates: tuple[float, ...]  # seconds of an optimizer step, by rank
    inside: Link  # between the ranks of a node
    between: Link  # between nodes

    @property
    def ranks_of_nodes(self) -> list[range]:
        ends = [sum(self.nodes[: number + 1]) for number in range(len(self.nodes))]
        return [range(end - size, end) for end, size in zip(ends, self.nodes, strict=True)]


@dataclass(frozen=True)
class Way:
    """How to train: the flags, in numbers."""

    balanced: bool = False
    compressed: float = 1.0  # the bytes that are exchanged, as a part of the gradients'
    sync_every: int = 0  # 0: nodes exchange in every step

    @property
    def flags(self) -> str:
        found = ["--balance auto"] if self.balanced else []
        found += ["--compress bf16"] if self.compressed < 1 else []
        found += [f"--sync-every {self.sync_every}"] if self.sync_every else []
        return " ".join(found) or "equal shares"


@dataclass(frozen=True)
class Step:
    """What a step takes, in seconds."""

    shares: tuple[int, ...]  # samples, by rank
    computing: tuple[float, ...]  # by rank
    exchange: float  # after the slowest rank has computed
    update: float

    @property
    def seconds(self) -> float:
        return max(self.computing) + self.exchange + self.update

    @property
    def waiting(self) -> list[float]:
        """By rank, for the slowest."""
        return [max(self.computing) - one for one in self.computing]


def predict(cluster: Cluster, global_batch: int, gradients: float, way: Way) -> Step:
    """A step of `global_batch` samples, whose gradients have so many bytes."""
    costs = [1 / speed for speed in cluster.speeds]
    weights: Sequence[float] = [1.0] * len(costs)
    if way.balanced:
        weights = fastest(costs, cluster.updates, float(global_batch))
    shares = split(global_batch, weights)
    computing = tuple(share * cost for share, cost in zip(shares, costs, strict=True))
    sent = gradients * way.compressed
    if not way.sync_every:
        link = cluster.between if len(cluster.nodes) > 1 else cluster.inside
        exchange = _left_over(max(computing), sent, len(shares), link)
    else:
        exchange = max(
            max(computing[rank] for rank in ranks)
            + _left_over(max(computing[rank] for rank in ranks), sent, len(ranks), cluster.inside)
            for ranks in cluster.ranks_of_nodes
        ) - max(computing)
        outer = all_reduce(gradients, len(cluster.nodes), cluster.between)
        spread = max(all_reduce(gradients, size, cluster.inside) for size in cluster.nodes) / 2
        exchange += (outer + spread) / way.sync_every
    return Step(shares, computing, exchange, max(cluster.updates))


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.rate)


def _left_over(computing: float, gradients: float, ranks: int, link: Link) -> float:
    """Seconds until all pieces are exchanged, after the slowest rank has computed."""
    free, done = 0.0, 0.0
    while done < gradients:
        piece = min(FIRST_PIECE if not done else PIECE, gradients - done)
        done += piece
        ready = computing * (FORWARD + (1 - FORWARD) * done / gradients)
        free = max(free, ready) + all_reduce(piece, ranks, link)
    return max(0.0, free - computing)


def ways(cluster: Cluster, sync_every: int) -> list[Way]:
    """What a person can choose from."""
    found = [Way()]
    if max(cluster.speeds) > min(cluster.speeds):
        found.append(Way(balanced=True))
    if len(cluster.speeds) > 1:
        found += [replace(way, compressed=0.5) for way in found]
    if len(cluster.nodes) > 1:
        found += [replace(way, sync_every=sync_every) for way in found if way.compressed == 1]
    return found
