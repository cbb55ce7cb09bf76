"""Batches of a held-out set for an evaluation on all ranks."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
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
        self.dataset = dataset
        self.loader = part_loader(dataset, self.sampler, **options)

    def data_fingerprint(self) -> str:
        """A short text that is the same for the same data; empty where samples are of an unknown kind."""
        with contextlib.suppress(UserError):
            return dataset_fingerprint(self.dataset, samples=16)
        return ""

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_batch(self.run.eval_batch)
        for batch in self.loader:
            yield move(batch, self.run.device, self.run.precision.dtype)


def no_memory(run: "Run", error: Exception) -> UserError | None:
    """What to say of an error between two steps, as in an evaluation, that is for want of memory; None of any other."""
    if not is_out_of_memory(error) or not hasattr(run, "log") or run.batches.timer.is_marked("begin"):
        return None
    _, *frames = traceback.extract_tb(error.__traceback__)
    called = [frame for frame in frames if Path(frame.filename).parent == Path(frames[0].filename).parent]
    where = f"{' > '.join(frame.name for frame in called)} (line {called[-1].lineno} of {called[-1].filename})"
    return UserError(
        f"memory ran out between two steps ({wanted_memory(error)}), in {where}: "
        f"if it is an evaluation, give a --eval-batch smaller than {run.eval_batch}; its result stays the same"
    )
