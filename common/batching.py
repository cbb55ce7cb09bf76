"""The arithmetic of the global batch: which samples of an optimizer step belong to which rank.

The order of samples does not know the layout. With B = global_batch, step s of an epoch owns the slice
[s*B, (s+1)*B) of the epoch's order, and the ranks cut that slice into contiguous parts by their shares:

    global batch 10, shares (4, 4, 2)        | rank 0  | rank 1  |r 2|
                                             | 0 1 2 3 | 4 5 6 7 |8 9|
    its tail of 4 samples                    | 0 1 | 2 3 |             (rank 2's part is empty)

Nothing is padded and nothing repeated; only the last step of an epoch may hold fewer than B samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch of `samples` samples is cut into optimizer steps, and each step into the ranks' parts.

    `shares[r]` is rank r's part of a full global batch, in samples; the shares add up to the global batch.
    """

    samples: int
    shares: tuple[int, ...]

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return sum(self.shares)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def global_count(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks; `step` counts from the start of training."""
        begin = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - begin)

    def part(self, step: int, rank: int) -> range:
        """Rank `rank`'s part of optimizer step `step`, as positions in the epoch's order."""
        begin = step % self.steps_per_epoch * self.global_batch
        parts = self.shares
        if self.global_count(step) < self.global_batch:
            parts = split(self.global_count(step), self.shares)
        first = begin + sum(parts[:rank])
        return range(first, first + parts[rank])


def plan_batches(samples: int, global_batch: int, world_size: int, weights: Sequence[float] | None = None) -> BatchPlan:
    """A BatchPlan with equal shares, or shares in proportion to `weights`, one number for each rank."""
    weights = weights or [1.0] * world_size
    assert len(weights) == world_size, (weights, world_size)
    return BatchPlan(samples, split(global_batch, weights))


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut `total` into whole parts in proportion to `weights`, which add up to `total` exactly.

    The method of largest remainders (Hamilton): everyone gets the whole number below its due, and what is left
    goes one each to the largest remainders, the lower index first where two are equal.
    """
    scale = total / sum(weights)
    dues = [weight * scale for weight in weights]
    parts = [int(due) for due in dues]
    by_remainder = sorted(range(len(dues)), key=lambda index: (parts[index] - dues[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def micro_batches(part: Sequence, micro_batch: int | None) -> Iterator[tuple[Sequence, bool]]:
    """Cut a rank's part of one optimizer step into pieces of at most `micro_batch` samples, with `is_last`.

    `part` is anything with a length and slices along its first dimension, such as `Batch`. An empty part gives
    one micro-batch of zero rows: its forward, backward and all-reduce run as ever and add exactly zero, so
    every rank enters each collective once.
    """
    size = micro_batch or max(1, len(part))
    starts = range(0, max(1, len(part)), size)
    for start in starts:
        yield part[start : start + size], start == starts[-1]
