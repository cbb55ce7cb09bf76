"""A DataLoader of any map-style data set whose items are this rank's parts, on any layout.

What a stock DataLoader lacks here: an empty batch for an empty part, and random numbers (augmentation, random
crops, noise) that depend on (seed, epoch, sample) and not on the rank, its share, or the number of worker processes.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from common.errors import UserError
from common.uneven.batches import take_rows
from common.uneven.guards.data_set import collated, require_repeatable
from common.uneven.guards.fingerprint import fingerprint
from common.uneven.options.workers import pack_tensors, unpack_tensors
from common.uneven.sampling import Indices
from common.uneven.seeding import derive_seed

SAMPLER_SAYS = "the sampler says which samples make a batch, in which order; the last batch of an epoch is smaller"
NOT_OPTIONS = {
    **dict.fromkeys(("batch_size", "sampler", "batch_sampler", "shuffle", "drop_last"), SAMPLER_SAYS),
    "collate_fn": "give the function as collate=",
}


class BatchedDataset(Dataset):
    """A data set that makes a whole batch at once, which is faster than sample by sample. Override `get_batch`."""

    def get_batch(self, indices: list[int]) -> Any:
        """The batch of these samples; an empty batch where there are none.

        Random numbers must depend on `indices.epoch` (see `sampling.Indices`) and the sample, not on its neighbours.
        """
        raise NotImplementedError


def part_loader(
    dataset: Dataset,
    sampler: Sampler[list[int]],
    /,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> DataLoader:
    """A DataLoader whose items are the batches of `sampler`: one item is this rank's part of one optimizer step.

    `collate` makes a batch of a list of samples, as in any DataLoader, and must draw no random numbers. `seed` is the
    run's. `options` are further options of DataLoader, such as num_workers and pin_memory.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} has no samples with numbers, so it cannot be cut by a plan: use a data set "
            "with `__len__` and `__getitem__`"
        )
    if wrong := NOT_OPTIONS.keys() & options.keys():
        name = min(wrong)
        raise UserError(f"part_loader has no {name}=: {NOT_OPTIONS[name]}")
    return DataLoader(Parts(dataset, seed, collate), batch_sampler=sampler, collate_fn=_as_is, **options)


class Parts(Dataset):
    """`dataset` as a data set of batches: the item of a list of indices is their batch. Used by `part_loader`."""

    def __init__(self, dataset: Dataset, seed: int, collate: Callable[[list[Any]], Any]):
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self.is_checked = False

    def __getstate__(self) -> dict[str, Any]:  # for a loader's process
        return pack_tensors(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(unpack_tensors(state))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset does not promise a length

    def __getitems__(self, indices: list[int]) -> Any:
        if not isinstance(indices, Sequence):
            raise UserError(
                f"the sampler gives {indices!r}, not a list of the samples of a part: use "
                "UnevenDistributedSampler(plan, rank, seed) of common.uneven.sampling"
            )
        if isinstance(self.dataset, BatchedDataset):
            return self.dataset.get_batch(indices)
        epoch, chosen = getattr(indices, "epoch", 0), indices or [0]
        with _random_state_kept():
            if not self.is_checked:
                self.is_checked = True
                name = type(self.dataset).__name__
                require_repeatable(lambda index: self.sample(index, epoch), chosen, self.collate, name)
            batch = collated(self.collate, [self.sample(index, epoch) for index in chosen])
        if batch is None:
            raise UserError(
                f"the collate function has returned None for {len(chosen)} samples: it must make a batch with a row "
                "for each sample that it is given"
            )
        return batch if indices else take_rows(batch, slice(0, 0))

    def sample(self, index: int, epoch: int) -> Any:
        """One sample of the data set, its random numbers drawn from (seed, epoch, sample)."""
        seed_all(derive_seed(self.seed, "sample", epoch, index))
        return self.dataset[index]


def dataset_fingerprint(dataset: Dataset, samples: int = 256) -> str:
    """Sixteen hex digits of the length of a data set and of `samples` of its samples, evenly spread.

    Compare it between a run and its checkpoint; `wrap` compares one of 16 samples between the ranks.
    """
    parts = Parts(dataset, 0, list)
    count = len(parts)
    chosen = Indices(sorted({index * count // samples for index in range(samples)}) if count else ())
    return fingerprint(count, parts.__getitems__(chosen) if chosen else None)


def seed_all(seed: int) -> None:
    """Seed the generators that data sets draw from: torch's on the CPU, numpy's and Python's."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Random numbers that the body draws do not change those of the training, such as dropout's."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _as_is(batch: Any) -> Any:
    """The DataLoader's collate function: `Parts` has made a batch already."""
    return batch
