"""What this rank spends each optimizer step's time on, measured without synchronising the device."""

import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from common.errors import UserError
from common.uneven.loading import require_part_loader

END = object()  # what `next` returns after a loader's last item


class StepTimer:
    """Five marks a step:  begin ..loading.. loaded ..compute.. ready ..exchange.. reduced ..compute.. end

    `loading` is the time that the step waits for its item; what a loader's workers do meanwhile costs nothing.
    `exchange` is the time that the all-reduce adds after this rank's own gradients are ready: the wait for slower
    ranks, and the transfer itself. What overlaps with backward is not counted. On a GPU the marks are events in its
    queue, so loading counts only as far as the GPU has run out of work. `steps` marks begin and loaded, `end_step`
    marks end; `ddp.wrap` and `reduce_gradients_if` mark the other two.
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

    def unmark(self, name: str) -> None:
        """Take a mark of the current step away."""
        self.current.pop(name, None)

    def steps(self, loader: Iterable[Any], steps: int) -> Iterator[Any]:
        """Yield the loader's items, one for each of the `steps` optimizer steps that are left in this epoch.

        Raises UserError unless the loader gives exactly so many: before the first step where the loader has a length.
        """
        require_part_loader(loader)
        length = _length(loader)
        if length not in (None, steps):
            raise _not_one_a_step(f"has {length:,} items", steps)
        self.mark("begin")  # starting the loader's workers is loading too
        items = iter(loader)
        for given in range(steps):
            item = next(items, END)
            if item is END:
                raise _not_one_a_step(f"gave {given:,} items", steps)
            self.mark("loaded")
            yield item
            self.mark("begin")
        if next(items, END) is not END:
            raise _not_one_a_step(f"gave more than {steps:,} items", steps)

    def end_step(self) -> None:
        """Mark the end of the optimizer step."""
        self.mark("end")
        self.done.append(self.current)
        self.current = {}

    def forget(self) -> None:
        """Drop the marks of the current step."""
        self.current = {}

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """(loading, compute, exchange) in milliseconds of each step since the last call.

        On CUDA this waits for the device.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        steps, self.done = self.done, []
        loading = [_milliseconds(step["begin"], step["loaded"]) for step in steps]
        exchange = [_milliseconds(step["ready"], step["reduced"]) for step in steps]
        total = [_milliseconds(step["begin"], step["end"]) for step in steps]
        compute = [whole - load - part for whole, load, part in zip(total, loading, exchange, strict=True)]
        return loading, compute, exchange


def _length(loader: Iterable[Any]) -> int | None:
    """The number of items that the loader says it has, or None where it does not know."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an IterableDataset
        return None


def _not_one_a_step(gave: str, steps: int) -> UserError:
    return UserError(
        f"the loader {gave}, but this epoch has {steps:,} optimizer steps left, and each takes one item: "
        "write part_loader(data, sampler, seed), without sampler=, batch_size=, shuffle= and drop_last="
    )


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
