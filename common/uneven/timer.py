"""What this rank spends each optimizer step's time on, measured without synchronising the device."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class StepTimer:
    """Four marks a step:  begin ..compute.. ready ..exchange.. reduced ..compute.. end

    `exchange` is the time that the all-reduce adds after this rank's own gradients are ready: the wait for slower
    ranks, and the transfer itself. What overlaps with backward costs nothing and is not counted. Loading counts as
    compute. `steps` marks begin, `end_step` marks end; `ddp.wrap` and
    `reduce_gradients_if` mark the other two.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.done: list[dict[str, Any]] = []
        self.current: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """Note the time: a CUDA event on a GPU, the clock elsewhere."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.current[name] = event
        else:
            self.current[name] = time.perf_counter()

    def is_marked(self, name: str) -> bool:
        """Whether the current step has this mark."""
        return name in self.current

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's items. A step begins when its item is requested."""
        items = iter(loader)
        while True:
            self.mark("begin")
            try:
                item = next(items)
            except StopIteration:
                return
            yield item

    def end_step(self) -> None:
        """Mark the end of the optimizer step."""
        self.mark("end")
        self.done.append(self.current)
        self.current = {}

    def forget(self) -> None:
        """Drop the marks of the current step."""
        self.current = {}

    def take(self) -> tuple[list[float], list[float]]:
        """(compute, exchange) in milliseconds of each step since the last call. On CUDA this waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        steps, self.done = self.done, []
        exchange = [_milliseconds(step["ready"], step["reduced"]) for step in steps]
        total = [_milliseconds(step["begin"], step["end"]) for step in steps]
        return [whole - part for whole, part in zip(total, exchange, strict=True)], exchange


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
