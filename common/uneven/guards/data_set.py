"""A data set or a collate function whose random numbers would depend on the layout."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.uneven.guards.fingerprint import fingerprint

CHECKED_SAMPLES = 4  # of the first batch, which are read again


def require_repeatable(
    sample: Callable[[int], Any], chosen: Sequence[int], collate: Callable[[list[Any]], Any], name: str
) -> None:
    """Make a batch of the first of these samples twice: with the same seeds it must be the same. `sample` reads one,
    seeded, of the data set `name`. Raises UserError. Samples and batches of unknown classes are not compared."""
    twice = [[sample(index) for index in chosen[:CHECKED_SAMPLES]] for _ in range(2)]
    for index, first, second in zip(chosen, *twice, strict=False):
        if _differ(first, second):
            raise UserError(
                f"sample {index} of {name} is another one when it is read again with the "
                "same seeds, so it would depend on the layout: draw its random numbers from torch, numpy.random or "
                "random, without a generator of its own"
            )
    if _differ(*(collated(collate, samples) for samples in twice)):
        raise _random_collate(collate)


def collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """`collate(samples)`. Raises UserError where that draws random numbers."""
    before = _random_state()
    batch = collate(samples)
    if _random_state() != before:
        raise _random_collate(collate)
    return batch


def _random_collate(collate: Callable[[list[Any]], Any]) -> UserError:
    name = getattr(collate, "__name__", type(collate).__name__)
    return UserError(
        f"the collate function {name} draws random numbers, which would depend on this rank's part: draw them "
        "in the data set's __getitem__, which is seeded for each sample"
    )


def _random_state() -> tuple[Any, ...]:
    """The state of all three generators, in a form that can be compared."""
    _, keys, position, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), position, random.getstate()


def _differ(first: Any, second: Any) -> bool:
    """Whether two values are known to differ."""
    try:
        return fingerprint(first) != fingerprint(second)
    except UserError:
        return False
