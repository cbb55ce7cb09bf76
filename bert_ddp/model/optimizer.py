"""AdamW's parameter groups and the learning rate of BERT's recipe."""

from collections.abc import Callable

import torch


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices alone: biases and the scales of LayerNorm, all vectors, go without."""
    named = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in named if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in named if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up_then_decay(warm_up_steps: int, total_steps: int, power: float = 1.0) -> Callable[[int], float]:
    """The factor of the peak learning rate at a step: linearly up from 0 over the warm-up, then down to 0, linearly
    or as another power of the way that is left."""

    def factor(step: int) -> float:
        if step < warm_up_steps:
            return step / max(1, warm_up_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warm_up_steps)) ** power

    return factor
