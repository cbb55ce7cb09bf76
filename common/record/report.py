"""The report of a training run: what rank 0 prints and writes about it.

A report decides nothing: the trainer judges whether a loss is good enough, or not finite. Two of its methods
exchange numbers between the ranks, and their names say so: `open_together` and `exchange`.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.console import say
from common.errors import RunError
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record import run_json, wording
from common.record.clock import Clock, gather_steps
from common.record.metrics import Metrics
from common.record.plots import plot_curves
from common.record.terminal import Terminal
from common.uneven.batching import BatchPlan
from common.uneven.timer import StepTimer

EXCHANGE_SECONDS = 1.0  # about how often the ranks exchange what they have noted
MOST_STEPS_NOTED = 100  # between two exchanges
# of a step's time: its name in "ranks" rows -> in the summary
TIMES = {"loading": "loading", "compute": "compute", "communication": "communication", "wait": "waiting"}
NOT_MEASURES = {"kind", "step", "epoch", "count", "training_seconds"}  # of an eval row


@dataclass(frozen=True)
class Noted:
    """One optimizer step as this rank knows it. Tensors stay on the device."""

    step: int
    loss_sum: torch.Tensor  # of this rank's samples
    count: float  # over all ranks
    lr: float | torch.Tensor
    grad_norm: torch.Tensor


@dataclass(frozen=True)
class Done:
    """One optimizer step as all ranks know it."""

    step: int
    loss: float  # the mean over the global batch
    grad_norm: float


class Report:
    """The report of one run. Every rank makes one and calls the same methods; rank 0 prints and writes."""

    def __init__(self, group: Group, plan: BatchPlan, timer: StepTimer, options: RunOptions):
        self.group, self.plan, self.timer, self.options = group, plan, timer, options
        self.clock = Clock()
        self.noted: list[Noted] = []
        self.exchange_at = 1  # exchange once this many steps are noted
        self.first_step = self.last_step = self.samples = 0
        self.last_eval: dict[str, float] = {}
        self.sums_ms = dict.fromkeys(TIMES.values(), 0.0)
        self.terminal: Terminal | None = None  # on rank 0, like the next two
        self.metrics: Metrics | None = None
        self.folder = Path()

    def open_together(self, folder: Path, first_step: int, total_steps: int, **facts: object) -> None:
        """Open the files of this run and print the header. `facts` are further header lines, such as the data.

        In a resumed run every rank gets the last evaluation and the seconds of training so far. Every rank
        must call this.
        """
        self.first_step = self.last_step = first_step
        known: list[Any] = [0.0, {}]
        with self.group.others_wait("rank 0, which opens metrics.jsonl and run.json"):
            if self.group.worker.is_main:
                known = self._open_files(folder, total_steps, facts)
        dist.broadcast_object_list(known, src=0)
        self.clock, self.last_eval = Clock(known[0]), known[1]

    def _open_files(self, folder: Path, total_steps: int, facts: Mapping[str, object]) -> list[Any]:
        layout = self.group.worker.layout
        start = (folder, layout, self.group.views, self.plan.shares, self.options.flags, facts, self.first_step)
        self.folder = folder
        try:
            steps_per_epoch, tensorboard = self.plan.steps_per_epoch, self.options.tensorboard
            self.metrics = Metrics(folder, self.first_step, steps_per_epoch, tensorboard)
            run_json.add_start(*start)
        except OSError as error:
            raise RunError(f"could not write into {folder}: {error.strerror}: make room there") from error
        say(wording.header(self.group, self.plan, self.options, {**facts, "files": folder}), rank=0)
        self.terminal = Terminal(self.first_step, total_steps)
        evaluations = [row for row in self.metrics.rows_before if row["kind"] == "eval"]
        if not evaluations:
            return [0.0, {}]
        last = {name: value for name, value in evaluations[-1].items() if name not in NOT_MEASURES}
        return [evaluations[-1]["training_seconds"], last]

    # --- steps -------------------------------------------------------------------------------------------------

    def note(
        self,
        step: int,
        loss_sum: torch.Tensor,
        lr: float | torch.Tensor,
        grad_norm: torch.Tensor,
        count: float | None = None,
    ) -> None:
        """Note optimizer step `step`, counted from 1, on this rank; nothing is exchanged and nothing waits.

        `loss_sum` is this rank's summed loss, `count` the divisor of the sum over all ranks, by default the samples
        of the global batch.
        """
        self.timer.end_step()
        self.noted.append(Noted(step, loss_sum, count or self.plan.global_count(step - 1), lr, grad_norm))

    @property
    def is_due(self) -> bool:
        """True when an exchange is due, about a second after the last; the same on every rank."""
        return len(self.noted) >= self.exchange_at

    def exchange(self) -> list[Done]:
        """Gather what all ranks have noted, and write it. Returns these steps. Every rank must call this."""
        if not self.noted:
            return []
        noted, self.noted = self.noted, []
        gathered = gather_steps(self.timer, [one.loss_sum for one in noted])
        samples = sum(self.plan.global_count(one.step - 1) for one in noted)
        rate = samples / self.clock.lap()
        self.samples += samples
        # All ranks compute this from the same gathered numbers.
        self.exchange_at = max(1, min(MOST_STEPS_NOTED, int(EXCHANGE_SECONDS * 1e3 / max(gathered.step_ms, 1e-3))))
        losses = gathered.loss_sums.sum(dim=0).tolist()
        done = [Done(one.step, loss / one.count, float(one.grad_norm)) for one, loss in zip(noted, losses, strict=True)]
        self.last_step = done[-1].step
        times = gathered.times()
        for name, values in times.items():
            self.sums_ms[TIMES[name]] += float(values.mean(dim=0).sum())
        if self.metrics:
            means = {f"{name}_ms": [round(ms, 3) for ms in part.mean(dim=1).tolist()] for name, part in times.items()}
            self.metrics.write("ranks", self.last_step, shares=self.plan.shares_at(self.last_step - 1), **means)
            for one, row in zip(noted, done, strict=True):
                if not math.isfinite(row.loss):  # the trainer ends the run here
                    break
                if row.step % self.options.log_every == 0:
                    numbers = {"loss": row.loss, "lr": float(one.lr), "grad_norm": row.grad_norm}
                    self.metrics.write("train", row.step, **numbers, samples_per_second=rate)
        if self.terminal:
            self.terminal.progress(self.last_step, f"loss {done[-1].loss:.4f}, {rate:,.0f} {self.options.unit}/s")
        return done

    # --- evaluation, summary -----------------------------------------------------------------------------------

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Use around evaluation and checkpoints: their time does not count as training."""
        return self.clock.pause()

    def evaluation(self, step: int, **numbers: float) -> None:
        """Write what an evaluation after `step` steps found, such as loss=, accuracy= and count=."""
        self.last_eval = {name: value for name, value in numbers.items() if name != "count"}
        if self.metrics:
            self.metrics.write("eval", step, training_seconds=round(self.clock.seconds, 3), **numbers)
        self.line(f"step {step}: {wording.measures(numbers)}")

    def line(self, text: str) -> None:
        """One line from rank 0."""
        if self.terminal:
            self.terminal.line(text)
        elif self.group.worker.is_main:
            say(text, rank=0)

    def summary(self, step: int, **numbers: object) -> None:
        """Print the last lines, write the last row, and plot curves.png."""
        if not (self.metrics and self.terminal):
            return
        self.terminal.close()
        if self.last_step == self.first_step:
            say(f"done     nothing to do: {self.folder} has all {step} steps already", rank=0)
            return
        seconds, rate = self.clock.seconds, self.samples / self.clock.seconds_here
        row = {"steps": step, "seconds": round(seconds, 3), "samples_per_second": rate}
        row |= {f"{name}_seconds": round(value / 1e3, 3) for name, value in self.sums_ms.items()}
        self.metrics.write("summary", step, **{**row, **self.last_eval, **numbers})
        self.metrics.close()
        spent = ", ".join(f"{name} {value / 1e3:.1f} s" for name, value in self.sums_ms.items())
        found = f": {wording.measures(self.last_eval)}" if self.last_eval else ""
        say(f"done     {step} steps{found}", rank=0)
        say(
            f"time     {seconds:.1f} s of training, {rate:,.0f} {self.options.unit}/s; mean over ranks: {spent}", rank=0
        )
        try:
            plot_curves(self.metrics.path, self.folder / "curves.png")
        except OSError as error:  # the training itself is done, and saved
            say(f"could not write {self.folder / 'curves.png'}: {error.strerror}", rank=0, error=True)
        say(f"files    {self.folder}: curves.png, metrics.jsonl, run.json, checkpoints/latest", rank=0)
