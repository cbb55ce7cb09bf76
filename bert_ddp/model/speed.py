"""The one place that knows of bert_ddp/cpu, the room with code that only makes a CPU faster.

With that folder deleted everything runs as well, and the results agree up to rounding. On a GPU it is never used.
"""

import importlib
import importlib.util
from typing import Any

import torch


def tune(net: torch.nn.Module, device: torch.device) -> None:
    """Let `net` compute faster on a CPU where bert_ddp/cpu is there; otherwise nothing changes.

    `net` is a model of transformers and is changed in place. Its weights and its config stay as they are. Call this
    after the weights are loaded.
    """
    if tuning := for_cpu("tuning", device):
        tuning.tune(net)


def for_cpu(module: str, device: torch.device) -> Any:
    """The module bert_ddp.cpu.`module`, or None where `device` is no CPU or the folder bert_ddp/cpu is not there."""
    found = importlib.util.find_spec("bert_ddp.cpu")
    if device.type != "cpu" or found is None or found.origin is None:  # no origin: a folder without __init__.py
        return None
    return importlib.import_module(f"bert_ddp.cpu.{module}")
