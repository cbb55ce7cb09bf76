"""Which samples this rank sees: an uneven sampler for training and an unpadded one for evaluation.

Both are batch samplers: give them to `DataLoader(batch_sampler=...)`, and one item of the loader is this rank's
part of one optimizer step (training) or one batch of its shard (evaluation).
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from common.batching import BatchPlan
from common.seeding import derive_seed


class UnevenDistributedSampler(Sampler):
    """For each optimizer step of an epoch, the indices of this rank's part; possibly none.

    The epoch's order is a permutation of (seed, epoch) alone, so every layout sees the same global batches.
    Call `set_epoch` before each epoch, as with torch's DistributedSampler; `skip_steps` are those
    that a resumed run has already done, without loading their samples.
    """

    def __init__(self, plan: BatchPlan, rank: int, seed: int, shuffle: bool = True):
        self.plan, self.rank, self.seed, self.shuffle = plan, rank, seed, shuffle
        self.epoch = self.skip_steps = 0

    def set_epoch(self, epoch: int, skip_steps: int = 0) -> None:
        """Draw the order of epoch `epoch`, and skip the first `skip_steps` steps of it."""
        self.epoch, self.skip_steps = epoch, skip_steps

    def order(self) -> torch.Tensor:
        """This epoch's order of samples, the same on every rank: int64 (samples,)."""
        if not self.shuffle:
            return torch.arange(self.plan.samples)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        return torch.randperm(self.plan.samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for step in range(self.skip_steps, self.plan.steps_per_epoch):
            part = self.plan.part(step, self.rank)
            yield order[part.start : part.stop].tolist()

    def __len__(self) -> int:
        return self.plan.steps_per_epoch - self.skip_steps


class EvaluationSampler(Sampler):
    """This rank's contiguous shard of an evaluation set, in batches: every sample on exactly one rank.

    Shards differ by at most one sample, and nothing is repeated to even them out. Ranks may run different
    numbers of batches, so run the unwrapped model: nothing in the loop may be a collective.
    """

    def __init__(self, samples: int, rank: int, world_size: int, batch: int):
        self.shard = range(samples * rank // world_size, samples * (rank + 1) // world_size)
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.shard), self.batch):
            yield list(self.shard[start : start + self.batch])

    def __len__(self) -> int:
        return -(-len(self.shard) // self.batch)
