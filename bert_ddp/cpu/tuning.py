"""What model/speed.py calls: the replacements that make a BERT of `transformers` faster on a CPU."""

from transformers import PreTrainedModel

from bert_ddp.cpu.dropout import replace_dropout, use_own_attention
from bert_ddp.cpu.linear import replace_linear


def tune(net: PreTrainedModel, same_sizes: bool) -> None:
    """Replace dropout and attention in place, and linear layers too where all batches have the same size: oneDNN
    prepares itself for each size, which takes as long as it saves where sizes change."""
    replace_dropout(net)
    use_own_attention(net)
    if same_sizes:
        replace_linear(net)
