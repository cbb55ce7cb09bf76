"""What model/speed.py calls: every replacement that lets a BERT of `transformers` compute faster on a CPU."""

from transformers import PreTrainedModel

from bert_ddp.cpu.dropout import replace_dropout, use_own_attention
from bert_ddp.cpu.linear import replace_linear


def tune(net: PreTrainedModel) -> None:
    """Replace dropout, linear layers and attention of `net` in place."""
    replace_dropout(net)
    replace_linear(net)
    use_own_attention(net)
