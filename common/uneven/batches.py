"""Batches of any structure, cut along their rows: tensors, and tuples, dicts or dataclasses of tensors.

Dimension 0 of every tensor has one row for each sample. A list of texts has one text for each sample. This is what
`default_collate` makes, and what most collate functions make. None stands for a part that a batch does not have.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch

from common.errors import UserError

PARTS = (torch.Tensor, list, tuple, Mapping)  # of a batch, that have rows


def micro_batches(part: Any, expected: Sized, micro_batch: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield pieces of at most `micro_batch` rows of a rank's part of one optimizer step, each with `is_last`.

    `expected` is the rank's part by the plan, `plan.part(step, rank)`. A batch with another number of rows would give
    a wrong loss in silence, so it raises UserError.

    An empty part gives one empty micro-batch. Its forward, backward and all-reduce run as always and add exactly
    zero, so that every rank enters each collective once.
    """
    rows = rows_in(part)
    if rows != len(expected):
        raise UserError(
            f"the loader gave {rows} rows, but this rank's part of the global batch has {len(expected)}: the collate "
            "function must make a row for each sample that it is given"
        )
    size = micro_batch or max(1, rows)
    if rows <= size:
        yield part, True
        return
    starts = range(0, rows, size)
    for start in starts:
        yield take_rows(part, slice(start, start + size)), start == starts[-1]


def rows_in(batch: Any) -> int:
    """The number of rows of a batch. Raises UserError where its tensors do not have the same number."""
    leaves: dict[int, Any] = {}  # by their number of rows

    def count(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
            raise UserError("a tensor of the batch has no rows: collate a number for each sample, not one for all")
        leaves.setdefault(len(leaf), leaf)
        return leaf

    change(batch, count)
    if len(leaves) != 1:
        found = " and ".join(f"{rows} ({_described(leaf)})" for rows, leaf in leaves.items()) or "none"
        raise UserError(f"the tensors of a batch must have the same number of rows, one for each sample, not {found}")
    return next(iter(leaves))


def take_rows(batch: Any, rows: slice) -> Any:
    """These rows of a batch, as a batch of the same structure. Tensors are views."""
    return change(batch, lambda leaf: leaf[rows])


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on `device`. Floating-point tensors get the type `dtype`, if given, and other tensors keep theirs."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wanted = dtype if leaf.is_floating_point() else None
        if leaf.device == device and wanted in (None, leaf.dtype):
            return leaf  # `to` would take longer to find that out
        return leaf.to(device, wanted, non_blocking=True)

    return change(batch, to)


def change(batch: Any, function: Callable[[Any], Any], unknown: Callable[[Any], Any] | None = None) -> Any:
    """The same structure with `function(leaf)` for each tensor and each list of texts or numbers. None stays None.

    What is of another kind becomes `unknown(value)`, or raises UserError.
    """
    if batch is None:
        return None
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if not any(value is None or isinstance(value, PARTS) for value in batch):
            return function(batch)  # one text or number for each sample
        return type(batch)([change(value, function, unknown) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):  # also one that is a mapping (ModelOutput)
        names = [field.name for field in dataclasses.fields(batch)]
        return dataclasses.replace(batch, **{name: change(getattr(batch, name), function, unknown) for name in names})
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)  # of the same type, such as the BatchEncoding of transformers
        changed.update({name: change(value, function, unknown) for name, value in batch.items()})
        return changed
    if isinstance(batch, tuple):  # with names
        return type(batch)(*(change(value, function, unknown) for value in batch))
    if isinstance(batch, bool | int | float | str):  # a setting that is the same for all rows
        return batch
    if unknown:
        return unknown(batch)
    raise UserError(
        f"a batch holds a {type(batch).__name__}, whose rows are unknown: make it of tensors, in tuples, dicts or "
        "dataclasses"
    )


def _described(leaf: Any) -> str:
    return f"a tensor of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a list of {len(leaf)}"
