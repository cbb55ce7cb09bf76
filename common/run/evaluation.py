"""Batches of a held-out set for an evaluation on all ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from common.uneven.batches import move
from common.uneven.evaluation import EvaluationSampler
from common.uneven.loading import part_loader


class EvaluationLoader:
    """An iterable over this rank's batches, on the device. Every sample is on exactly one rank."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: EvaluationSampler,
        batch: Callable[[], int],  # the most samples in a batch, asked before each evaluation
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ):
        self.sampler, self.batch, self.device, self.dtype = sampler, batch, device, dtype
        self.loader = part_loader(dataset, sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_batch(self.batch())
        for batch in self.loader:
            yield move(batch, self.device, self.dtype)
