"""Rows of different lengths one after the other, without padding, through a model of transformers.

Nearly all of a BERT works on each token by itself, so T tokens of many rows may stand in one row of T. Only attention
must know the rows: there the tokens of rows of like length are put side by side, padded, and taken apart again. What
is padded is a small part of the work, and a global batch needs one pass: on a CPU each further pass costs as much as
a hundred tokens, most of it for the gradient of the embeddings, which is as large as the vocabulary.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from bert_ddp.dropout import attention
from bert_ddp.token_batches import cut_passes

GROUP_TOKENS = 24  # what one more group costs, in padded tokens


@dataclass(frozen=True)
class Group:
    """Rows of like length for attention: G rows, the longest of S tokens."""

    places: torch.Tensor  # (G * S,) where each token stands among the T; padding points to any
    mask: torch.Tensor | None  # (G, 1, 1, S) True for a token; None where nothing is padded
    tokens: torch.Tensor | None  # (tokens of the group,) their places among the G * S; None where nothing is padded
    rows: int


@dataclass(frozen=True)
class Packing:
    """Where the rows of T tokens begin and end, as attention needs it."""

    groups: list[Group]

    @staticmethod
    def of(lengths: np.ndarray) -> "Packing":
        """Of rows of falling lengths."""
        starts, groups = np.concatenate([[0], np.cumsum(lengths)]), []
        for begin, end in pairwise(cut_passes(lengths, None, GROUP_TOKENS)):
            columns = np.arange(lengths[begin])
            mask = columns < lengths[begin:end, None]  # (G, S)
            places = np.where(mask, starts[begin:end, None] + columns, starts[begin])
            padded = not mask.all()
            groups.append(
                Group(
                    torch.from_numpy(places.ravel()),
                    torch.from_numpy(mask[:, None, None, :]) if padded else None,
                    torch.from_numpy(np.flatnonzero(mask)) if padded else None,
                    end - begin,
                )
            )
        return Packing(groups)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, probability: float) -> torch.Tensor:
        """Attention within each row. Arguments (1, heads, T, D), with dropout; returns (1, T, heads, D)."""
        heads = query.shape[1]
        flat = [states.transpose(1, 2).flatten(2)[0] for states in (query, key, value)]  # (T, heads * D)
        found = []
        for group in self.groups:
            apart = (  # (G, heads, S, D)
                states.index_select(0, group.places).view(group.rows, -1, heads, query.shape[3]).transpose(1, 2)
                for states in flat
            )
            context = attention(*apart, group.mask, probability).transpose(1, 2).flatten(2).flatten(0, 1)  # (G * S, H)
            found.append(context if group.tokens is None else context.index_select(0, group.tokens))
        return torch.cat(found).unflatten(1, (heads, -1))[None]
