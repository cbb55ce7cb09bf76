"""GlobalBatchLoader: this rank's part of each global batch of a whole training, on any layout.

    batches = GlobalBatchLoader(train_set, global_batch=256, seed=0, micro_batch=64, epochs=3, step=step)
    model = ddp.wrap(net, batches, compute_loss)
    for batch in batches:
        for micro, is_last in batch.micro_batches():
            with model.no_sync(enabled=not is_last):
                (compute_loss(model, micro) / batch.global_count).backward()
        optimizer.step()
        optimizer.zero_grad()

The order of samples depends on (seed, epoch) alone. Optimizer step `s` takes the slice [s*B, (s+1)*B) of it, and rank
`r` a contiguous part of that slice, by its share. Nothing is padded and nothing repeated.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, default_collate

from common.errors import UserError
from common.uneven.batches import micro_batches, move
from common.uneven.guards.same import collectives
from common.uneven.loading import BatchedDataset, dataset_fingerprint, part_loader
from common.uneven.options.timer import NOT_EXCHANGED, StepTimer
from common.uneven.options.token_balance import TokenBalancedSampler
from common.uneven.plan import plan_batches
from common.uneven.sampling import Indices, UnevenDistributedSampler
from common.uneven.seeding import derive_seed, seed_noise

Cut = Callable[[Any, int | None], Iterator[tuple[Any, bool]]]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This rank's part of one optimizer step's global batch."""

    step: int  # optimizer steps done before it
    global_count: float  # over all ranks: the samples, or the sum of their `counts`. Divide the summed loss by it
    global_samples: int  # the samples of all ranks
    work: float  # of this rank: its samples, or their tokens where those are balanced
    pieces: Callable[[], Iterator[tuple[Any, bool]]]
    timer: StepTimer

    def micro_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield pieces of the part, on the device, each with `is_last`: at least one, perhaps empty.

        Raises UserError after a piece with which the loop has waited for other ranks, but for the last one.
        """
        self.timer.is_cutting, self.timer.cut_item = True, self.timer.item
        try:
            for piece, is_last in self.pieces():
                before = 0 if is_last else collectives()
                yield piece, is_last
                if not is_last and collectives() != before:
                    raise UserError(
                        "the loop over the micro-batches has waited for other ranks, in forward, in the loss or beside "
                        "them, but ranks have different numbers of micro-batches: do it once, before that loop "
                        "(batch.sum_over_ranks), or leave out --micro-batch"
                    )
        finally:
            self.timer.is_cutting = False

    @torch.no_grad()
    def sum_over_ranks(self, function: Callable[[Any], torch.Tensor]) -> Any:
        """The sum of `function(micro)` over the micro-batches of all ranks, without gradients, a number or a tensor of
        float64: for a count that only the batch knows, such as that of its valid pixels after augmentation.

        Call it before the loop over the micro-batches, which are as many as a rank has samples for, so that nothing in
        it may wait for other ranks. Every rank must call this. Raises UserError within that loop.
        """
        if self.timer.is_cutting:
            raise UserError(
                "batch.sum_over_ranks() within the loop over the micro-batches, of which ranks have different numbers: "
                "call it once, before that loop"
            )
        total = sum(torch.as_tensor(function(micro), device=self.timer.device).double() for micro, _ in self.pieces())
        assert isinstance(total, torch.Tensor)  # of at least one micro-batch
        if dist.is_initialized():
            dist.all_reduce(total)
        return total if total.dim() else total.item()


class GlobalBatchLoader(Iterator[StepBatch]):
    """An iterator over all epochs; each item is this rank's part of one optimizer step.

    It knows its position (`step`), moves the part to `device`, cuts it into micro-batches, and seeds the noise of the
    step, such as dropout's, with (seed, step, rank). Every rank makes one, of the same data.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        step: int = 0,
        micro_batch: int | None = None,
        shares: Sequence[float] | None = None,
        counts: Sequence[float] | torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        pass_tokens: int = 0,
        cut: Cut | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ):
        """`dataset` has `__len__` and `__getitem__`, or is a `BatchedDataset`; `collate` makes a batch of samples.

        `global_batch`: samples per optimizer step over all ranks. `step`: optimizer steps done, of a resumed run.
        `micro_batch`: the most samples in one forward on this rank, None for all at once. `shares`: how each global
        batch is divided, one number for each rank, in any unit. `counts`: for each sample, what the loss is a mean
        over, such as its tokens; by default samples. `lengths`: of the samples, in tokens; parts are then balanced by
        tokens, counted with padding. `cut(part, micro_batch)` yields pieces with `is_last`, where rows are not all that
        there is to cut; each of its forwards costs `pass_tokens` more. `device`: by default the CPU. `dtype`: of
        floating-point tensors. `options` are further ones of DataLoader, such as num_workers.
        """
        self.rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.dataset, self.seed, self.epochs, self.step = dataset, seed, epochs, step
        self.micro_batch, self.cut, self.dtype = micro_batch, cut, dtype
        self.device = device or torch.device("cpu")
        self.timer = StepTimer(self.device)
        self.plan = plan_batches(len(dataset), global_batch, world_size, shares)  # type: ignore[arg-type]
        if lengths is None:
            self.sampler = UnevenDistributedSampler(self.plan, self.rank, seed)
        else:
            of_pass = pass_tokens if cut else None
            self.sampler = TokenBalancedSampler(self.plan, self.rank, seed, lengths, of_pass)
        self.longest = 0 if lengths is None else int(torch.as_tensor(lengths).argmax())  # a sample of the most tokens
        self.counts = None if counts is None else self.sampler.sums_in_steps(counts)
        self.loader = part_loader(dataset, self.sampler, seed, collate, **options)
        self.items: Iterator[Any] | None = None  # of the epoch that has begun
        self.last: StepBatch  # that it has given

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.plan.steps_per_epoch * self.epochs

    def __len__(self) -> int:
        """Optimizer steps that are left."""
        return max(0, self.total_steps - self.step)

    def __next__(self) -> StepBatch:
        if self.items is not None and not self.timer.has_reduced:
            raise UserError(NOT_EXCHANGED)
        if self.step >= self.total_steps:
            raise StopIteration
        epoch, first_step = divmod(self.step, self.plan.steps_per_epoch)
        self.timer.mark("begin")  # starting the loader's workers is loading too
        if self.items is None or not first_step:
            self.sampler.set_epoch(epoch, first_step)
            parts: Any = self.loader.dataset
            is_plain = not (self.loader.num_workers or self.loader.pin_memory)
            # What the loader does without processes of its own, in half of the time.
            self.items = map(parts.__getitems__, self.sampler) if is_plain else iter(self.loader)
        try:
            part = next(self.items)
        except BaseException as error:
            self.items = None  # who tries again gets this step's samples, and not the next one's
            if isinstance(error, StopIteration):  # else the trainer's loop would end, as if all were done
                name = type(self.dataset).__name__
                raise RuntimeError(f"{name} has raised StopIteration for a sample") from error
            raise
        if first_step == self.plan.steps_per_epoch - 1:
            next(self.items, None)  # there is none, and the loader's processes are ready for the next epoch
        self.timer.next_item()
        seed_noise(self.device, derive_seed(self.seed, "dropout", self.step, self.rank))
        self.last = self._batch(part)
        return self.last

    def _batch(self, part: Any) -> StepBatch:
        step = self.step
        self.step += 1
        mine = self.sampler.part(step, self.rank)
        samples = self.plan.global_count(step)
        count = samples if self.counts is None else self.counts[step]
        if self.cut is None:
            moved = move(part, self.device, self.dtype)
            pieces = functools.partial(micro_batches, moved, mine, self.micro_batch)
        else:
            pieces = functools.partial(self._cut, part, self.micro_batch)
        return StepBatch(step, count, samples, self.sampler.work(mine), pieces, self.timer)

    def _cut(self, part: Any, micro_batch: int | None) -> Iterator[tuple[Any, bool]]:
        assert self.cut is not None
        for piece, is_last in self.cut(part, micro_batch):
            yield move(piece, self.device, self.dtype), is_last

    def data_fingerprint(self) -> str:
        """A short text that is the same for the same data; empty where samples are of an unknown kind."""
        with contextlib.suppress(UserError):
            return dataset_fingerprint(self.dataset, samples=16)
        return ""

    def sample_batch(self, rows: int) -> Any:
        """One forward's batch of the longest sample, `rows` times; with 0 an empty batch."""
        indices = Indices([self.longest] * rows)
        is_batched = isinstance(self.dataset, BatchedDataset)
        part = self.dataset.get_batch(indices) if is_batched else self.loader.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        if self.cut is None:
            return move(part, self.device, self.dtype)
        return next(self._cut(part, None))[0]
