"""Linear layers that are faster on a CPU. On GPUs, in compiled models and in other precisions they are torch's own.

In fp32 torch multiplies matrices with MKL. oneDNN, which torch also contains and uses for bfloat16, is faster for two
of a layer's three products, most of all for the projection to a vocabulary (docs/benchmarks.md), and adds the bias in
the same pass. It is as exact: fp32 products, summed in another order. There are no second derivatives.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# torch has this operator for its own compiler; where it has another name, MKL computes
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def replace_linear(net: nn.Module) -> None:
    """Make every torch.nn.Linear of a model a `Linear`. The weights stay the same objects, tied ones too."""
    for module in net.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class Linear(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not _onednn_takes(states, self.weight):
            return linear(states, self.weight, self.bias)
        return _Linear.apply(states.flatten(0, -2), self.weight, self.bias).unflatten(0, states.shape[:-1])


def _onednn_takes(states: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        ONEDNN
        and not torch.compiler.is_compiling()
        and states.device.type == "cpu"
        and states.dtype == weight.dtype == torch.float32
        and states.ndim > 1
        and states.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """states (T, I), weight (O, I), bias (O,) or None; returns (T, O)."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return _product(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if wants_states else None,
            grad.t() @ states if wants_weight else None,  # here MKL is faster
            grad.sum(dim=0) if wants_bias else None,
        )


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows (T, K) times the transpose of matrix (N, K), plus bias: (T, N), by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
