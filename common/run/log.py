"""The log of a run's optimizer steps: what each rank notes, what the ranks exchange, and what rank 0 writes of it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from common.console import say
from common.errors import RunError
from common.record import wording
from common.record.clock import Clock, seconds_between_exchanges
from common.record.output import Output
from common.record.steps import ExchangedSteps, LocalStep, Number, exchange_steps
from common.record.trace import Trace
from common.record.trace_files import write_trace
from common.run.suspicious import evaluation_lines, first_step_lines, not_finite_lines

if TYPE_CHECKING:
    from common.run.run import Run

MOST_STEPS_NOTED = 5000  # between two exchanges


class StepLog:
    """The log of one run. Every rank makes one and calls the same methods; rank 0 prints and writes."""

    def __init__(self, run: "Run", untrained_loss: float | None):
        """The loss of step 1 must be near `untrained_loss`: ln of the number of classes."""
        self.group, self.members, self.options, self.trackers = run.group, run.members, run.options, run.trackers
        self.plan, self.timer, self.precision = run.batches.plan, run.batches.timer, run.precision
        self.untrained_loss, self.nodes_apart = untrained_loss, run.nodes.is_on
        self.clock = Clock()
        self.noted: list[LocalStep] = []
        self.noted_as: Callable[[torch.Tensor], Number] = torch.detach if self.timer.is_cuda else torch.Tensor.item
        self.exchange_at = 1  # exchange once this many steps are noted
        self.is_asked_for = False  # an exchange, by a rank, right after the last step
        self.asks: Callable[[], bool] = bool  # whether this rank does
        self.is_alone = run.worker.world_size == 1
        self.exchange_seconds = 0.0  # that the last one took on this rank
        self.last_eval: dict[str, float] = {}
        self.evaluated_step = -1  # of the last evaluation in the files
        self.mean_loss = 0.0  # of the steps of the last exchange
        self.has_said_reached = False
        self.output: Output | None = None  # on rank 0, and on ranks that keep copies
        self.trace: Trace | None = None  # with --trace, from the first step until it is written
        if self.members.may_change:
            self.timer.at_exchange = lambda: self.precision.reduce_with_gradients(self.asks())

    def open_together(self, folder: Path, first_step: int, total_steps: int, facts: dict[str, object]) -> bool:
        """Open the files of this run and print the header, with `facts` as further lines; returns whether there are
        checkpoints. In a resumed run every rank gets the last evaluation and the seconds of training so far. Every rank
        must call this."""
        known: list[Any] = [None]
        steps = first_step, total_steps
        with self.group.others_wait("rank 0, which opens metrics.jsonl and run.json"):
            if self.group.worker.is_main:
                so_far = self._open(folder, *steps, facts, self.trackers)
                known = [(*so_far, (folder / "checkpoints").exists())]
        self.members.send_files(folder)
        with self.writing():
            if self.members.keeps_copy:
                self._open(folder, *steps, facts, trackers=None)
        dist.broadcast_object_list(known, src=0)
        seconds, self.last_eval, self.evaluated_step, has_checkpoints = known[0]
        self.clock = Clock(seconds, self.members.saved_at)
        if self.options.trace and first_step < total_steps:
            self.trace = Trace(self.timer, self.options.trace, *steps)
            self.group.at_end.callback(self.trace.close)
        return has_checkpoints

    def _open(self, *where: Any, **options: Any) -> tuple[float, dict[str, float], int]:
        self.output = Output(self.group, self.members, self.plan, self.options, *where, **options)
        self.group.at_end.callback(self.output.close)
        return self.output.so_far()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Use around work on the files. Where a copy of them cannot be written, the run goes on without that copy."""
        try:
            with self.group.in_time("work on the files of this run"):
                yield
        except RunError as error:
            if self.group.worker.is_main:
                raise
            say(f"{error}: no copies of the run's files are kept here any more", self.group.worker.rank)
            self.output = None

    # --- steps -------------------------------------------------------------------------------------------------

    def note(self, step: int, lr: Number, rates: Number, grad_norm: torch.Tensor, count: float) -> None:
        """Note optimizer step `step`, counted from 1, on this rank; nothing is exchanged and nothing waits.

        Its loss is what backward has had; `count` is what the sum over all ranks was divided by.
        """
        self.timer.end_step()
        if self.trace:
            self.trace.end_step(step)
        loss, everywhere, is_asked_for = self.precision.take_losses()
        global_loss = None if everywhere is None else self.noted_as(everywhere)
        self.is_asked_for = is_asked_for or (self.is_alone and self.asks())
        self.noted.append(LocalStep(step, loss, global_loss, count, lr, rates, self.noted_as(grad_norm)))
        self.members.note_step(step, self.noted)

    @property
    def is_due(self) -> bool:
        """True when an exchange is due, 1 to 5 seconds after the last, or as a rank has asked (--elastic); the
        same on every rank."""
        return len(self.noted) >= self.exchange_at or self.is_asked_for

    @property
    def is_due_next(self) -> bool:
        """Whether an exchange is due after the next step, as far as is known now."""
        return len(self.noted) + 1 >= self.exchange_at

    def exchange(self, signal: int) -> ExchangedSteps | None:
        """Exchange what all ranks have noted, and write it. `signal` is that of `Ending`. None where nothing is noted.
        Every rank must call this. Raises RunError for a loss that is not finite."""
        if not self.noted:
            return None
        noted, self.noted = self.noted, []
        about = {
            "signal": signal,
            "newcomers_wait": self.members.newcomers_wait,
            "unsaved_seconds": self.clock.unsaved_seconds,
            "last_seconds": self.exchange_seconds,
        }
        self.members.note_exchange(noted)
        with self.timer.span("report"):
            steps = exchange_steps(self.timer, noted, self.plan.changes, **about)
        self.exchange_seconds = steps.seconds_here
        seconds = seconds_between_exchanges(min(steps.now["last_seconds"]))  # of the rank that waited least
        self.exchange_at = max(1, min(MOST_STEPS_NOTED, int(seconds * 1e3 / max(steps.step_ms, 1e-3))))
        self.lines(not_finite_lines(steps, self.precision.skips))
        with self.writing():
            if self.output:
                self.output.steps(steps.done, steps.times(), self.clock)
        if steps.done[0].step == 1:
            self.lines(first_step_lines(steps, self.plan.global_count(0), self.untrained_loss))
        if self.trace and self.trace.is_complete:
            self._write_trace(self.trace)
        self.mean_loss = sum(done.loss for done in steps.done) / len(steps.done)
        for done in steps.done:
            self.precision.require_finite(done.step, done.loss, done.grad_norm)
        return steps

    def _write_trace(self, trace: Trace) -> None:
        """Every rank must call this."""
        self.trace = None
        with self.clock.pause(), self.group.in_time("work on the files of this run"):
            folder = self.output.folder if self.output else None
            said = write_trace(trace, self.group, folder, self.nodes_apart)
        if said:
            self.line(said)

    # --- evaluation, summary -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Use around an evaluation: its time does not count as training."""
        with self.timer.span("evaluation"), self.clock.pause():
            yield

    def evaluation(self, step: int, held_out: Sequence[int], **numbers: float) -> None:
        """Write what an evaluation after `step` steps found, such as loss=, accuracy= and count=. `held_out` are the
        samples of each held-out set."""
        is_first, self.evaluated_step = self.evaluated_step < 0, step
        self.last_eval = {name: value for name, value in numbers.items() if name != "count"}
        with self.writing():
            if self.output:
                self.output.metrics.write("eval", step, training_seconds=round(self.clock.seconds, 3), **numbers)
        self.line(f"step {step}: {wording.measures(numbers)}")
        if is_first:
            self.lines(evaluation_lines(numbers, held_out, self.group.worker.world_size, self.mean_loss))

    def has_reached(self, measure: str, target: float) -> bool:
        """Whether the last evaluation's `measure` is at least `target`; rank 0 says so once."""
        if self.last_eval.get(measure, -float("inf")) < target:
            return False
        if not self.has_said_reached:
            self.has_said_reached = True
            self.line(f"reached {target:.2%} after {self.clock.seconds:.1f} s of training")
        return True

    def line(self, text: str) -> None:
        """One line from rank 0."""
        if self.output:
            self.output.terminal.line(text)
        elif self.group.worker.is_main:
            say(text, rank=0)

    def lines(self, texts: Iterable[str]) -> None:
        """Lines from rank 0."""
        for text in texts:
            self.line(text)

    def summary(self, step: int, **numbers: object) -> None:
        """Print the last lines, write the last row, and plot curves.png. Every rank must call this."""
        if self.trace and self.trace.done:  # the run has ended before all of its steps
            self.trace.close()
            self._write_trace(self.trace)
        with self.writing():
            if self.output:
                self.output.summary(step, self.last_eval, numbers, self.clock)
