"""How the ranks' gradients are summed: exactly, or compressed, for links that are slower than the computing.

    off             the gradients as they are
    bf16            rounded to 8 significant bits: half of the bytes of fp32
    powersgd:4      each matrix as a product of two thin ones, of rank 4. Vogels et al. 2019, arxiv.org/abs/1905.13727

Compressed sums depend on the layout a little: docs/unequal-machines.md says how much.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common.errors import UserError

Summed = torch.futures.Future[torch.Tensor]
EXACT_STEPS = 10  # that PowerSGD's own first steps exchange in full
LEAST_GAIN = 2  # PowerSGD leaves a matrix as it is unless it becomes so many times smaller


def gradient_sum(compress: str, net: torch.nn.Module) -> Callable[[dist.GradBucket], Summed]:
    """A function that sums a bucket of DDP's gradients over the ranks. `compress` is off, bf16 or powersgd:RANK.

    Raises UserError where PowerSGD's rank is so high that no matrix of `net` becomes smaller.
    """
    name, _, rank = compress.partition(":")
    if name == "powersgd":
        return _powersgd(int(rank), net)
    if name == "bf16":  # has float32's range, so that a sum does not overflow (float16's would)
        return lambda bucket: sum_bucket(bucket, torch.bfloat16)
    return sum_bucket


def sum_bucket(
    bucket: dist.GradBucket,
    dtype: torch.dtype | None = None,
    ranks: Any = None,
    scale: float = 1.0,
    beside: torch.Tensor | None = None,
) -> Summed:
    """Start to sum a bucket over the process group `ranks`, by default all, as numbers of type `dtype`. The sum, times
    `scale`, is in the bucket once backward returns, and so is that of the number `beside`.

    It is done without `then` of the all-reduce's future, whose function would run in a thread of the backend.
    """
    gradients = bucket.buffer()
    sent = gradients.to(dtype or gradients.dtype)
    if beside is not None:  # an all-reduce of its own would take as long as one of a small bucket
        sent = torch.cat([sent, beside.reshape(1).to(sent.dtype)])
    work: Any = dist.all_reduce(sent, group=ranks, async_op=True)

    def finish() -> None:
        work.wait()
        if beside is not None:
            beside.copy_(sent[-1])
        if sent is not gradients:
            gradients.copy_(sent[: len(gradients)])
        if scale != 1.0:
            gradients.mul_(scale)

    Variable._execution_engine.queue_callback(finish)  # runs at the end of this backward
    return _done(gradients)


def sum_number(number: torch.Tensor) -> None:
    """Start to sum a number over all ranks. The sum is in it once backward returns."""
    work: Any = dist.all_reduce(number, async_op=True)
    Variable._execution_engine.queue_callback(work.wait)


def _done(gradients: torch.Tensor) -> Summed:
    """A future for DDP that is complete."""
    done: Summed = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    done.set_result(gradients)
    return done


def _powersgd(rank: int, net: torch.nn.Module) -> Callable[[dist.GradBucket], Summed]:
    """torch's PowerSGD, which averages over the ranks, made a sum.

    What it leaves out of a step, it adds in the next. A run that is resumed begins anew with that: what the last step
    left out is lost, and the first ten steps are exchanged in full.
    """
    _require_fit(rank, net)
    empty_steps = 2  # that `wrap` does
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=empty_steps + EXACT_STEPS,
        min_compression_rate=LEAST_GAIN,
        orthogonalization_epsilon=1e-8,  # a matrix whose gradient is zero would make it divide by zero
    )
    ranks = dist.get_world_size()

    def summed(bucket: dist.GradBucket) -> Summed:
        # Its second exchange starts when the first one ends, at another moment on each rank: wait, so that all ranks
        # enter the exchanges of two buckets in the same order.
        return _done(powerSGD_hook(state, bucket).wait().mul_(ranks))

    return summed


def _require_fit(rank: int, net: torch.nn.Module) -> None:
    """Raise UserError where torch's PowerSGD fails, or does not pay."""
    where = {one.device.type for one in net.parameters()}
    if "cpu" in where and torch.cuda.is_available():  # it waits for the GPU, whatever the device of the gradients
        raise UserError(
            f"--compress powersgd:{rank} fails on the CPU of a machine that has a GPU: set CUDA_VISIBLE_DEVICES= (to "
            "nothing), or use bf16"
        )
    if scalars := [name for name, one in net.named_parameters() if one.requires_grad and one.dim() == 0]:
        raise UserError(
            f"--compress powersgd:{rank} knows no parameter without dimensions, such as {scalars[0]}: give it the "
            "shape (1,), or use bf16",
            same_on_every_rank=True,
        )
    sizes = [(len(one), one.numel() // len(one)) for one in net.parameters() if one.requires_grad and one.dim() > 1]
    most = max((ceil(rows * columns / (LEAST_GAIN * (rows + columns))) - 1 for rows, columns in sizes), default=0)
    if rank > most:
        largest = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
        advice = f"give a rank of at most {most}" if most else "use bf16"
        raise UserError(
            f"--compress powersgd:{rank} makes no matrix of this model smaller (the largest is {largest[0]} x "
            f"{largest[1]}): {advice}",
            same_on_every_rank=True,
        )
