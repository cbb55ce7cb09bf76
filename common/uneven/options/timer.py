"""What this rank spends each optimizer step's time on, measured without synchronising the device."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from common.errors import UserError

NOT_EXCHANGED = (
    "the gradients of this step were not exchanged: put forward and backward of each micro-batch into "
    "`with model.no_sync(enabled=not is_last):`, where `model` is what common.uneven.ddp.wrap(...) returns (for two "
    "batches in one step, give a larger global batch; to skip steps, give GlobalBatchLoader(..., step=) the first one)"
)
KEPT_STEPS = 64  # that `latest` can give
CHECKED_STEPS, CHECK_SECONDS = 5, 0.5

PARTS = (("begin", "loaded"), ("loaded", "ready"), ("ready", "reduced"), ("reduced", "end"))
Marks = dict[str, Any]  # name -> a CUDA event, or the seconds of the clock


@dataclass(slots=True)
class StepTimes:
    """Where one optimizer step of this rank has spent its time, in milliseconds."""

    loading: float
    passes: float  # forward and backward, until this rank's gradients are ready
    exchange: float
    update: float  # clipping and the optimizer, the same for any share
    further: float = 0.0  # of the exchange: those of `StepTimer.exchange`

    @property
    def compute(self) -> float:
        return self.passes + self.update


class StepTimer:
    """Five marks a step:  begin ..loading.. loaded ..passes.. ready ..exchange.. reduced ..update.. end

    `loading` is the time that the step waits for its item; what a loader's workers do meanwhile costs nothing.
    `exchange` is the time that the all-reduce adds after this rank's own gradients are ready: the wait for slower
    ranks, and the transfer itself. What overlaps with backward is not counted. On a GPU the marks are events in its
    queue, so loading counts only as far as the GPU has run out of work. A GlobalBatchLoader marks begin and loaded,
    `end_step` marks end; the hook and `no_sync` of the wrapped model mark the other two. What runs in `exchange` counts
    as that too.

    A trace (common/record/trace.py) is told of every mark, and of what `tell` and `span` note for it alone.
    """

    def __init__(self, device: torch.device):
        self.device, self.is_cuda = device, device.type == "cuda"
        self.done: list[Marks] = []  # since `take`
        self.last_done: deque[Marks] = deque(maxlen=KEPT_STEPS)
        self.current: Marks = {}
        self.item = 0  # items of the loader so far
        self.has_reduced = False  # since the last one
        self.is_cutting, self.cut_item = False, 0  # within the loop over the micro-batches of one; the last such item
        # To look at each parameter in each step would take longer than small steps do. So guards look at all of them
        # once in each round: each of the first steps is one, and then the clock or `begin_checks` begins another.
        self.round = 0
        self.round_began = 0.0
        # Called when the exchange of a step's gradients begins; gives numbers that are summed over the ranks with them.
        self.at_exchange: Callable[[], torch.Tensor] | None = None
        self.on_mark: Callable[[str, Any], None] | None = None  # called with each mark's name and time
        # That `ddp.wrap` has made with this timer, as long as somebody uses them.
        self.models: WeakSet[Any] = WeakSet()

    def next_item(self) -> None:
        """Note that the loader has given another item."""
        self.mark("loaded")
        self.item, self.has_reduced = self.item + 1, False
        if self.item <= CHECKED_STEPS or time.perf_counter() - self.round_began > CHECK_SECONDS:
            self.begin_checks()

    def begin_checks(self) -> None:
        """From now on, let each guard look at everything once more."""
        self.round, self.round_began = self.round + 1, time.perf_counter()

    def mark(self, name: str) -> None:
        """Note the time: a CUDA event on a GPU, the clock elsewhere."""
        self.current[name] = now = self._event() if self.is_cuda else time.perf_counter()
        if name == "reduced":
            self.has_reduced = True
        if self.on_mark:
            self.on_mark(name, now)

    def tell(self, name: str) -> None:
        """Note the time for a trace alone; without one this does nothing."""
        if self.on_mark:
            self.on_mark(name, self._event() if self.is_cuda else time.perf_counter())

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Use around work that a trace should show under this name, between two steps or within one."""
        self.tell(f"{name}:")
        yield
        self.tell(f":{name}")

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_marked(self, name: str) -> bool:
        """Whether the current step has this mark."""
        return name in self.current

    def unmark(self, name: str) -> None:
        """Take a mark of the current step away."""
        self.current.pop(name, None)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Use around a further exchange of a step, after its gradients are reduced, so that it counts as such."""
        self.mark("further")
        yield
        self.mark("done")

    def end_step(self) -> None:
        """Mark the end of the optimizer step. Raises UserError unless its passes ran in `no_sync`."""
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
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        between = torch.cuda.Event.elapsed_time if self.is_cuda else _on_clock
        return [_times_of(marks, between) for marks in done]


def _times_of(marks: Marks, between: Callable[[Any, Any], float]) -> StepTimes:
    """`between` gives the milliseconds from one mark to another."""
    loading, passes, exchange, update = [between(marks[start], marks[end]) for start, end in PARTS]
    further = between(marks["further"], marks["done"]) if "done" in marks else 0.0
    return StepTimes(loading, passes, exchange + further, update - further, further)


def _on_clock(start: float, end: float) -> float:
    return (end - start) * 1e3
