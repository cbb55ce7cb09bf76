"""AdamW's parameter groups and the learning rate, as BERT is trained."""

from collections.abc import Callable

import torch


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups with weight decay for matrices only, not for vectors: biases and the scales of LayerNorm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up_then_decay(warm_up_steps: int, total_steps: int, power: float = 1.0) -> Callable[[int], float]:
    """The learning rate at a step as a factor of its peak, for torch's LambdaLR.

    It rises linearly from 0 to 1 over the warm-up and then falls to 0 as (steps left / steps after the warm-up) to the
    power `power`; 1 is linear.
    """

    def factor(step: int) -> float:
        if step < warm_up_steps:
            return step / max(1, warm_up_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warm_up_steps)) ** power

    return factor
