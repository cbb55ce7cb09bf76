"""Layers whose result depends on a rank's own samples, and evaluations in training mode."""

import random
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.errors import GuardWarning, UserError
from common.uneven.guards.words import is_named, shown
from common.uneven.options.global_batch import GlobalBatchNorm

GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def refuse_strangers(net: torch.nn.Module, layout_dependent: Collection[str] = ()) -> None:
    """Raise UserError for a model that torch has wrapped already, and for generators of its own, except those named."""
    for name, layer in net.named_modules():
        if isinstance(layer, DataParallel | DistributedDataParallel):
            raise UserError(
                f"wrap() got a model in which {name or 'the outermost module'} is a {type(layer).__name__}, which "
                "divides or averages in its own way: give wrap() the module inside, and leave that out",
                same_on_every_rank=True,
            )
        own = [f"{name}.{one}".lstrip(".") for one, value in vars(layer).items() if isinstance(value, GENERATORS)]
        if found := [one for one in own if not is_named(one, layout_dependent)]:
            raise UserError(
                f"the model keeps a generator, {shown(found)}: no checkpoint has its state, and with the same seed on "
                "each rank all draw the same: draw from torch's default generator, which is seeded for each step and "
                "rank, or name it in wrap(..., layout_dependent=[...]) if that does not matter",
                same_on_every_rank=True,
            )


def refuse_batch_norm(net: torch.nn.Module, layout_dependent: Collection[str] = ()) -> None:
    """Raise UserError for layers whose statistics would be those of one rank's samples, except those named."""
    found = [
        f"{name} ({type(layer).__name__})"
        for name, layer in net.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, GlobalBatchNorm)
        if (layer.training or not layer.track_running_stats) and not is_named(name, layout_dependent)
    ]
    if found:
        raise UserError(
            f"{shown(found)} would compute statistics of this rank's samples, or with SyncBatchNorm of those of one "
            "micro-batch, so the result would depend on the layout: use GroupNorm, or global_batch_norm(model) of "
            "common.uneven.options.global_batch before the optimizer is made; or freeze the layers with .eval(), or "
            "name them in wrap(..., layout_dependent=[...])",
            same_on_every_rank=True,
        )


def _drops(layer: torch.nn.Module) -> bool:
    """Dropout as a layer of its own, or within one, such as an LSTM or an attention."""
    part = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
    return isinstance(part, float) and part > 0


def say_noise(net: torch.nn.Module, *_: Any) -> None:
    """A hook before forward: says if an evaluation runs in training mode, with dropout or BatchNorm."""
    if torch.is_grad_enabled() or not net.training:
        return
    for name, layer in net.named_modules():
        if layer.training and (isinstance(layer, _BatchNorm) or _drops(layer)):
            warnings.warn(
                f"a forward without gradients while {name} ({type(layer).__name__}) is in training mode: if this is an "
                "evaluation, call net.eval() before it and net.train() after it",
                GuardWarning,
                stacklevel=2,
            )
            return
