"""How the ranks' gradients are summed: exactly, or compressed, for links that are slower than the computing.

    off             the gradients as they are
    bf16            rounded to 8 significant bits: half of the bytes of fp32

Rounded sums depend on the layout a little: docs/unequal-machines.md says how much.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

Summed = torch.futures.Future[torch.Tensor]


def gradient_sum(compress: str) -> Callable[[dist.GradBucket], Summed]:
    """A function that sums a bucket of DDP's gradients over the ranks. `compress` is off or bf16."""
    if compress == "bf16":  # has float32's range, so that a sum does not overflow (float16's would)
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
    `scale`, is in the bucket once backward returns, and so is that of the numbers `beside`.

    It is done without `then` of the all-reduce's future, whose function would run in a thread of the backend.
    """
    gradients = bucket.buffer()
    sent = gradients.to(dtype or gradients.dtype)
    if beside is not None:  # an all-reduce of its own would take as long as one of a small bucket
        sent = torch.cat([sent, beside.to(sent.dtype)])
    group: Any = ranks or dist.group.WORLD
    work = group.allreduce([torch.view_as_real(sent) if sent.is_complex() else sent])

    def finish() -> None:
        work.wait()
        if beside is not None:
            beside.copy_(sent[len(gradients) :])
        if sent is not gradients:
            gradients.copy_(sent[: len(gradients)])
        if scale != 1.0:
            gradients.mul_(scale)

    Variable._execution_engine.queue_callback(finish)  # runs at the end of this backward
    return _done(gradients)


def sum_numbers(numbers: torch.Tensor) -> None:
    """Start to sum numbers over all ranks. The sums are in it once backward returns."""
    work: Any = dist.all_reduce(numbers, async_op=True)
    Variable._execution_engine.queue_callback(work.wait)


def _done(gradients: torch.Tensor) -> Summed:
    """A future for DDP that is complete."""
    done: Summed = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    done.set_result(gradients)
    return done
