"""The only place that refers to bert_ddp/cpu, the code that only makes a CPU faster.

Without that folder everything still runs, and results agree up to rounding. On a GPU it is never used.
"""

import importlib
import importlib.util
from typing import Any

import torch


def load(module: str) -> Any:
    """bert_ddp.cpu.MODULE, or None without that folder. Call this when your own module is imported, so that the join
    compares the code of MODULE between the nodes."""
    found = importlib.util.find_spec("bert_ddp.cpu")
    is_there = found is not None and found.origin is not None  # no origin: a folder without __init__.py
    return importlib.import_module(f"bert_ddp.cpu.{module}") if is_there else None


TUNING = load("tuning")


def tune(net: torch.nn.Module, device: torch.device, same_sizes: bool) -> None:
    """Make `net`, a BERT of transformers with its weights loaded, faster on a CPU. On a GPU nothing changes.

    Changes it in place, but not its weights and config. `same_sizes`: all batches have the same size.
    """
    if TUNING and device.type == "cpu":
        TUNING.tune(net, same_sizes)
