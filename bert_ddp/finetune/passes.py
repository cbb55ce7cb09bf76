"""How a rank's part of a step is cut into forward passes.

On any device the passes are padded batches (rows.py). The folder bert_ddp/cpu, which only makes CPUs faster, knows a
quicker way for tagging on a CPU. Nothing else needs that folder, and without it everything runs.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from bert_ddp.finetune.rows import Batch, Part, Rows
from bert_ddp.finetune.token_batches import PASS_TOKENS

HAS_CPU_ROOM = importlib.util.find_spec("bert_ddp.cpu") is not None
# Loaded with this module, so that the join compares them between the nodes as it does all code.
PACKING = importlib.import_module("bert_ddp.cpu.packing") if HAS_CPU_ROOM else None
DROPOUT = importlib.import_module("bert_ddp.cpu.dropout") if HAS_CPU_ROOM else None

Cut = Callable[[Part], Iterator[tuple[Batch, bool]]]


def choose_passes(net: PreTrainedModel, rows: Rows, device_type: str, micro_batch: int | None, compiled: bool) -> Cut:
    """A function that cuts a part into batches of at most `micro_batch` rows, with `is_last`.

    Where rows can be packed without padding, `net` learns to take packed rows too.
    """
    if DROPOUT and device_type == "cpu":
        DROPOUT.replace_dropout(net)
        DROPOUT.use_own_attention(net)
    if PACKING and device_type == "cpu" and rows.per_token and not compiled:
        return PACKING.choose_packed_passes(net, micro_batch)
    return lambda part: part.passes(micro_batch, PASS_TOKENS[device_type])
