"""What model/speed.py calls: every replacement that lets a BERT of `transformers` compute faster on a CPU."""

from transformers import BertForTokenClassification, PreTrainedModel

from bert_ddp.cpu.dropout import replace_dropout, use_own_attention
from bert_ddp.cpu.linear import replace_linear
from bert_ddp.cpu.packing import Tagger


def tune(net: PreTrainedModel) -> None:
    """Replace dropout, attention and linear layers in place; a tagger also learns to take packed rows."""
    replace_dropout(net)
    replace_linear(net)
    use_own_attention(net)
    if type(net) is BertForTokenClassification:
        net.__class__ = Tagger
