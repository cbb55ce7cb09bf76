"""The one place that knows of bert_ddp/cpu, the code that only makes a CPU faster.

With that folder deleted everything runs as well, and results agree up to rounding. On a GPU it is never used.
"""

import importlib
import importlib.util
from typing import Any

import torch


def load(module: str) -> Any:
    """bert_ddp.cpu.MODULE, or None where that folder is not there. Load it when your own module is imported, so that
    the join compares its code between the nodes."""
    found = importlib.util.find_spec("bert_ddp.cpu")
    is_there = found is not None and found.origin is not None  # no origin: a folder without __init__.py
    return importlib.import_module(f"bert_ddp.cpu.{module}") if is_there else None


TUNING = load("tuning")


def tune(net: torch.nn.Module, device: torch.device, same_sizes: bool) -> None:
    """Let `net`, a BERT of transformers with its weights loaded, compute faster on a CPU. On a GPU nothing changes.

    Changes it in place; its weights and config stay as they are. `same_sizes`: all batches have the same size.
    """
    if TUNING and device.type == "cpu":
        TUNING.tune(net, same_sizes)
