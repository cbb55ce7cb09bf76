"""Token rows in memory, and batches of them that are padded only to their longest row.

A *row* is what goes through the model at once: `[CLS] pieces [SEP]`. The first piece of a word has its entity label,
and all other pieces have IGNORE.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from common.uneven.guards.fingerprint import fingerprint
from common.uneven.loading import BatchedDataset
from common.uneven.options.token_balance import cut_passes

IGNORE = -100  # the label of a position that does not count; cross_entropy's own default

Numbers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model at once, padded to the longest of them. B = rows, S = tokens of the longest."""

    tokens: torch.Tensor  # (B, S)
    segments: torch.Tensor | None  # (B, S): 0 for the first text, 1 for the second; None where there is one text
    mask: torch.Tensor | None  # (B, S): 1 for a token, 0 for padding; None where nothing is padded
    labels: torch.Tensor  # ner: (B, S), IGNORE where there is none; classify: (B,)
    rows: torch.Tensor  # (B,): which rows of the data set these are; -1 for the stand-in of an empty part

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's forward, by the names that `transformers` gives them."""
        return {"input_ids": self.tokens, "attention_mask": self.mask, "token_type_ids": self.segments}


class Rows(BatchedDataset):
    """A data set's token rows, one after the other in flat arrays."""

    def __init__(
        self,
        rows: Sequence[Numbers],
        labels: Sequence[Numbers] | Sequence[int],  # one for each token (ner), or one for each row (classify)
        segments: Sequence[Numbers] | None,
        pad: int,  # the token that fills a batch
        empty: list[int],  # the tokens of a row without a word
    ):
        self.lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.tokens = _flat(rows)
        self.segments = None if segments is None else _flat(segments)
        self.per_token = len(labels) > 0 and isinstance(labels[0], list | np.ndarray)
        self.labels = _flat(labels) if self.per_token else np.asarray(labels, dtype=np.int32)
        # what each row adds to the denominator of the loss: its labelled tokens, or 1 for itself
        marked = np.add.reduceat(self.labels != IGNORE, self.starts[:-1]) if self.per_token else np.ones(len(rows))
        self.counts = torch.from_numpy(marked.astype(np.int64))  # (rows,)
        self.pad, self.empty = pad, empty

    def __len__(self) -> int:
        return len(self.lengths)

    def get_batch(self, indices: Sequence[int]) -> "Part":
        """These rows, not yet padded; none at all for an empty part."""
        return Part(self, np.asarray(indices, dtype=np.int64))

    def batch(self, indices: np.ndarray) -> Batch:
        """These rows as tensors, padded to their longest. No rows give a stand-in row whose label does not count."""
        if len(indices) == 0:  # transformers' attention cannot reshape an empty batch
            shape = (1, len(self.empty)) if self.per_token else (1,)
            tokens, ignored = torch.tensor([self.empty]), torch.full(shape, IGNORE)
            return Batch(tokens, None, None, ignored, torch.tensor([-1]))
        lengths = self.lengths[indices]
        mask = np.arange(lengths.max()) < lengths[:, None]  # (B, S)
        where = (self.starts[indices][:, None] + np.arange(lengths.max()))[mask]
        labels = _padded(self.labels, where, mask, IGNORE) if self.per_token else int64_tensor(self.labels[indices])
        return Batch(
            tokens=_padded(self.tokens, where, mask, self.pad),
            segments=None if self.segments is None else _padded(self.segments, where, mask, 0),
            mask=None if mask.all() else int64_tensor(mask),
            labels=labels,
            rows=torch.from_numpy(indices),
        )

    def fingerprint(self) -> str:
        """Sixteen hex digits of all tokens and labels."""
        return fingerprint(self.lengths, self.tokens, self.labels)


@dataclass(frozen=True)
class Part:
    """Some rows of a data set: one rank's part of one global batch, or of an evaluation."""

    rows: Rows
    indices: np.ndarray

    @property
    def tokens(self) -> int:
        """How many tokens these rows have, without padding."""
        return int(self.rows.lengths[self.indices].sum())

    def by_length(self) -> np.ndarray:
        """The indices, longest row first."""
        return self.indices[np.argsort(-self.rows.lengths[self.indices], kind="stable")]

    def passes(self, micro_batch: int | None, pass_tokens: int) -> Iterator[tuple[Batch, bool]]:
        """Batches of at most `micro_batch` rows, with `is_last`, cut where that saves more than `pass_tokens` of
        padding. An empty part gives one stand-in."""
        by_length = self.by_length()
        cuts = cut_passes(self.rows.lengths[by_length], micro_batch, pass_tokens)
        for begin, end in pairwise(cuts):
            yield self.rows.batch(by_length[begin:end]), end == cuts[-1]


def of_labelled(values: list[int] | int, labels: list[int] | int) -> list[int]:
    """The values of a row's labelled tokens; a row that has one label itself has one value."""
    if isinstance(values, int):
        return [values]
    assert isinstance(labels, list)
    return [value for value, label in zip(values, labels, strict=True) if label != IGNORE]


def int64_tensor(values: np.ndarray) -> torch.Tensor:
    """As int64, which torch takes as token ids, labels and masks."""
    return torch.from_numpy(values.astype(np.int64))


def _padded(flat: np.ndarray, where: np.ndarray, mask: np.ndarray, value: int) -> torch.Tensor:
    result = np.full(mask.shape, value, dtype=np.int64)
    result[mask] = flat[where]
    return torch.from_numpy(result)


def _flat(lists: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(one, dtype=np.int32) for one in lists]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
