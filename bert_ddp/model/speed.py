"""The one place that knows of bert_ddp/cpu, the room with code that only makes a CPU faster.

With that folder deleted everything runs as well, and the results agree up to rounding. A GPU does not use it.
"""

import importlib
import importlib.util
from typing import Any

import torch


def cpu_module(name: str) -> Any:
    """The module bert_ddp.cpu.`name`, or None where the folder bert_ddp/cpu is not there.

    Call this when a module is imported and not later: the join compares all code that is loaded by then.
    """
    room = importlib.util.find_spec("bert_ddp.cpu")
    if room is None or room.origin is None:  # no origin: a folder without __init__.py
        return None
    return importlib.import_module(f"bert_ddp.cpu.{name}")


TUNING = cpu_module("tuning")


def tune(net: torch.nn.Module, device: torch.device) -> None:
    """Let `net` compute faster on a CPU where bert_ddp/cpu is there; otherwise nothing changes.

    `net` is a model of transformers and is changed in place. Its weights and its config stay as they are. Call this
    after the weights are loaded.
    """
    if TUNING and device.type == "cpu":
        TUNING.tune(net)
