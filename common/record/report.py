"""The report of a training run: what the ranks note, and what rank 0 prints and writes about it (output.py).

A report decides nothing: the trainer judges whether a loss is good enough, or not finite. Two of its methods
exchange numbers between the ranks, and their names say so: `open_together` and `exchange`.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.console import say
from common.errors import Interrupted, RunError
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record import checkpoint, wording
from common.record.background import BackgroundWriter
from common.record.checkpoint import Part
from common.record.clock import Clock, seconds_between_exchanges
from common.record.copies import send_files
from common.record.interrupts import Interrupts
from common.record.output import Output
from common.record.steps import Done, Gathered, Noted, gather_steps
from common.record.trace import Trace
from common.record.trace_files import draw, split_exchanges, write_json
from common.record.trackers import Tracker
from common.uneven.batching import BatchPlan
from common.uneven.checks import few_counted_problem, first_loss_problem, ranks_that_differ
from common.uneven.precision import Precision
from common.uneven.timer import StepTimer

MOST_STEPS_NOTED = 100  # between two exchanges


class Report:
    """The report of one run. Every rank makes one and calls the same methods; rank 0 prints and writes."""

    def __init__(
        self,
        group: Group,
        plan: BatchPlan,
        timer: StepTimer,
        options: RunOptions,
        precision: Precision,  # whose backward has the loss
        untrained_loss: float | None = None,  # what the loss of step 1 must be near: ln of the number of classes
        trackers: Iterable[Tracker] = (),  # each gets every row of metrics.jsonl, on rank 0 only (trackers.py)
    ):
        self.group, self.plan, self.timer, self.options = group, plan, timer, options
        self.untrained_loss, self.trackers, self.precision = untrained_loss, trackers, precision
        self.has_said_differing = False  # of weights
        self.clock = Clock()
        self.noted: list[Noted] = []
        self.exchange_at = 1  # exchange once this many steps are noted
        self.exchange_seconds = 0.0  # that the last one took on this rank
        self.wants_checkpoint = False
        self.unsaved_seconds = 0.0  # at the last exchange, by rank 0's clock; the same on every rank
        self.last_eval: dict[str, float] = {}
        self.output: Output | None = None  # on rank 0, and on ranks that keep copies
        self.writer: BackgroundWriter | None = None  # there too, with --async-save
        self.interrupts: Interrupts | None = None  # once training begins
        self.trace: Trace | None = None  # with --trace, from the first step until it is written
        self.has_saved = False  # since then
        self.evaluated_step = -1  # of the last evaluation in the files
        self.goes_on = False  # after the members have changed: what was due after the last step may not have been done
        self.interrupted_by = ""  # a signal and the rank that has received it; the same on every rank
        self.lets_in = False  # processes that wait to become members; the same on every rank
        if group.members:
            timer.at_exchange = precision.sum_beside_gradients

    def open_together(self, folder: Path, first_step: int, total_steps: int, **facts: object) -> None:
        """Open the files of this run and print the header. `facts` are further header lines, such as the data.

        In a resumed run every rank gets the last evaluation and the seconds of training so far. Every rank
        must call this.
        """
        known: list[Any] = [None]
        where = (folder, first_step, total_steps, facts, self.trackers)
        with self.group.others_wait("rank 0, which opens metrics.jsonl and run.json"):
            if self.group.worker.is_main:
                output = self._open(Output(self.group, self.plan, self.options, *where))
                known = [(*output.so_far(), (folder / "checkpoints").exists())]
        if self.group.members:
            copies = self.group.members.copies
            send_files(self.group, folder, copies)
            if self.group.worker.rank in copies:
                self._open(Output(self.group, self.plan, self.options, *where, is_copy=True)).so_far()
        dist.broadcast_object_list(known, src=0)
        seconds, self.last_eval, self.evaluated_step, has_checkpoints = known[0]
        self.clock = Clock(seconds)
        self._heed_signals()
        if self.options.trace and first_step < total_steps:
            self.trace = Trace(self.timer, self.options.trace, first_step, total_steps)
            self.group.at_end.callback(self.trace.close)
        if self.group.members:
            self.goes_on = first_step > 0 and self.group.members.generation > 0
            self.wants_checkpoint = self.goes_on and not has_checkpoints  # the disk that has them is gone
            self.interrupted_by = self.group.members.ends
            self.clock.saved_at = self.group.members.held.saved_at

    def _open(self, output: Output) -> Output:
        self.output = output
        self.group.at_end.callback(output.close)
        if self.options.async_save:
            self.writer = BackgroundWriter()
            self.group.at_end.callback(self.writer.wait)
        return output

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Where a copy of the files cannot be written, the run goes on without that copy."""
        try:
            yield
        except RunError as error:
            if self.group.worker.is_main:
                raise
            say(f"{error}: no copies of the run's files are kept here any more", self.group.worker.rank)
            self.output = self.writer = None

    def _heed_signals(self) -> None:
        """From now on; where members may change, also between two generations, and what came in the one before."""
        members, worker = self.group.members, self.group.worker
        if members and members.interrupts:
            self.interrupts = members.interrupts
            self.interrupts.rank, self.interrupts.speaks = worker.rank, worker.local_rank == 0
            return
        self.interrupts = Interrupts(worker.rank, speaks=worker.local_rank == 0)
        if members:
            members.interrupts = self.interrupts
        else:
            self.group.at_end.callback(self.interrupts.close)

    # --- steps -------------------------------------------------------------------------------------------------

    def note(
        self,
        step: int,
        lr: float | torch.Tensor,
        grad_norm: torch.Tensor,
        count: float,
    ) -> None:
        """Note optimizer step `step`, counted from 1, on this rank; nothing is exchanged and nothing waits.

        Its loss is what backward has had; `count` is what the sum over all ranks was divided by.
        """
        self.timer.end_step()
        if self.trace:
            self.trace.end_step(step)
        self.noted.append(Noted(step, *self.precision.take_losses(), count, lr, grad_norm))
        if self.group.members:
            held = self.group.members.held
            held.step, held.noted = step, self.noted
            # For a trainer that has not called end_if_interrupted after its checkpoint.
            if self.lets_in and self.has_saved and not self.is_interrupted:
                self.group.let_in()

    @property
    def is_due(self) -> bool:
        """True when an exchange is due, 1 to 5 seconds after the last; the same on every rank."""
        return len(self.noted) >= self.exchange_at

    def exchange(self) -> list[Done]:
        """Gather what all ranks have noted, and write it. Returns these steps. Every rank must call this."""
        if not self.noted:
            return []
        noted, self.noted = self.noted, []
        received = self.interrupts.received if self.interrupts else 0
        wait = self.group.members is not None and self.group.members.newcomers_wait
        if self.group.members:
            held = self.group.members.held
            held.recent, held.noted = noted, []
            held.unwritten = []  # rank 0 wrote them when it opened the files
        with self.timer.span("report"):
            gathered = gather_steps(
                self.timer, noted, self.clock.unsaved_seconds, received, wait, self.exchange_seconds
            )
        self.exchange_seconds = gathered.seconds_here
        self.lets_in = self.lets_in or gathered.let_in
        # All ranks compute these two from the same gathered numbers.
        self.unsaved_seconds = gathered.unsaved_seconds
        signalled = [(rank, number) for rank, number in enumerate(gathered.signals) if number]
        if signalled and not self.interrupted_by:
            rank, number = signalled[0]
            self.interrupted_by = f"{signal.Signals(number).name} on rank {rank}"
            if self.interrupts:
                self.interrupts.note_agreement()
        seconds = seconds_between_exchanges(gathered.last_seconds)
        self.exchange_at = max(1, min(MOST_STEPS_NOTED, int(seconds * 1e3 / max(gathered.step_ms, 1e-3))))
        losses = gathered.losses.sum(dim=0).tolist()
        self._name_not_finite(noted, gathered)
        done = [
            Done(one.step, loss if one.global_loss is None else float(one.global_loss), float(one.lr), norm)
            for one, loss, norm in zip(noted, losses, gathered.grad_norms.max(dim=0).values.tolist(), strict=True)
        ]
        with self._writing():
            if self.output:
                self.output.steps(done, gathered.times(), self.clock)
        if done[0].step == 1:
            self._judge(done[0], noted[0].count)
        if self.trace and self.trace.is_complete:
            self._write_trace(self.trace)
        return done

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
        off = max(one.off_seconds for one in traces) * 1e6
        self.line(f"trace    {steps}: {where} and trace.png (the nodes' clocks compared to {off:,.0f} microseconds)")

    def _name_not_finite(self, noted: list[Noted], gathered: Gathered) -> None:
        """Print whose samples have given a loss that is not finite, and which steps are skipped."""
        skips = self.precision.skips
        for index, one in enumerate(noted):
            finite = gathered.losses[:, index].isfinite()
            ranks = (~finite).nonzero().flatten().tolist()
            if ranks or (skips and not gathered.grad_norms[:, index].isfinite().all()):
                what = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient"
                ending = ": this step changes no weight (--on-nan skip)" if skips else ""
                self.line(f"step {one.step}: {what} is not finite{ending}")
                if not skips:  # the trainer ends the run here
                    return

    def _compare_weights(self, step: int, net: torch.nn.Module) -> None:
        """Print which ranks' weights differ, which they must not. Every rank must call this."""
        if (ranks := ranks_that_differ(net)) and not self.has_said_differing:
            self.has_said_differing = True
            who = ", ".join(map(str, ranks))
            self.line(
                f"warning: after step {step}, the weights of rank {who} are not bit by bit those of the other ranks: "
                "an error of memory or of a device? Or GPUs of different kinds, which may round differently: then "
                "compare the losses with those of one kind"
            )

    def _judge(self, first: Done, count: float) -> None:
        """Print what is suspicious about the loss of step 1."""
        problems = [few_counted_problem(count, self.plan.global_count(0))]
        if self.untrained_loss:
            problems.append(first_loss_problem(first.loss, self.untrained_loss))
        for problem in filter(None, problems):
            self.line(problem)

    # --- checkpoints, evaluation, summary ----------------------------------------------------------------------

    def checkpoint_is_due(self, step: int, epoch_ends: bool = False) -> bool:
        """True when an epoch's end, --save-every or a signal has asked for a checkpoint since the last one; the same on
        every rank."""
        if self.is_interrupted and self.has_saved:
            self.end_if_interrupted(step - 1)  # for a trainer that has not called it after its checkpoint
        is_due = epoch_ends or self.is_interrupted or self.lets_in
        is_due = is_due or self.options.save_every.is_due(step, self.unsaved_seconds)
        self.wants_checkpoint = self.wants_checkpoint or is_due
        return self.wants_checkpoint

    @property
    def is_interrupted(self) -> bool:
        """True once all ranks know that one of them has received a signal to end; the same on every rank."""
        return bool(self.interrupted_by)

    def end_if_interrupted(self, step: int) -> None:
        """After a checkpoint: raise Interrupted on every rank if one of them has received a signal. With --elastic, let
        processes in that wait."""
        if self.lets_in and not self.is_interrupted:
            self.group.let_in()
        if self.is_interrupted:
            self.finish_saving()
            dist.barrier()  # so that all ranks end at the same time: a launcher may end those that are left
            if self.output:
                self.output.close()
            raise Interrupted(
                f"{self.interrupted_by}: ended after step {step}, which is saved; go on with --resume",
                same_on_every_rank=True,
            )

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        state: dict[str, Any],
        parts: dict[str, Part],
        keep: int | None = None,
        write_extra: Callable[[Path], None] | None = None,
        into: str = "checkpoints",
    ) -> None:
        """Rank 0 writes a checkpoint into the folder `into` of this run, see `checkpoint.save`, while the others wait;
        then those ranks that keep copies on disks of their own. Every rank must call this.

        With --async-save, training goes on as soon as the state has been copied to memory. The time that the ranks
        wait does not count as training, and --save-every counts from its end.
        """
        self._compare_weights(step, model)
        others_wait = self.group.others_wait(f"rank 0, which saves step {step}")
        with self.timer.span("checkpoint"), self.clock.saving(), others_wait:
            if self.group.worker.is_main and not self.output:
                raise RuntimeError("report.save before report.open_together, which opens the folder of the run")
            with self._writing():
                if self.output:
                    layout = {"layout": self.group.worker.layout.source, "shares": self.plan.shares}
                    where = self.output.folder / into
                    checkpoint.save(where, step, model, state | layout, keep, write_extra, self.writer, **parts)
        self.unsaved_seconds, self.wants_checkpoint = 0.0, False
        if self.group.members:
            self.group.members.held.saved_at = self.clock.saved_at
        self.has_saved = self.is_interrupted or self.lets_in

    def finish_saving(self) -> None:
        """Wait until rank 0 has written the last checkpoint. Every rank must call this."""
        if self.options.async_save:
            finishes = self.group.others_wait("rank 0, which finishes the checkpoint")
            with self.clock.pause(), finishes, self._writing():
                if self.writer:
                    self.writer.finish()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Use around an evaluation: its time does not count as training."""
        with self.timer.span("evaluation"), self.clock.pause():
            yield

    def evaluation(self, step: int, **numbers: float) -> None:
        """Write what an evaluation after `step` steps found, such as loss=, accuracy= and count=."""
        self.last_eval = {name: value for name, value in numbers.items() if name != "count"}
        self.evaluated_step = step
        with self._writing():
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
        self.finish_saving()
        if self.trace and self.trace.done:  # the run has ended before all of its steps
            self.trace.close()
            self._write_trace(self.trace)
        if self.interrupts:
            self.interrupts.close()
        with self._writing():
            if self.output:
                self.output.summary(step, self.last_eval, numbers, self.clock)
