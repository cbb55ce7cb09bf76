"""Which samples this rank trains on in each optimizer step, in an order that does not depend on the layout."""

from collections.abc import Iterable, Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from common.errors import UserError
from common.uneven.plan import BatchPlan
from common.uneven.seeding import derive_seed


class Indices(list[int]):
    """The samples of one batch, and the epoch in which they are drawn.

    A data set that augments or masks needs the epoch, and the loader's worker processes cannot see the sampler.
    """

    def __init__(self, indices: Iterable[int] = (), epoch: int = 0):
        super().__init__(indices)
        self.epoch = epoch  # evaluation always draws as in epoch 0


class UnevenDistributedSampler(Sampler[list[int]]):
    """For each optimizer step of an epoch, the indices of this rank's part; possibly none.

    The epoch's order is a permutation drawn from (seed, epoch) alone, so every layout sees the same global batches.
    Call `set_epoch` before each epoch, as with torch's DistributedSampler. The plan's shares may change from
    `next_step` on: the first step that has not been handed out. A loader's processes fetch ahead, so that may be far
    beyond the step that is training.
    """

    def __init__(self, plan: BatchPlan, rank: int, seed: int, shuffle: bool = True):
        self.plan, self.rank, self.seed, self.shuffle = plan, rank, seed, shuffle
        self.epoch = self.skip_steps = self.next_step = 0
        self.is_new_epoch = True  # set_epoch has been called since the last one
        self.drawn, self.drawn_epoch = torch.empty(0, dtype=torch.int64), -1

    def set_epoch(self, epoch: int, skip_steps: int = 0) -> None:
        """Use the order of epoch `epoch`, and skip its first `skip_steps` steps, which a resumed run has done."""
        self.epoch, self.skip_steps = epoch, skip_steps
        self.next_step = epoch * self.plan.steps_per_epoch + skip_steps
        self.is_new_epoch = True

    def order(self) -> torch.Tensor:
        """This epoch's order of samples, the same on every rank: int64 (samples,)."""
        if self.drawn_epoch != self.epoch:
            self.drawn, self.drawn_epoch = self.order_of(self.epoch), self.epoch
        return self.drawn

    def order_of(self, epoch: int) -> torch.Tensor:
        """The order of samples in epoch `epoch`: int64 (samples,)."""
        if not self.shuffle:
            return torch.arange(self.plan.samples)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self.plan.samples, generator=generator)

    def sums_in_steps(self, counts: Sequence[float] | torch.Tensor) -> "SumsInSteps":
        """For each step of training, the sum of `counts` over its samples, on all ranks: `sums[step]`.

        `counts` has one number for each sample, such as its tokens. Every rank computes the same sums, without a
        collective. They are the denominators of a loss that is a mean over tokens.
        """
        return SumsInSteps(self, counts)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_new_epoch:
            raise UserError(
                f"epoch {self.epoch} begins again, in the same order: call sampler.set_epoch(epoch, skip_steps) before "
                "each epoch"
            )
        self.is_new_epoch = False
        first = self.epoch * self.plan.steps_per_epoch
        for step in range(first + self.skip_steps, first + self.plan.steps_per_epoch):
            self.next_step = step + 1
            yield Indices(self.rows(step), self.epoch)

    def part(self, step: int, rank: int) -> Sized:
        """Rank `rank`'s part of step `step`: here, positions in the epoch's order."""
        return self.plan.part(step, rank)

    def work(self, part: Sized) -> float:
        """How much work a part is, in whatever the ranks' parts are balanced by: here, samples."""
        return len(part)

    def rows(self, step: int) -> list[int]:
        """This rank's samples of step `step`, which must be in the epoch of `set_epoch`."""
        part = self.plan.part(step, self.rank)
        return self.order()[part.start : part.stop].tolist()

    def __len__(self) -> int:
        return self.plan.steps_per_epoch - self.skip_steps


class SumsInSteps:
    """What `sums_in_steps` returns. A step counts from the start of training, from 0, in an epoch's own order."""

    def __init__(self, sampler: UnevenDistributedSampler, counts: Sequence[float] | torch.Tensor):
        self.sampler, self.counts = sampler, torch.as_tensor(counts)
        if self.counts.is_floating_point():  # such as class weights; numbers of Python would be rounded to float32
            self.counts = torch.as_tensor(counts, dtype=torch.float64)
        assert len(self.counts) == sampler.plan.samples, (len(self.counts), sampler.plan.samples)
        self.epoch, self.sums = -1, torch.empty(0)

    def __getitem__(self, step: int) -> float:
        epoch, number = divmod(step, self.sampler.plan.steps_per_epoch)
        if epoch != self.epoch:
            in_order = self.counts[self.sampler.order_of(epoch)]
            self.sums = torch.stack([one.sum() for one in in_order.split(self.sampler.plan.global_batch)])
            self.epoch = epoch
        return self.sums[number].item()
