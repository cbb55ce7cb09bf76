"""The largest micro-batch that fits into a rank's memory, found by trying."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import ceil

import torch
import torch.distributed as dist

from common.errors import UserError, own_words
from common.uneven.kept import unchanged
from common.uneven.options.global_batch import needs_whole_parts

RESERVED_COPIES = 4  # of the weights, that training needs besides: two moments of AdamW, DDP's buckets, and a margin
CLOSER = 3  # trials between the largest size that fits and the smallest that does not
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate", "could not create a memory", "bad_alloc")
NO_CONTEXT = nullcontext()
USED = 1 / 2  # of the largest size that fits: evaluations and other sizes leave memory in pieces


def fitting_micro_batches(
    net: torch.nn.Module, trial: Callable[[int], None], most: int, pace: AbstractContextManager = NO_CONTEXT
) -> list[int]:
    """For each rank, how many rows to have in one forward: up to its own `most`, and as fit into its memory.

    `trial(rows)` runs both on `net`, without any exchange. Its gradients are thrown away, and what else it changes in
    `net` is put back. On a GPU the limit is its memory; on a CPU it is the limit of the process (`ulimit -v`), and
    without one everything fits. The trials run in the context `pace`, in which a rank may be much slower than another.

    Every rank must call this, before `wrap`. Raises UserError on every rank if a single row does not fit on one, or if
    the model's statistics are over the global batch, which do without micro-batches.
    """
    if needs_whole_parts(net):
        raise UserError(
            "--micro-batch auto: statistics over the global batch need each rank's whole part in one forward: leave it "
            "out, or use GroupNorm",
            same_on_every_rank=True,
        )
    with pace:
        largest = _largest(net, trial, ceil(max(1, most) / USED))
    mine = torch.tensor([min(largest, max(1, most))], device=next(net.parameters()).device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    sizes = torch.cat(everyone).tolist()
    if 0 in sizes:
        raise UserError(
            f"--micro-batch auto: on rank {sizes.index(0)} the memory is too small for a forward and backward of one "
            "sample: use a smaller model, or --checkpoint-activations where there is one",
            same_on_every_rank=True,
        )
    return sizes


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for a tensor: what the allocators of a GPU and of the CPU raise, and libraries."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )


def wanted_memory(error: Exception) -> str:
    """What such an error says of it, in short."""
    # "CUDA out of memory. Tried to allocate 2.00 GiB", or "can't allocate memory: you tried to allocate 900 bytes"
    line = own_words(error).partition("\n")[0]
    return line.rpartition("DefaultCPUAllocator: ")[2].partition(". GPU")[0].partition(". Error code")[0]


def _largest(net: torch.nn.Module, trial: Callable[[int], None], most: int) -> int:
    """The rows to use: doubled until they do not fit, then closer by halves, less a margin. 0 if not even one fits."""
    fits, fails, size = 0, most + 1, 1
    while fits < most and size < fails:
        if _fits(net, trial, size):
            fits, size = size, min(2 * size, most)
        else:
            fails = size
    for _ in range(CLOSER):
        size = (fits + fails) // 2
        if not fits < size < fails:
            break
        if _fits(net, trial, size):
            fits = size
        else:
            fails = size
    return max(1, int(fits * USED)) if fits else 0


def _fits(net: torch.nn.Module, trial: Callable[[int], None], rows: int) -> bool:
    """Whether a trial with so many rows fits beside what training needs later."""
    reserved: list[torch.Tensor] = []
    try:
        for one in net.parameters():
            reserved += [torch.zeros_like(one) for _ in range(RESERVED_COPIES * one.requires_grad)]
        with unchanged(net):
            trial(rows)
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        net.zero_grad(set_to_none=True)
        reserved.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
