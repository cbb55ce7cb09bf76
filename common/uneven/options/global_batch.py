"""What needs the whole global batch: BatchNorm's statistics, and losses that compare samples with one another.

Both come down to one operation, a sum over the ranks that gradients flow through. The forward of every rank must then
be on its whole part of the global batch: with micro-batches these are refused, because a part of the global batch has
other statistics and other negatives.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import UserError
from common.uneven.plan import BatchPlan


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks. Each rank's loss depends on it, so its gradient is summed over them too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, the same on each, with gradients. Every rank must call this, in forward and backward."""
    return _SumOverRanks.apply(tensor)


def gather_rows(rows: torch.Tensor, plan: BatchPlan, step: int) -> torch.Tensor:
    """The rows of all ranks in the order of the global batch, with gradients: (own rows, ...) -> (global count, ...).

    For a loss over the whole global batch: contrast own rows, which begin at `plan.part(step, rank).start -
    plan.begin(step)`, with all rows, and sum over the own ones. Every rank must call this. Raises UserError where
    `rows` is not the whole part of this rank.
    """
    mine = plan.part(step, dist.get_rank())
    if len(rows) != len(mine):
        fix = (
            "gather each view of the samples by itself, and pass this step's number"
            if len(rows) > len(mine)
            else "leave out --micro-batch"
        )
        raise UserError(
            f"a loss over the whole global batch needs all {len(mine)} rows of this rank in one forward, and got "
            f"{len(rows)}: {fix}"
        )
    begin = mine.start - plan.begin(step)
    after = plan.global_count(step) - begin - len(mine)
    padded = torch.cat([rows.new_zeros(begin, *rows.shape[1:]), rows, rows.new_zeros(after, *rows.shape[1:])])
    return sum_over_ranks(padded)


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d with the statistics of the global batch, so that every layout computes the same.

    On one process it computes what torch's BatchNorm does. Running statistics are the same on every rank, and
    evaluation uses them without any exchange. Input (samples, channels, ...); a rank may have no samples.
    Source: Ioffe and Szegedy 2015, algorithm 1.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (samples, channels, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        exact = input.double() if input.dtype == torch.float64 else input.float()  # also under autocast
        own = exact.new_full((1,), input.numel() // input.shape[1])
        first = sum_over_ranks(torch.cat([exact.sum(others), own]))
        count = first[-1].detach().clamp(min=1)
        mean = first[:-1] / count
        centred = exact - mean.view(shape)
        variance = sum_over_ranks(centred.square().sum(others)) / count
        self._track(mean.detach(), variance.detach(), first[-1].detach())
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics; not by a batch of no samples, or with one that is not finite."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        is_batch = ((count > 0) & (mean + variance).isfinite().all()).to(mean.dtype)  # a step may be skipped
        mean, variance = mean.nan_to_num(0.0, 0.0, 0.0), variance.nan_to_num(0.0, 0.0, 0.0)
        self.num_batches_tracked += is_batch.to(self.num_batches_tracked.dtype)
        batches = self.num_batches_tracked.to(mean.dtype).clamp(min=1)
        factor = is_batch * (1 / batches if self.momentum is None else self.momentum)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean += factor * (mean - self.running_mean)
        self.running_var += factor * (unbiased - self.running_var)


def global_batch_norm(net: torch.nn.Module) -> torch.nn.Module:
    """`net` with a GlobalBatchNorm in place of each BatchNorm and SyncBatchNorm, which keeps weights and statistics.

    Call it before the optimizer is made. Raises UserError for a layer without running statistics: its evaluation
    would depend on the batch.
    """
    if isinstance(net, _BatchNorm) and not isinstance(net, GlobalBatchNorm):
        if not net.track_running_stats:
            raise UserError(
                "a BatchNorm with track_running_stats=False evaluates by the statistics of each batch, which depend on "
                "the layout: use GroupNorm or LayerNorm there"
            )
        new = GlobalBatchNorm(net.num_features, net.eps, net.momentum, net.affine)
        new.train(net.training)
        new.weight, new.bias = net.weight, net.bias
        new.running_mean, new.running_var = net.running_mean, net.running_var
        new.num_batches_tracked = net.num_batches_tracked
        return new
    for name, child in net.named_children():
        setattr(net, name, global_batch_norm(child))
    return net


def needs_whole_parts(net: torch.nn.Module) -> bool:
    """Whether a layer of `net` computes statistics of the global batch in training."""
    return any(isinstance(layer, GlobalBatchNorm) and layer.training for layer in net.modules())
