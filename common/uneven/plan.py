"""The arithmetic of the global batch: which samples of an optimizer step belong to which rank.

The order of samples does not depend on the layout. With B = global_batch, step s of an epoch owns the slice
[s*B, (s+1)*B) of the epoch's order, and the ranks cut that slice into contiguous parts by their shares:

    global batch 10, shares (4, 4, 2)        | rank 0  | rank 1  |r 2|
                                             | 0 1 2 3 | 4 5 6 7 |8 9|
    a last step with 4 samples               | 0 1 | 2 3 |             (rank 2's part is empty)

Nothing is padded and nothing repeated. Only the last step of an epoch may hold fewer than B samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

KEPT_CHANGES = 100  # of the shares: no loader and no report goes back further


@dataclass(frozen=True)
class Shares:
    """How each global batch is divided between the ranks, from step `from_step` on."""

    from_step: int
    weights: tuple[float, ...]  # by rank
    samples: tuple[int, ...]  # by rank, of a full global batch


@dataclass
class BatchPlan:
    """How an epoch of `samples` samples is cut into optimizer steps, and each step into the ranks' parts.

    `step` counts from the start of training, from 0. Shares may change between two steps (`change_shares`); the global
    batch never does. Sampler, report and trainer hold the same plan, so that a change reaches all of them.
    """

    samples: int
    global_batch: int  # samples per optimizer step over all ranks
    changes: list[Shares]  # the last hundred, in order of their steps
    balances_tokens: bool = False  # the ranks' parts follow the weights in tokens, and not in samples

    @property
    def shares(self) -> tuple[int, ...]:
        """Each rank's part of a full global batch, in samples, after the last change."""
        return self.changes[-1].samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that an epoch takes: samples / global_batch, rounded up."""
        return -(-self.samples // self.global_batch)

    def change_shares(self, weights: Sequence[float], from_step: int) -> None:
        """From step `from_step` on, let the shares follow `weights`, one a rank; earlier steps keep theirs.

        Every rank must make the same change. A loader that fetches ahead has cut some steps already: choose a
        `from_step` that none has reached (`UnevenDistributedSampler.next_step`).
        """
        assert len(weights) == len(self.shares) and min(weights) >= 0 < sum(weights) < math.inf, (weights, self.shares)
        while self.changes and self.changes[-1].from_step >= from_step:
            self.changes.pop()
        self.changes.append(Shares(from_step, tuple(weights), split(self.global_batch, weights)))
        del self.changes[:-KEPT_CHANGES]

    def begin(self, step: int) -> int:
        """Position of step `step`'s first sample in its epoch's order."""
        return step % self.steps_per_epoch * self.global_batch

    def global_count(self, step: int) -> int:
        """Number of samples in step `step`, over all ranks."""
        return min(self.global_batch, self.samples - self.begin(step))

    def shares_at(self, step: int) -> tuple[int, ...]:
        """Each rank's part of a full global batch at step `step`, in samples."""
        return self._at(step).samples

    def weights_at(self, step: int) -> tuple[float, ...]:
        """What the shares of step `step` follow, one number a rank."""
        return self._at(step).weights

    def _at(self, step: int) -> Shares:
        return next((change for change in reversed(self.changes) if change.from_step <= step), self.changes[0])

    def part(self, step: int, rank: int) -> range:
        """Rank `rank`'s part of step `step`, as positions in the epoch's order."""
        parts, count = self.shares_at(step), self.global_count(step)
        if count < self.global_batch:
            parts = split(count, parts)
        first = self.begin(step) + sum(parts[:rank])
        return range(first, first + parts[rank])


def plan_batches(samples: int, global_batch: int, world_size: int, weights: Sequence[float] | None = None) -> BatchPlan:
    """A BatchPlan with equal shares, or shares in proportion to `weights`, one number a rank."""
    weights = weights or [1.0] * world_size
    assert len(weights) == world_size, (weights, world_size)
    return BatchPlan(samples, global_batch, [Shares(0, tuple(weights), split(global_batch, weights))])


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut `total` into whole parts in proportion to `weights`. The parts add up to `total` exactly.

    The method of largest remainders (Hamilton's): each part is its due rounded down. The rest is given out one by one
    to the largest remainders; where two are equal, the lower index comes first.
    """
    scale = total / sum(weights)
    dues = [weight * scale for weight in weights]
    parts = [int(due) for due in dues]
    by_remainder = sorted(range(len(dues)), key=lambda index: (parts[index] - dues[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def fastest(cost: Sequence[float], update: Sequence[float], work: float) -> list[float]:
    """`work` divided between ranks of steady speeds so that the last one is done as early as possible.

    Rank r takes cost[r] for a unit and update[r] besides. All ranks that get work end at the same time T, and
    sum((T - update[r]) / cost[r]) = work; a rank whose update alone takes longer than T gets none.
    """
    busy = set(range(len(cost)))
    while True:
        end = (work + sum(update[rank] / cost[rank] for rank in busy)) / sum(1 / cost[rank] for rank in busy)
        late = {rank for rank in busy if update[rank] >= end}
        if not late:
            return [(end - update[rank]) / cost[rank] if rank in busy else 0.0 for rank in range(len(cost))]
        busy -= late
