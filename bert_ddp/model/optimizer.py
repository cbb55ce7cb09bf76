"""AdamW's parameter groups and the learning rate, as BERT is trained."""

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.launch import cli


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups with weight decay for matrices only, not for vectors: biases and the scales of LayerNorm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up_then_decay(optimizer: Optimizer, warm_up: int | float, total_steps: int, power: float = 1.0) -> LambdaLR:
    """Scale the learning rate at each step by a factor that rises linearly from 0 to 1 over the warm-up, and then falls
    to 0 as (steps left / steps after the warm-up) to the power `power`; 1 is linear. `warm_up` is a number of steps, or
    as a float, a part of all.
    """
    warm_up_steps = cli.steps_of(warm_up, total_steps)

    def factor(step: int) -> float:
        if step < warm_up_steps:
            return step / max(1, warm_up_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warm_up_steps)) ** power

    return LambdaLR(optimizer, factor)
