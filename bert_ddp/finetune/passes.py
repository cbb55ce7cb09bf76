"""How a rank's part of a step is cut into forward passes.

On any device the passes are padded batches (rows.py). bert_ddp/cpu, if present, has a faster way for tagging on a CPU.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from bert_ddp.finetune.rows import Batch, Part, Rows
from bert_ddp.model import speed
from common.uneven.options.token_balance import PASS_TOKENS

PACKING = speed.load("packing")

Cut = Callable[[Part, int | None], Iterator[tuple[Batch, bool]]]  # a part and the most rows in a pass


def choose_passes(net: PreTrainedModel, rows: Rows, device: torch.device, compiled: bool) -> Cut:
    """A function that cuts a part into batches of at most so many rows, with `is_last`.

    Where rows can be packed without padding, `net` is changed to take packed rows too.
    """
    if PACKING and device.type == "cpu" and rows.per_token and not compiled:
        return PACKING.choose_packed_passes(net)
    return lambda part, micro_batch: part.passes(micro_batch, PASS_TOKENS[device.type])
