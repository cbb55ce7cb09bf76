"""Dropout that is faster on a CPU. On GPUs and in compiled models it is torch's own.

On a CPU torch draws one number for each element, which takes a tenth of a training step of a small BERT. Here one draw
of 64 bits decides on four elements, so a probability is rounded to a multiple of 1 / 65,536: 0.1 means 0.10001.
Attention with dropout is the formula that torch uses on a CPU too.
"""

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

NAME = "sdpa_with_cheap_dropout"  # under which transformers knows `attention` below
LEVELS = 2**16  # of the 16 bits that decide on one element


def drop(states: torch.Tensor, probability: float) -> torch.Tensor:
    """`states` of any shape, each element zeroed with this probability or scaled so that the mean stays the same."""
    zeroed = round(probability * LEVELS)  # levels that zero an element
    if states.device.type != "cpu" or zeroed in (0, LEVELS) or torch.compiler.is_compiling():
        return dropout(states, probability)
    draws = torch.empty(-(-states.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: states.numel()].view(states.shape)  # -32,768 to 32,767, each as likely
    kept = levels >= zeroed - LEVELS // 2
    return states * kept.to(states.dtype).mul_(LEVELS / (LEVELS - zeroed))


class Dropout(nn.Dropout):
    """torch.nn.Dropout that uses `drop`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return drop(states, self.p) if self.training else states


def replace_dropout(net: nn.Module) -> None:
    """Replace every torch.nn.Dropout of a model by `Dropout`."""
    for module in net.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))


def use_own_attention(net: PreTrainedModel) -> None:
    """Make a model of transformers use `attention` below. Its saved config does not change."""
    AttentionInterface.register(NAME, _as_transformers_calls_it)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    net.set_attn_implementation(NAME)


def _as_transformers_calls_it(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[torch.Tensor, None]:
    return attention(query, key, value, attention_mask, dropout).transpose(1, 2), None  # (B, P, heads, D)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, probability: float
) -> torch.Tensor:
    """softmax(query key^T / sqrt(D)) value, with dropout on the softmax; (B, heads, P, D).

    query (B, heads, P, D); key and value (B, heads, L, D); mask (B, 1, 1 or P, L), False for a key to leave out.
    """
    if not probability or query.device.type != "cpu" or torch.compiler.is_compiling():
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=probability)
    scores = query @ (key * key.shape[-1] ** -0.5).transpose(-1, -2)  # (B, heads, P, L)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return drop(softmax(scores, dim=-1), probability) @ value
