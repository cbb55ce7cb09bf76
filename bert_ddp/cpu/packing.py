"""Tagging without padding on a CPU: many rows of different lengths, one after the other, in one forward pass.

Nearly all of a BERT works on each token by itself, so the tokens of many rows can stand in one row of T tokens. Only
attention must know the rows: there the tokens of rows of similar length are put side by side, padded, and put back.
Little of the work is padded then, and a global batch needs one pass. On a CPU each further pass costs as much as a
hundred tokens, most of it for the gradient of the embeddings, which is as large as the vocabulary.

Only the first piece of a word has a label. The last layer runs at these N tokens alone; all T are keys and values
there, so the numbers are the same as when everything is computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from transformers import BertForTokenClassification, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from bert_ddp.cpu.dropout import attention
from bert_ddp.finetune.rows import IGNORE, Batch, Part, Rows, int64_tensor
from common.uneven.options.token_balance import cut_passes

GROUP_TOKENS = 24  # what one more group costs, in padded tokens


@dataclass(frozen=True)
class Group:
    """Rows of similar length for attention: n tokens in G rows, S tokens in the longest."""

    rows: int
    size: int  # n
    places: torch.Tensor  # (G * S,) which of the n tokens stands there; any at padding
    tokens: torch.Tensor  # (n,) where each token stands among the G * S
    mask: torch.Tensor | None  # (G, 1, 1, S) True for a token; None where nothing is padded


@dataclass(frozen=True)
class Packing:
    """Which of T tokens belong to which row: for the embeddings, for attention, and for the labels."""

    positions: torch.Tensor  # (T,) of each token in its row
    groups: list[Group]  # one after the other
    labelled: torch.Tensor  # (N,) which of the T tokens have a label

    @staticmethod
    def of(lengths: np.ndarray, has_label: np.ndarray) -> "Packing":
        """The packing of rows of falling lengths (rows,); `has_label` (T,) is True for a token with a label."""
        groups = []
        for begin, end in pairwise(cut_passes(lengths, None, GROUP_TOKENS)):
            sizes = lengths[begin:end]
            columns = np.arange(sizes[0])
            mask = columns < sizes[:, None]  # (G, S)
            places = np.where(mask, (np.cumsum(sizes) - sizes)[:, None] + columns, 0)
            groups.append(
                Group(
                    rows=end - begin,
                    size=int(sizes.sum()),
                    places=torch.from_numpy(places.ravel()),
                    tokens=torch.from_numpy(np.flatnonzero(mask)),
                    mask=None if mask.all() else torch.from_numpy(mask[:, None, None, :]),
                )
            )
        positions = np.concatenate([np.arange(length) for length in lengths])
        return Packing(torch.from_numpy(positions), groups, torch.from_numpy(np.flatnonzero(has_label)))

    def attend(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """A layer's attention within each row; `hidden` and the result are (T, H)."""
        inner = layer.attention.self
        probability = inner.dropout.p if layer.training else 0.0
        sizes = [group.size for group in self.groups]
        projected = (projection(hidden).split(sizes) for projection in (inner.query, inner.key, inner.value))
        found = []
        for group, *flat in zip(self.groups, *projected, strict=True):
            query, key, value = (  # (G, heads, S, D)
                (states if group.mask is None else _Pad.apply(states, group.places, group.tokens))
                .view(group.rows, -1, inner.num_attention_heads, inner.attention_head_size)
                .transpose(1, 2)
                for states in flat
            )
            context = attention(query, key, value, group.mask, probability)  # (G, heads, S, D)
            context = context.transpose(1, 2).flatten(2).flatten(0, 1)  # (G * S, H)
            found.append(context if group.mask is None else context.index_select(0, group.tokens))
        return torch.cat(found)


class _Pad(torch.autograd.Function):
    """Puts tokens (n, H) where they stand in padded rows (G * S, H).

    Attention masks padding and its results there are left out, so no gradient comes from there. Each token's gradient
    comes from one place, and backward copies it; the backward of `index_select` would add up.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return states.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None


@dataclass(frozen=True)
class PackedBatch(Batch):
    """Rows one after the other: tokens and segments (1, T), labels (N,) of the labelled tokens, no mask."""

    packing: Packing

    def inputs(self) -> dict[str, Any]:
        return {**super().inputs(), "packing": self.packing}


def pack(rows: Rows, indices: np.ndarray) -> PackedBatch:
    """These rows, of falling lengths, as one packed batch."""
    where = np.concatenate([np.arange(*rows.starts[index : index + 2]) for index in indices])
    labels = rows.labels[where]
    return PackedBatch(
        tokens=int64_tensor(rows.tokens[where])[None],
        segments=None if rows.segments is None else int64_tensor(rows.segments[where])[None],
        mask=None,
        labels=int64_tensor(labels[labels != IGNORE]),
        rows=torch.from_numpy(indices),
        packing=Packing.of(rows.lengths[indices], labels != IGNORE),
    )


def packed_passes(part: Part, micro_batch: int | None) -> Iterator[tuple[Batch, bool]]:
    """As `Part.passes`, without padding: for rows with labels on their tokens."""
    if len(part.indices) == 0:
        yield from part.passes(micro_batch, 0)
        return
    by_length = part.by_length()
    most = micro_batch or len(by_length)
    for begin in range(0, len(by_length), most):
        yield pack(part.rows, by_length[begin : begin + most]), begin + most >= len(by_length)


def choose_packed_passes(net: PreTrainedModel) -> Callable[[Part, int | None], Iterator[tuple[Batch, bool]]]:
    """Make `net`, a tagger of transformers, take packed rows too. Returns the function that cuts a part into them.

    The weights stay where they are, and the model is saved and loaded as before.
    """
    assert isinstance(net, BertForTokenClassification), type(net)
    net.__class__ = Tagger
    return packed_passes


class Tagger(BertForTokenClassification):
    """transformers' tagger, which also takes packed rows and then gives logits for their labelled tokens."""

    def forward(
        self,
        input_ids: torch.Tensor,  # (B, S), or (1, T)
        token_type_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> TokenClassifierOutput:
        """Logits (B, S, labels), or (N, labels) with a `packing`."""
        if packing is None:
            return super().forward(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        hidden = self.bert.embeddings(input_ids, token_type_ids, packing.positions[None])[0]  # (T, H)
        *layers, last = self.bert.encoder.layer
        for layer in layers:
            hidden = _complete(layer, packing.attend(layer, hidden), hidden)
        attended, hidden = (
            states.index_select(0, packing.labelled) for states in (packing.attend(last, hidden), hidden)
        )
        return TokenClassifierOutput(logits=self.classifier(self.dropout(_complete(last, attended, hidden))))


def _complete(layer: Any, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What follows attention in a layer, token by token (T, H): the residual connections and the feed-forward part."""
    return layer.feed_forward_chunk(layer.attention.output(attended, hidden))
