"""`--precision`: in which numbers the model computes, and the loss scaling that fp16 needs."""

from contextlib import AbstractContextManager

import torch
from torch.nn.utils import clip_grad_norm_

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp32; bf16 and fp16 as autocast over fp32 weights; fp64 for proofs.

    `dtype` is that of weights, gradients and inputs.
    """

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        # gradients below 6e-8 vanish in fp16: scale the loss up for backward, and the gradients down before a step
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager:
        """For the forward pass alone; backward runs in the types that forward chose."""
        return torch.autocast(self.device.type, AUTOCAST.get(self.name), enabled=self.name in AUTOCAST)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float) -> torch.Tensor:
        """Clip the gradients to a norm of `clip_norm` (infinity: not at all) and take one optimizer step.

        Returns the norm before clipping, a scalar on the device. Gradients are the same on every rank by now, so
        every rank clips alike and, under fp16, skips the same steps.
        """
        self.scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm
