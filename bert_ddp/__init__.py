"""The BERT programs, and the commands that an installation makes of them.

The name of a program has a dash, so no import statement can name its file.
"""

from importlib import import_module


def bert_distributed() -> None:
    """The command bert-distributed.py."""
    import_module("bert_ddp.bert-distributed").main()


def bert_finetune() -> None:
    """The command bert-finetune.py."""
    import_module("bert_ddp.bert-finetune").main()


def bert_predict() -> None:
    """The command bert-predict.py."""
    import_module("bert_ddp.bert-predict").main()


def prepare_corpus() -> None:
    """The command prepare-corpus.py."""
    import_module("bert_ddp.prepare-corpus").main()
