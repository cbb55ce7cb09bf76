"""The log of a run's optimizer steps: what each rank notes, what the ranks exchange, and what rank 0 writes of it."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.console import say
from common.errors import RunError
from common.join.members import Members
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record import wording
from common.record.clock import Clock, seconds_between_exchanges
from common.record.output import Output
from common.record.steps import ExchangedSteps, GlobalStep, LocalStep, exchange_steps
from common.record.trace import Trace
from common.record.trace_files import draw, split_exchanges, write_json
from common.record.trackers import Tracker
from common.run.precision import Precision
from common.uneven.guards.losses import few_counted_problem, first_loss_problem
from common.uneven.plan import BatchPlan
from common.uneven.timer import StepTimer

MOST_STEPS_NOTED = 100  # between two exchanges


class StepLog:
    """The log of one run. Every rank makes one and calls the same methods; rank 0 prints and writes."""

    def __init__(
        self,
        group: Group,
        members: Members,
        plan: BatchPlan,
        timer: StepTimer,
        options: RunOptions,
        precision: Precision,  # whose backward has the loss
        untrained_loss: float | None = None,  # what the loss of step 1 must be near: ln of the number of classes
        trackers: Iterable[Tracker] = (),  # each gets every row of metrics.jsonl, on rank 0 only (trackers.py)
    ):
        self.group, self.members, self.plan, self.timer, self.options = group, members, plan, timer, options
        self.untrained_loss, self.trackers, self.precision = untrained_loss, trackers, precision
        self.clock = Clock()
        self.noted: list[LocalStep] = []
        self.exchange_at = 1  # exchange once this many steps are noted
        self.exchange_seconds = 0.0  # that the last one took on this rank
        self.last_eval: dict[str, float] = {}
        self.evaluated_step = -1  # of the last evaluation in the files
        self.output: Output | None = None  # on rank 0, and on ranks that keep copies
        self.trace: Trace | None = None  # with --trace, from the first step until it is written
        if members.may_change:
            timer.at_exchange = precision.reduce_with_gradients

    def open_together(self, folder: Path, first_step: int, total_steps: int, **facts: object) -> bool:
        """Open the files of this run and print the header; returns whether there are checkpoints. `facts` are further
        header lines, such as the data.

        In a resumed run every rank gets the last evaluation and the seconds of training so far. Every rank
        must call this.
        """
        known: list[Any] = [None]
        where = (folder, first_step, total_steps, facts, self.trackers)
        with self.group.others_wait("rank 0, which opens metrics.jsonl and run.json"):
            if self.group.worker.is_main:
                output = self._open(Output(self.group, self.members, self.plan, self.options, *where))
                known = [(*output.so_far(), (folder / "checkpoints").exists())]
        self.members.send_files(folder)
        if self.members.keeps_copy:
            self._open(Output(self.group, self.members, self.plan, self.options, *where, is_copy=True)).so_far()
        dist.broadcast_object_list(known, src=0)
        seconds, self.last_eval, self.evaluated_step, has_checkpoints = known[0]
        self.clock = Clock(seconds, self.members.saved_at)
        if self.options.trace and first_step < total_steps:
            self.trace = Trace(self.timer, self.options.trace, first_step, total_steps)
            self.group.at_end.callback(self.trace.close)
        return has_checkpoints

    def _open(self, output: Output) -> Output:
        self.output = output
        self.group.at_end.callback(output.close)
        return output

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Use around work on the files. Where a copy of them cannot be written, the run goes on without that copy."""
        try:
            yield
        except RunError as error:
            if self.group.worker.is_main:
                raise
            say(f"{error}: no copies of the run's files are kept here any more", self.group.worker.rank)
            self.output = None

    # --- steps -------------------------------------------------------------------------------------------------

    def note(self, step: int, lr: float | torch.Tensor, grad_norm: torch.Tensor, count: float) -> None:
        """Note optimizer step `step`, counted from 1, on this rank; nothing is exchanged and nothing waits.

        Its loss is what backward has had; `count` is what the sum over all ranks was divided by.
        """
        self.timer.end_step()
        if self.trace:
            self.trace.end_step(step)
        self.noted.append(LocalStep(step, *self.precision.take_losses(), count, lr, grad_norm))
        self.members.note_step(step, self.noted)

    @property
    def is_due(self) -> bool:
        """True when an exchange is due, 1 to 5 seconds after the last; the same on every rank."""
        return len(self.noted) >= self.exchange_at

    def exchange(self, received: int = 0) -> ExchangedSteps | None:
        """Exchange what all ranks have noted, and write it. `received` is the number of a signal that this rank has
        received, or 0. None where nothing is noted. Every rank must call this."""
        if not self.noted:
            return None
        noted, self.noted = self.noted, []
        newcomers_wait = self.members.newcomers_wait
        self.members.note_exchange(noted)
        with self.timer.span("report"):
            steps = exchange_steps(
                self.timer, noted, self.clock.unsaved_seconds, received, newcomers_wait, self.exchange_seconds
            )
        self.exchange_seconds = steps.seconds_here
        seconds = seconds_between_exchanges(steps.last_seconds)
        self.exchange_at = max(1, min(MOST_STEPS_NOTED, int(seconds * 1e3 / max(steps.step_ms, 1e-3))))
        self._name_not_finite(steps)
        with self.writing():
            if self.output:
                self.output.steps(steps.done, steps.times(), self.clock)
        if steps.done[0].step == 1:
            self._judge(steps.done[0], noted[0].count)
        if self.trace and self.trace.is_complete:
            self._write_trace(self.trace)
        return steps

    def _write_trace(self, trace: Trace) -> None:
        """Write trace.json and trace.png. Every rank must call this."""
        self.trace = None
        with self.clock.pause():
            traces = trace.gather(self.group)
            if not traces or not self.output:
                return
            apart = self.options.flags.get("sync_every") is not None
            traces = split_exchanges(traces, self.group.ranks_of_nodes if apart else [range(len(traces))])
            where = self.output.folder / "trace.json"
            try:
                write_json(where, traces, self.group.views, trace.first_step)
                draw(where.with_suffix(".png"), traces)
            except OSError as error:  # the training needs neither
                say(f"could not write {where}: {error.strerror}", rank=0, error=True)
                return
        steps = f"steps {trace.first_step} to {trace.first_step + trace.done - 1}"
        off = max(trace.off_seconds for trace in traces) * 1e6
        self.line(f"trace    {steps}: {where} and trace.png (the nodes' clocks compared to {off:,.0f} microseconds)")

    def _name_not_finite(self, steps: ExchangedSteps) -> None:
        """Print whose samples have given a loss that is not finite, and which steps are skipped."""
        skips = self.precision.skips
        for index, done in enumerate(steps.done):
            finite = steps.losses[:, index].isfinite()
            ranks = (~finite).nonzero().flatten().tolist()
            if ranks or (skips and not steps.grad_norms[:, index].isfinite().all()):
                what = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient"
                ending = ": this step changes no weight (--on-nan skip)" if skips else ""
                self.line(f"step {done.step}: {what} is not finite{ending}")
                if not skips:  # the run ends here
                    return

    def _judge(self, first: GlobalStep, count: float) -> None:
        """Print what is suspicious about the loss of step 1."""
        problems = [few_counted_problem(count, self.plan.global_count(0))]
        if self.untrained_loss:
            problems.append(first_loss_problem(first.loss, self.untrained_loss))
        for problem in filter(None, problems):
            self.line(problem)

    # --- evaluation, summary -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Use around an evaluation: its time does not count as training."""
        with self.timer.span("evaluation"), self.clock.pause():
            yield

    def evaluation(self, step: int, **numbers: float) -> None:
        """Write what an evaluation after `step` steps found, such as loss=, accuracy= and count=."""
        self.last_eval = {name: value for name, value in numbers.items() if name != "count"}
        self.evaluated_step = step
        with self.writing():
            if self.output:
                self.output.evaluation(step, numbers, self.clock)
        self.line(f"step {step}: {wording.measures(numbers)}")

    def line(self, text: str) -> None:
        """One line from rank 0."""
        if self.output:
            self.output.terminal.line(text)
        elif self.group.worker.is_main:
            say(text, rank=0)

    def summary(self, step: int, **numbers: object) -> None:
        """Print the last lines, write the last row, and plot curves.png. Every rank must call this."""
        if self.trace and self.trace.done:  # the run has ended before all of its steps
            self.trace.close()
            self._write_trace(self.trace)
        with self.writing():
            if self.output:
                self.output.summary(step, self.last_eval, numbers, self.clock)
