"""What this rank spends each optimizer step's time on, measured without synchronising the device."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from common.errors import UserError
from common.uneven.loading import require_part_loader

END = object()  # what `next` returns after a loader's last item
NOT_EXCHANGED = (
    "the gradients of this step were not exchanged: put forward and backward of each micro-batch into "
    "`with reduce_gradients_if(is_last, model, timer):`, where `model` is what common.uneven.ddp.wrap(...) returns (to "
    "skip steps, call sampler.set_epoch(epoch, skip_steps))"
)
KEPT_STEPS = 64  # that `latest` can give

Marks = dict[str, Any]  # name -> a CUDA event, or the seconds of the clock


@dataclass(frozen=True)
class StepTimes:
    """Where one optimizer step of this rank has spent its time, in milliseconds."""

    loading: float
    passes: float  # forward and backward, until this rank's gradients are ready
    exchange: float
    update: float  # clipping and the optimizer, the same for any share

    @property
    def compute(self) -> float:
        return self.passes + self.update


class StepTimer:
    """Five marks a step:  begin ..loading.. loaded ..passes.. ready ..exchange.. reduced ..update.. end

    `loading` is the time that the step waits for its item; what a loader's workers do meanwhile costs nothing.
    `exchange` is the time that the all-reduce adds after this rank's own gradients are ready: the wait for slower
    ranks, and the transfer itself. What overlaps with backward is not counted. On a GPU the marks are events in its
    queue, so loading counts only as far as the GPU has run out of work. `steps` marks begin and loaded, `end_step`
    marks end; `ddp.wrap` and `reduce_gradients_if` mark the other two. What runs in `exchange` counts as that too.

    A trace (common/record/trace.py) is told of every mark, and of what `tell` and `span` note for it alone.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.done: list[Marks] = []  # since `take`
        self.last_done: deque[Marks] = deque(maxlen=KEPT_STEPS)
        self.current: Marks = {}
        self.has_reduced = False  # in this step
        # Called when the exchange of a step's gradients begins; gives a number that is summed over the ranks with them.
        self.at_exchange: Callable[[], torch.Tensor] | None = None
        self.on_mark: Callable[[str, Any], None] | None = None  # called with each mark's name and time
        # That `ddp.wrap` has made with this timer; weak, because their hooks hold the timer, which no collector sees.
        self.models: WeakSet[Any] = WeakSet()

    def mark(self, name: str) -> None:
        """Note the time: a CUDA event on a GPU, the clock elsewhere."""
        self.has_reduced = self.has_reduced or name == "reduced"
        self.current[name] = now = self._now()
        if self.on_mark:
            self.on_mark(name, now)

    def tell(self, name: str) -> None:
        """Note the time for a trace alone; without one this does nothing."""
        if self.on_mark:
            self.on_mark(name, self._now())

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Use around work that a trace should show under this name, between two steps or within one."""
        self.tell(f"{name}:")
        yield
        self.tell(f":{name}")

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

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
            self.has_reduced = False
            yield item
            if not self.has_reduced:
                raise UserError(NOT_EXCHANGED)
            self.mark("begin")
        if next(items, END) is not END:
            raise _not_one_a_step(f"gave more than {steps:,} items", steps)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Use around a further exchange of a step, after its gradients are reduced, so that it counts as such."""
        self.mark("further")
        yield
        self.mark("done")

    def end_step(self) -> None:
        """Mark the end of the optimizer step. Raises UserError unless its passes ran in `reduce_gradients_if`."""
        if not self.is_marked("reduced"):
            raise UserError(NOT_EXCHANGED)
        self.mark("end")
        self.done.append(self.current)
        self.last_done.append(self.current)
        self.current = {}

    def forget(self) -> None:
        """Drop the marks of the current step."""
        self.current = {}

    def take(self) -> list[StepTimes]:
        """The times of each step since the last call. On CUDA this waits for the device."""
        done, self.done = self.done, []
        return self._times(done)

    def latest(self, steps: int) -> list[StepTimes]:
        """The times of the last `steps` steps, at most 64. On CUDA this waits for the device."""
        return self._times(list(self.last_done)[-steps:])

    def _times(self, done: Sequence[Marks]) -> list[StepTimes]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [_times_of(marks) for marks in done]


def _length(loader: Iterable[Any]) -> int | None:
    """The number of items that the loader says it has, or None where it does not know."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an IterableDataset
        return None


def _not_one_a_step(gave: str, steps: int) -> UserError:
    return UserError(
        f"the loader {gave}, but this epoch has {steps:,} optimizer steps left, and each takes one item: "
        "write part_loader(data, sampler, seed), without sampler=, batch_size=, shuffle= and drop_last=, and call "
        "sampler.set_epoch(epoch, skip_steps) before each epoch"
    )


def _times_of(marks: Marks) -> StepTimes:
    pairs = [("begin", "loaded"), ("loaded", "ready"), ("ready", "reduced"), ("reduced", "end")]
    loading, passes, exchange, update = (_milliseconds(marks[start], marks[end]) for start, end in pairs)
    further = _milliseconds(marks["further"], marks["done"]) if "done" in marks else 0.0
    return StepTimes(loading, passes, exchange + further, update - further)


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
