"""DistributedDataParallel for uneven ranks: wrap, synchronise once a step, and see where the time goes.

DDP averages the gradients over ranks. A trainer whose rank backpropagates

    loss_sum * world_size / global_count

(loss summed over its own samples; global_count = the samples of the whole global batch) therefore gets exactly
the gradient of the mean over the global batch, whatever the ranks hold.
"""

import inspect
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def wrap(model: torch.nn.Module, device: torch.device, compiled: bool = False) -> DistributedDataParallel:
    """`model` in DistributedDataParallel, with rank 0's weights on every rank. Every rank must call this."""
    # Buffers are constants here, the same on every rank: no broadcast of them before each forward.
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    wrapped = DistributedDataParallel(
        CompiledUnlessEmpty(model) if compiled else model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{"forward_sync_buffers" if newer else "broadcast_buffers": False},
    )
    wrapped.timer = StepTimer(device)
    wrapped.register_comm_hook(wrapped.timer, _all_reduce)
    return wrapped


class CompiledUnlessEmpty(torch.nn.Module):
    """torch.compile's version of a model, and the model itself for a batch of zero rows.

    Compiled code is specialised on sizes, and on a size of 0 some of it is wrong (convolutions in torch 2.15).
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.compiled = torch.compile(model.forward)

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        first = next(iter((*inputs, *named.values())))
        return self.compiled(*inputs, **named) if len(first) else self.model(*inputs, **named)


def settle_buckets(model: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Let DDP settle the order of its gradient buckets before the first step. Every rank must call this.

    DDP packs gradients into buckets and repacks them after the first backward, in the order in which gradients
    became ready. The all-reduce adds up the ranks in an order that depends on the place in the bucket, so the
    first step after a resume would differ in the last bit from the same step of a run that was not interrupted.
    `loss` is anything computed by the model, of zero rows at best; its gradients are thrown away.
    """
    loss.backward()
    model.zero_grad()
    model.timer.current.clear()


@contextmanager
def reduce_gradients_if(is_last: bool, model: DistributedDataParallel) -> Iterator[None]:
    """Around forward *and* backward of a micro-batch: gradients are exchanged in the last one's backward only.

    Before that they add up on each rank. Forward must be inside too: it is where DDP decides whether the coming
    backward synchronises. A rank that is alone has nobody to exchange with, and DDP need not copy its gradients.
    """
    alone = dist.get_world_size() == 1
    with model.no_sync() if alone or not is_last else nullcontext():
        yield
    if is_last and alone:
        model.timer.mark("ready")
    if is_last:
        model.timer.mark("reduced")


def _all_reduce(timer: "StepTimer", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own average over ranks, which also notes when this rank's last gradients were ready."""
    if bucket.is_last():
        timer.mark("ready")
    gradients = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(gradients, async_op=True).get_future().then(lambda future: future.value()[0])


class StepTimer:
    """Where each optimizer step's time goes on this rank, without making the device wait.

    Four marks a step:  begin ..compute.. ready ..exchange.. reduced ..compute.. end
    `exchange` is the time that the all-reduce adds after this rank's own gradients are ready: the wait for
    slower ranks and the transfer itself. What overlaps with backward costs nothing and is not counted.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.done: list[dict] = []
        self.current: dict = {}

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.current[name] = event
        else:
            self.current[name] = time.perf_counter()

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's items; a step begins when its item is asked for, so that loading counts as compute."""
        items = iter(loader)
        while True:
            self.mark("begin")
            try:
                item = next(items)
            except StopIteration:
                return
            yield item

    def end_step(self) -> None:
        self.mark("end")
        self.done.append(self.current)
        self.current = {}

    def take(self) -> tuple[list[float], list[float]]:
        """(compute_ms, exchange_ms) for each step since the last call; on CUDA this waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        steps, self.done = self.done, []
        exchange = [self._milliseconds(step["ready"], step["reduced"]) for step in steps]
        total = [self._milliseconds(step["begin"], step["end"]) for step in steps]
        return [all_of_it - part for all_of_it, part in zip(total, exchange, strict=True)], exchange

    @staticmethod
    def _milliseconds(start, end) -> float:
        return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
