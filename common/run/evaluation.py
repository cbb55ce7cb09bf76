"""Batches of a held-out set for an evaluation on all ranks."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from common.errors import UserError
from common.uneven.batches import move
from common.uneven.evaluation import EvaluationSampler
from common.uneven.loading import dataset_fingerprint, part_loader
from common.uneven.options.memory import is_out_of_memory, wanted_memory

if TYPE_CHECKING:
    from common.run.run import Run


class EvaluationLoader:
    """An iterable over this rank's batches, on the device. Every sample is on exactly one rank."""

    def __init__(self, run: "Run", dataset: Dataset, **options: Any):
        self.run, samples, place = run, len(dataset), (run.worker.rank, run.worker.world_size)  # type: ignore[arg-type]
        self.sampler = EvaluationSampler(samples, *place, 1, run.dynamic_batches)
        self.dataset, self.is_read = dataset, False
        self.loader = part_loader(dataset, self.sampler, **options)

    def data_fingerprint(self) -> str:
        """A short text that is the same for the same data; empty where samples are of an unknown kind."""
        with contextlib.suppress(UserError):
            return dataset_fingerprint(self.dataset, samples=16)
        return ""

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_batch(self.run.eval_batch)
        self.is_read = True
        for batch in self.loader:
            yield move(batch, self.run.device, self.run.precision.dtype)
        self.is_read = False

    def too_large(self, error: Exception) -> UserError | None:
        """What to say of an error of a loop over these batches, if they do not fit into memory."""
        in_step = self.run.batches.timer.is_marked("begin")
        if in_step or not self.is_read or not is_out_of_memory(error):
            return None
        samples = min(self.sampler.batch, len(self.sampler.shard))
        return UserError(
            f"an evaluation of {samples} samples at once does not fit into the memory of {self.run.device} "
            f"({wanted_memory(error)}): give a smaller --eval-batch; the result stays the same"
        )
