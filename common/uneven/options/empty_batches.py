"""Models that cannot take an empty batch themselves: compiled ones, and those that fail on one."""

from functools import partial
from typing import Any

import torch

from common.uneven.batches import change


class EmptyPartsApart(torch.nn.Module):
    """A model, or torch.compile's version of it, and another way for an empty batch.

    Compiled code is specialised on sizes, and for a size of 0 some of it is wrong (convolutions in torch 2.15): such a
    batch goes through the model itself. With `pad_empty_batch`, one row of zeros goes through it and none comes out, so
    that all gradients are exactly zero.
    """

    def __init__(self, model: torch.nn.Module, compiled: bool | str, pad_empty_batch: bool):
        super().__init__()
        self.model, self.pad_empty_batch = model, pad_empty_batch
        dynamic = True if compiled == "dynamic" else None
        self.compiled = torch.compile(model.forward, dynamic=dynamic) if compiled else None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not _has_no_rows(inputs, named):
            return (self.compiled or self.model)(*inputs, **named)
        if not self.pad_empty_batch:
            return self.model(*inputs, **named)
        try:
            row = change((inputs, named), partial(_one_row, length=0), unknown=_as_it_is)
            return _without_rows(self.model(*row[0], **row[1]))
        except (RuntimeError, ValueError, IndexError):  # packed sequences have no length of 0
            row = change((inputs, named), partial(_one_row, length=1), unknown=_as_it_is)
            return _without_rows(self.model(*row[0], **row[1]))


def _as_it_is(value: Any) -> Any:
    return value


def _without_rows(output: Any) -> Any:
    """What a model has returned for one row, as if for none: a tensor without rows, 0 for a number, which must be a sum
    over the rows, and None for what has no rows that are known, such as the cache of a language model."""

    def cut(leaf: Any) -> Any:
        return leaf * 0 if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf[:0]

    return change(output, cut, unknown=lambda _: None)


def _has_no_rows(inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
    sizes: list[int] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            sizes.append(len(leaf))
        return leaf

    change((inputs, named), note, unknown=_as_it_is)
    return bool(sizes) and not any(sizes)


def _one_row(leaf: Any, length: int) -> Any:
    """Zeros; `length` for what is one whole number a row; True for masks: attention over nothing is not a number."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    if leaf.dim() == 1 and leaf.dtype in (torch.int64, torch.int32):
        return leaf.new_full((1,), length)
    return leaf.new_full((1, *(max(1, size) for size in leaf.shape[1:])), leaf.dtype == torch.bool)
