"""What rank 0 prints and writes about a run: the header, metrics.jsonl, run.json, the summary, curves.png."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from common.console import say
from common.errors import RunError, UserError
from common.join.members import Members
from common.join.process_group import Group
from common.join.view import places
from common.launch.options import RunOptions
from common.record import run_json, wording
from common.record.clock import Clock
from common.record.metrics import OF_STEPS, Metrics
from common.record.plots import plot_curves
from common.record.steps import GlobalStep
from common.record.terminal import Terminal
from common.record.trackers import TensorBoard, Tracker, Trackers
from common.uneven.plan import BatchPlan

# of a step's time: its name in "ranks" rows -> in the summary
TIMES = {"loading": "loading", "compute": "compute", "communication": "communication", "wait": "waiting"}
INTERVALS = 1000  # the last ones, of a second or more; the later half of them tells how long a step takes
SAID_AGAIN = 0.1  # a share that has changed by this part of the global batch is worth a line
NOT_MEASURES = {"kind", "step", "epoch", "count", "training_seconds"}  # of an eval row


class Output:
    """Rank 0's lines and files of one run."""

    def __init__(
        self,
        group: Group,
        members: Members,
        plan: BatchPlan,
        options: RunOptions,
        folder: Path,
        first_step: int,
        total_steps: int,
        facts: Mapping[str, object],
        trackers: Iterable[Tracker] | None,
    ):
        """Open the files and print the header. A copy, which has no `trackers`, prints nothing, and has been given what
        was written so far. Raises RunError where `folder` cannot be written."""
        self.plan, self.options, self.folder, self.is_copy = plan, options, folder, trackers is None
        self.first_step = self.last_step = first_step
        self.samples, self.said_shares, self.shares_written = 0, plan.shares, first_step
        self.spent_ms = dict.fromkeys(TIMES.values(), 0.0)
        self.intervals: deque[tuple[float, int]] = deque(maxlen=INTERVALS)  # seconds and steps
        self.terminal = Terminal(first_step, total_steps, is_silent=self.is_copy)
        told: list[Tracker] = list(trackers or ())
        try:
            if options.tensorboard and not self.is_copy:
                told.append(TensorBoard(folder / "tensorboard", first_step))
            takes_over = members.generation > 0
            is_new = not (takes_over or self.is_copy or options.resume)
            self.metrics = Metrics(folder, first_step, plan.steps_per_epoch, Trackers(told), takes_over, is_new)
            if not self.is_copy:
                layout = group.worker.layout
                noted = {**facts, "parts": "balanced by tokens"} if plan.balances_tokens else facts
                run_json.add_start(folder, layout, group.views, plan.shares, options.flags, noted, first_step)
        except OSError as error:
            raise RunError(f"could not write into {folder}: {error.strerror}: make room there") from error
        if members.generation and not self.is_copy:
            self._go_on(group, members)
        elif not self.is_copy:
            say(wording.header(group, plan, options, {**facts, "files": folder}), rank=0)

    def _go_on(self, group: Group, members: Members) -> None:
        """Write what the last generation has done and not written, and who is there now."""
        written = max((row["step"] for kind, row in self.metrics.last_before.items() if kind in OF_STEPS), default=0)
        for one in members.unwritten:
            if one.step > written and one.step % self.options.log_every == 0:
                self.metrics.write("train", one.step, loss=one.loss, lr=one.lr, grad_norm=one.grad_norm)
        ranks = [{name: view[name] for name in ("original", "node_rank", "host")} for view in group.views]
        row = {"generation": members.generation, "ranks": ranks, "cause": members.cause}
        self.metrics.write("members", self.first_step, **row)
        say(f"         after step {self.first_step} go on: {places(group.views)}", rank=0)

    def so_far(self) -> tuple[float, dict[str, float], int]:
        """Seconds of training, the last evaluation and its step, of the runs that this one continues."""
        rows = self.metrics.last_before
        seconds = [row["training_seconds"] for row in rows.values() if "training_seconds" in row]
        last = rows.get("eval", {})
        measures = {name: value for name, value in last.items() if name not in NOT_MEASURES}
        return (seconds[-1] if seconds else 0.0), measures, last.get("step", -1)

    def steps(self, done: Sequence[GlobalStep], times: Mapping[str, torch.Tensor], clock: Clock) -> None:
        """Write the rows of these steps. `times` holds milliseconds by name, each (ranks, steps)."""
        samples = sum(self.plan.global_count(one.step - 1) for one in done)
        seconds = clock.lap()
        rate = samples / seconds
        self.intervals.append((seconds, len(done)))
        self.samples += samples
        self.last_step = done[-1].step
        stops = self.options.flags.get("on_nan") != "skip"
        changes = [change for change in self.plan.changes if change.from_step > self.shares_written]
        for one in done:
            if stops and not math.isfinite(one.loss):  # the trainer ends the run here
                break
            while changes and changes[0].from_step < one.step:
                change = changes.pop(0)
                self.shares_written = change.from_step
                self.metrics.add("shares", change.from_step + 1, shares=change.samples)
            if one.step % self.options.log_every == 0:
                numbers = {"loss": one.loss, "lr": one.lr, "grad_norm": one.grad_norm}
                self.metrics.add("train", one.step, **numbers, samples_per_second=rate)
        means = {f"{name}_ms": [round(ms, 3) for ms in part.mean(dim=1).tolist()] for name, part in times.items()}
        shares, seconds = self.plan.shares_at(self.last_step - 1), round(clock.seconds, 3)
        self.metrics.write("ranks", self.last_step, training_seconds=seconds, shares=shares, **means)
        for name, part in times.items():
            self.spent_ms[TIMES[name]] += float(part.mean(dim=0).sum())
        differences = (abs(now - said) for now, said in zip(shares, self.said_shares, strict=True))
        if max(differences) > SAID_AGAIN * self.plan.global_batch:
            self.said_shares = shares
            self.terminal.line(f"step {self.last_step}: shares by speed: {wording.runs(shares)}")
        self.terminal.progress(self.last_step, f"loss {done[-1].loss:.4f}, {rate:,.0f} {self.options.unit}/s")

    def close(self) -> None:
        """Complete what was written, where the run ends before its last step."""
        self.terminal.close()
        self.metrics.close()

    def summary(self, step: int, last_eval: Mapping[str, float], numbers: Mapping[str, object], clock: Clock) -> None:
        """Print the last lines, write the last row, and plot curves.png.

        `seconds` of the row are those of this run, and its parts add up to them; `training_seconds` are those of all
        runs, as in the rows of evaluations.
        """
        self.terminal.close()
        if self.last_step == self.first_step:
            self.metrics.close()
            self.terminal.line(f"done     nothing to do: {self.folder} has all {step} steps already")
            return
        seconds, total = round(clock.seconds_here, 3), round(clock.seconds, 3)  # in the row, and in the line
        rate = self.samples / max(seconds, 1e-3)
        spent = {name: round(ms / 1e3, 3) for name, ms in self.spent_ms.items()}
        spent["other"] = max(0.0, round(seconds - sum(spent.values()), 3))  # between two steps, such as an exchange
        row = {"steps": step, "first_step": self.first_step, "samples_per_second": rate}
        row |= {"training_seconds": total, "seconds": seconds}
        row |= {f"{name}_seconds": value for name, value in spent.items()}
        self.metrics.write("summary", step, **{**row, **last_eval, **numbers})
        self.metrics.close()
        found = f": {wording.measures(last_eval)}" if last_eval else ""
        since = f" since step {self.first_step} ({total:.1f} s over all runs)" if self.first_step else ""
        later = [*self.intervals][len(self.intervals) // 2 :]  # the first steps are slower
        step_ms = sum(took for took, _ in later) / sum(steps for _, steps in later) * 1e3
        pace = f"{rate:,.0f} {self.options.unit}/s, {step_ms:,.1f} ms a step in the later half"
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in spent.items())
        self.terminal.line(f"done     {step} steps{found}")
        self.terminal.line(f"time     {seconds:.1f} s of training{since}, {pace}; mean over ranks: {parts}")
        files = ["metrics.jsonl", "run.json"] + ["checkpoints/latest"] * (self.folder / "checkpoints").is_dir()
        if not self.options.no_plot:
            files.insert(0, "curves.png")
            try:
                plot_curves(self.metrics.path, self.folder / "curves.png")
            except (OSError, UserError) as error:  # the training itself is done, and saved
                if not self.is_copy:
                    why = getattr(error, "strerror", None) or error
                    say(f"could not write {self.folder / 'curves.png'}: {why}", rank=0, error=True)
        self.terminal.line(f"files    {self.folder}: {', '.join(files)}")
