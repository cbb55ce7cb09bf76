"""How a rank's part of a step is cut into forward passes.

On any device the passes are padded batches (rows.py). The folder bert_ddp/cpu, where it is there, has a faster way for
tagging on a CPU.
"""

from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from bert_ddp.finetune.rows import Batch, Part, Rows
from bert_ddp.finetune.token_batches import PASS_TOKENS
from bert_ddp.model import speed

PACKING = speed.cpu_module("packing")

Cut = Callable[[Part], Iterator[tuple[Batch, bool]]]


def choose_passes(net: PreTrainedModel, rows: Rows, device_type: str, micro_batch: int | None, compiled: bool) -> Cut:
    """A function that cuts a part into batches of at most `micro_batch` rows, with `is_last`.

    Where rows can be packed without padding, `net` learns to take packed rows too.
    """
    if PACKING and device_type == "cpu" and rows.per_token and not compiled:
        return PACKING.choose_packed_passes(net, micro_batch)
    return lambda part: part.passes(micro_batch, PASS_TOKENS[device_type])
