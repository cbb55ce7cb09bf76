"""--trace S: what each rank does during S optimizer steps, on one clock.

Each rank notes its own times, which costs about a microsecond each. After the last of the S steps the ranks compare
their clocks, rank 0 gathers what all have noted, and writes two files (trace_files.py): trace.json, which
https://ui.perfetto.dev and chrome://tracing open, and trace.png. On a GPU, torch.profiler notes its kernels too.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from common.join.clocks import seconds_ahead
from common.join.process_group import Group
from common.uneven.options.timer import StepTimer

UNTRACED_STEPS = 5  # the first ones are slower than the rest
# (a mark, the next one) -> what the rank does between them. Marks of a micro-batch are "pass" and "passed"; in the last
# one's backward, this rank's gradients are "ready".
BETWEEN = {
    ("begin", "loaded"): "loading",
    ("pass", "passed"): "micro-batch",
    ("pass", "ready"): "micro-batch",
    ("ready", "passed"): "all-reduce",
    ("reduced", "further"): "optimizer",
    ("further", "done"): "all-reduce",
    ("done", "end"): "optimizer",
    ("reduced", "end"): "optimizer",
}


@dataclass(frozen=True)
class Span:
    """Something that a rank has done, in seconds of one clock."""

    name: str
    start: float
    end: float
    step: int  # from 1; between two steps, the one before
    number: int = 0  # of a micro-batch within its step, from 1


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank."""

    rank: int
    spans: list[Span]
    kernels: list[Span]  # of its GPU
    off_seconds: float = 0.0  # by how much its clock may differ from that of rank 0


def spans_between(marks: Iterable[tuple[str, float]], first_step: int) -> list[Span]:
    """The spans of marks (name, seconds) in the order in which they were made. `first_step` is the step of the first.

    A mark "x:" begins the span x, and ":x" ends it.
    """
    spans: list[Span] = []
    step, number, before, opened = first_step, 0, ("", 0.0), dict[str, float]()
    for name, now in marks:
        what = BETWEEN.get((before[0], name))
        if name == "pass":
            number += 1
        if what:
            spans.append(Span(what, before[1], now, step, number if what == "micro-batch" else 0))
        if name.endswith(":"):
            opened[name[:-1]] = now
        elif name.startswith(":") and name[1:] in opened:
            spans.append(Span(name[1:], opened.pop(name[1:]), now, max(first_step, step - (number == 0))))
        else:
            before = name, now
        if name == "end":
            step, number = step + 1, 0
    return spans


class Trace:
    """What this rank notes of `steps` steps. Every rank makes one."""

    def __init__(self, timer: StepTimer, steps: int, first_step: int, total_steps: int):
        """A run that makes the steps after `first_step`, up to `total_steps`; a short one is traced from its start."""
        self.timer, self.steps = timer, min(steps, total_steps - first_step)
        self.first_step = 1 + min(first_step + UNTRACED_STEPS, total_steps - self.steps)
        self.marks: list[tuple[str, Any]] = []
        self.done = 0  # steps that are traced
        self.kernels: Kernels | None = None
        self.end_step(first_step)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are traced; the same on every rank."""
        return self.done == self.steps

    def end_step(self, step: int) -> None:
        """Call after each optimizer step; `step` counts from 1."""
        if step == self.first_step - 1:
            self._begin()
        self.done = min(max(0, step - self.first_step + 1), self.steps)
        if self.is_complete:
            self.close()

    def _begin(self) -> None:
        self.timer.on_mark = lambda name, now: self.marks.append((name, now))
        if self.timer.device.type == "cuda":
            self.kernels = Kernels(ProfilerActivity.CUDA)
            self.zero = torch.cuda.Event(enable_timing=True)
            self.zero.record()
            torch.cuda.synchronize(self.timer.device)
            self.zero_seconds = time.perf_counter()

    def close(self) -> None:
        """Note no more. May be called again."""
        self.timer.on_mark = None
        if self.kernels:
            self.kernels.end()

    def gather(self, group: Group) -> list[RankTrace]:
        """What all ranks have noted, by rank, on rank 0's clock; empty on the other ranks. Every rank must call this.

        Raises torch's errors of the store, or of the exchange, where a rank is lost.
        """
        if self.timer.device.type == "cuda":
            torch.cuda.synchronize(self.timer.device)  # else its events have no times yet
        rank, limit = group.worker.rank, group.options.timeout_seconds
        ahead, off = seconds_ahead(group.store, f"clock{self.first_step}", rank, group.ranks_of_nodes, limit)
        marks = [(name, self._seconds(at) - ahead) for name, at in self.marks]
        kernels = self.kernels.spans(ahead) if self.kernels else []
        everyone: list[Any] | None = [None] * group.worker.world_size if rank == 0 else None
        dist.gather_object(RankTrace(rank, spans_between(marks, self.first_step), kernels, off), everyone)
        return everyone or []

    def _seconds(self, at: Any) -> float:
        """A mark's time on this process's clock."""
        return at if isinstance(at, float) else self.zero_seconds + self.zero.elapsed_time(at) / 1e3


class Kernels:
    """What runs on the device, by torch.profiler, from now on until `end`."""

    def __init__(self, activity: ProfilerActivity):
        self.profile = profile(activities=[activity])
        self.profile.start()
        self.stops = contextlib.ExitStack()
        self.stops.callback(self.profile.stop)

    def end(self) -> None:
        """Note no more, once the device has done what it was given. May be called again."""
        self.stops.close()

    def spans(self, ahead: float = 0.0) -> list[Span]:
        """In seconds of this process's clock, less `ahead`."""
        with tempfile.TemporaryDirectory() as folder:  # the profiler gives its times to a file alone
            file = Path(folder) / "kernels.json"
            self.profile.export_chrome_trace(str(file))
            found = json.loads(file.read_text())
        # The profiler counts from a time of the machine's calendar.
        zero = found.get("baseTimeNanoseconds", 0) / 1e9 - _calendar_ahead() - ahead
        events = [one for one in found["traceEvents"] if one.get("ph") == "X" and "dur" in one]
        works = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")]
        return [Span(one["name"], zero + one["ts"] / 1e6, zero + (one["ts"] + one["dur"]) / 1e6, 0) for one in works]


def _calendar_ahead() -> float:
    """Seconds that `time.time()` is ahead of `time.perf_counter()`: from the quickest of some looks at both, because
    the kernel may let another process run in between."""
    looks = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(10)]
    before, calendar, after = min(looks, key=lambda look: look[2] - look[0])
    return calendar - (before + after) / 2
