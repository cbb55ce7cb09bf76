"""What a person or a program reads: rank-tagged lines, a progress bar, metrics.jsonl, run.json, TensorBoard, plots.

The only module that prints. Rank 0 speaks; other ranks speak when something is wrong. Heavy imports are late:
the launcher uses `say` before torch is there.
"""

import contextlib
import json
import math
import os
import shlex
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import RunError, UserError
from common.layout import Worker

if TYPE_CHECKING:
    import torch

    from common.batching import BatchPlan
    from common.ddp import StepTimer
    from common.process_group import Group

REFRESH_SECONDS = 1.0  # how often the ranks' numbers are gathered, about
LINE_SECONDS = 10.0  # how often a plain line is written where there is no terminal
MOST_STEPS_UNREPORTED = 100


def say(worker: Worker | None, text: str, error: bool = False) -> None:
    """Write one line, tagged with its rank, in one call, so that lines of several processes do not mix."""
    if worker is None:
        tag = ""
    elif worker.is_main:
        tag = "[0] "
    else:
        tag = f"[{worker.rank} {socket.gethostname()}] "
    stream = sys.stderr if error else sys.stdout
    stream.flush()
    with contextlib.suppress(OSError):  # a reader that has gone away must not end the training
        stream.write("".join(f"{tag}{line}\n" for line in text.splitlines()))
        stream.flush()


# --- where a run's files go -------------------------------------------------------------------------------------


def open_folder(group: "Group", args: Namespace, name: str) -> Path | None:
    """The directory of this run on rank 0, made and writable; None elsewhere. Collective.

    It is --out-dir, or `runs/NAME-0001`, the next free number; `--resume` without --out-dir takes the latest run
    that has checkpoints. Raises UserError where it holds another run already or cannot be written.
    """
    folder = None
    with group.others_wait("rank 0, which opens the files of this run"):
        if group.worker.is_main:
            folder = args.out_dir or _latest_folder(name, args.resume) or _new_folder(name)
            if not args.eval_only:
                _make_writable(folder, args.resume)
            elif args.resume == "auto" and not list(folder.glob("checkpoints/step-*")):
                raise UserError(
                    f"--eval-only: {folder} has no checkpoint: name one with --resume PATH, or its --out-dir"
                )
    return folder


def _latest_folder(name: str, resume: str | None) -> Path | None:
    earlier = sorted(Path("runs").glob(f"{name}-[0-9][0-9][0-9][0-9]")) if resume == "auto" else []
    with_checkpoints = [path for path in earlier if (path / "checkpoints").is_dir()]
    return with_checkpoints[-1] if with_checkpoints else None


def _new_folder(name: str) -> Path:
    """runs/NAME-0001, or the next number; two runs that start together get two."""
    number = 1
    while True:
        folder = Path("runs") / f"{name}-{number:04d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"--out-dir {folder} cannot be written: {error.strerror}: name another directory") from None


def _make_writable(folder: Path, resume: str | None) -> None:
    if (folder / "metrics.jsonl").exists() and resume is None:
        raise UserError(f"--out-dir {folder} holds a run already: go on with --resume, or name another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out-dir {folder} cannot be written: {error.strerror}: name another directory") from None


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that was cut off by a crash is left out.

    Raises UserError where another line is no row: what it said must not vanish in silence.
    """
    rows = []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line break is nothing, or cut off
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON: mend that line, or take it out") from None
    return rows


class Report:
    """Progress of one training run. Every rank makes one and calls the same methods; rank 0 writes.

    `step` keeps its numbers on the device. Every second or so all ranks exchange what they have since the last
    time, which every rank must enter: `step`, `flush` and `summary` are collective.
    """

    def __init__(self, group: "Group", args: Namespace, plan: "BatchPlan", timer: "StepTimer"):
        self.worker, self.group, self.args, self.plan, self.timer = group.worker, group, args, plan, timer
        self.unit = getattr(args, "unit", "samples")
        self.folder: Path | None = None
        self.pending: list[dict[str, Any]] = []
        self.flush_at = 1
        self.first_step = self.last_step = self.total_steps = 0
        self.samples = 0
        self.sums_ms = {"compute": 0.0, "communication": 0.0, "waiting": 0.0}
        self.began = self.flushed = self.spoke = time.perf_counter()
        self.paused_seconds = 0.0  # evaluation and checkpoints
        self.earlier_seconds = 0.0  # trained before this run was resumed, up to its last evaluation
        self.last_loss = float("nan")
        self.last_eval: dict[str, float] = {}
        self.bar = None
        self.board = None
        self.metrics = None

    # --- the start ---------------------------------------------------------------------------------------------

    def open(self, folder: Path, first_step: int, total_steps: int, **facts: object) -> None:
        """Open the files of this run and write the header. `facts` are further lines of it, such as the data."""
        self.first_step = self.last_step = first_step
        self.total_steps = total_steps
        with self.group.others_wait("rank 0, which opens metrics.jsonl and run.json"):
            if self.worker.is_main:
                self._open_files(folder, facts)
        self._remember_earlier_starts()
        self.began = self.flushed = self.spoke = time.perf_counter()

    def _open_files(self, folder: Path, facts: Mapping[str, object]) -> None:
        self.folder = folder
        try:
            self._drop_rows_after(self.first_step)
            self.metrics = (folder / "metrics.jsonl").open("a")
            self._write_run_json(facts)
        except OSError as error:
            raise RunError(f"could not write into {folder}: {error.strerror}: make room there") from error
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=self.first_step + 1)
        self._header(facts)
        if sys.stderr.isatty():
            from tqdm import tqdm

            steps = {"total": self.total_steps, "initial": self.first_step, "unit": "step"}
            self.bar = tqdm(**steps, dynamic_ncols=True, smoothing=0.1)

    def _remember_earlier_starts(self) -> None:
        """What a resumed run knew at its checkpoint: the last evaluation and the seconds trained. Collective."""
        import torch.distributed as dist

        known: list[Any] = [0.0, {}]
        if self.worker.is_main:  # the rows are whole: `_drop_rows_after` has just read them
            evals = [row for row in read_metrics(self.folder / "metrics.jsonl") if row["kind"] == "eval"]
            if evals:
                about = ("kind", "step", "epoch", "count", "training_seconds")
                known = [evals[-1]["training_seconds"], {k: v for k, v in evals[-1].items() if k not in about}]
        dist.broadcast_object_list(known, src=0)
        self.earlier_seconds, self.last_eval = known

    def _header(self, facts: Mapping[str, object]) -> None:
        layout = self.worker.layout
        hosts = {}
        for view in self.group.views:
            hosts.setdefault((view["node_rank"], view["host"]), []).append(view)
        nodes = "; ".join(f"{host}: {_count(views)}" for (_, host), views in hosts.items())
        lines = {
            "layout": f"{_plural(layout.world_size, 'process')} on {_plural(len(hosts), 'node')} ({layout.source})",
            "devices": nodes,
            "backend": f"{self.group.backend}, {self.args.precision}",
            "batch": f"{self.plan.global_batch} {self.unit} a step over all ranks, shares {_runs(self.plan.shares)}, "
            f"micro-batches of at most {self.args.micro_batch or max(self.plan.shares)}",
            **facts,
            "files": self.folder,
        }
        say(self.worker, "\n".join(f"{name:<9}{value}" for name, value in lines.items()))

    def _write_run_json(self, facts: Mapping[str, object]) -> None:
        from common.version import git_commit, versions

        path = self.folder / "run.json"
        starts = []
        with contextlib.suppress(OSError, ValueError):
            starts = json.loads(path.read_text())["starts"]
        starts.append(
            {
                "command": shlex.join([sys.executable, *sys.argv]),
                "directory": str(Path.cwd()),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "first_step": self.first_step,
                "seed": self.args.seed,
                "layout": {"source": self.worker.layout.source, "world_size": self.worker.world_size},
                "shares": self.plan.shares,
                "ranks": [{name: view[name] for name in ("rank", "host", "device")} for view in self.group.views],
                "versions": versions(),
                "commit": git_commit(),
                "facts": {name: str(value) for name, value in facts.items()},
                "flags": {name: _plain(value) for name, value in vars(self.args).items() if name != "node_flags"},
            }
        )
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps({"starts": starts}, indent=1))
        aside.replace(path)

    def _drop_rows_after(self, step: int) -> None:
        """A resumed run does the steps after its checkpoint again: their rows would stand twice."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            rows = [row for row in read_metrics(path) if row.get("step", 0) <= step]
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
            aside.replace(path)

    # --- steps -------------------------------------------------------------------------------------------------

    def step(
        self, step: int, loss_sum: "torch.Tensor", lr: float, grad_norm: "torch.Tensor", count: float | None = None
    ) -> None:
        """Note optimizer step `step`, counted from 1. Collective.

        `loss_sum` is this rank's summed loss, `grad_norm` the gradient's norm. The loss that is written is the sum over
        all ranks divided by `count`: the samples of the global batch where it is left out.
        """
        self.timer.end_step()
        count = count or self.plan.global_count(step - 1)
        row = {"step": step, "loss_sum": loss_sum, "count": count, "lr": lr, "grad_norm": grad_norm}
        self.pending.append(row)
        if len(self.pending) >= self.flush_at:
            self.flush()

    def flush(self) -> None:
        """Gather the steps since the last time from all ranks and write them. Every rank must call this.

        Raises RunError on every rank when a loss or a gradient is not a finite number.
        """
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        loss_sums, compute, exchange = self._gather([row["loss_sum"] for row in pending])
        now = time.perf_counter()
        seconds, self.flushed = now - self.flushed, now
        samples = sum(self.plan.global_count(row["step"] - 1) for row in pending)
        self.samples += samples
        self._count_time(compute, exchange, pending[-1]["step"])
        # The next gathering comes after about a second; every rank computes this from the same gathered numbers.
        step_ms = float((compute + exchange).sum(dim=1).max()) / len(pending)
        self.flush_at = max(1, min(MOST_STEPS_UNREPORTED, int(REFRESH_SECONDS * 1e3 / max(step_ms, 1e-3))))
        for row, loss_sum in zip(pending, loss_sums.sum(dim=0).tolist(), strict=True):
            loss, grad_norm = loss_sum / row["count"], float(row["grad_norm"])
            self._require_finite(row["step"], loss, grad_norm)
            self.last_step, self.last_loss = row["step"], loss
            if row["step"] % self.args.log_every == 0:
                rate = samples / seconds
                norm = grad_norm if math.isfinite(grad_norm) else None  # JSON has no infinity
                self._write("train", row["step"], loss=loss, lr=row["lr"], grad_norm=norm, samples_per_second=rate)
        self._show_progress(samples / seconds)

    def _gather(self, loss_sums: list["torch.Tensor"]) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """(loss sums, compute ms, exchange ms) of all ranks for the pending steps, each (ranks, steps) on the CPU."""
        import torch
        import torch.distributed as dist

        compute, exchange = self.timer.take()
        sums = torch.stack([loss_sum.detach().double() for loss_sum in loss_sums])
        mine = torch.stack([sums, sums.new_tensor(compute), sums.new_tensor(exchange)])
        everyone = [torch.empty_like(mine) for _ in range(self.worker.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu().unbind(dim=1)

    def _require_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.args.precision == "fp16"):
            return  # under fp16 the scaler skips steps whose gradients overflow, and lowers its scale
        what = f"gradient of step {step} is {grad_norm}" if math.isfinite(loss) else f"loss of step {step} is {loss}"
        mend = "lower --lr, set --clip-norm, or look at the data around that step"
        raise RunError(f"the {what}: {mend}; the checkpoints before it are whole", same_on_every_rank=True)

    def _count_time(self, compute: "torch.Tensor", exchange: "torch.Tensor", last_step: int) -> None:
        """Split the exchange: a rank waits until the slowest has its gradients ready; the rest is the transfer."""
        waiting = (compute.max(dim=0).values - compute).minimum(exchange)  # (ranks, steps) of milliseconds
        communication = exchange - waiting
        self.sums_ms["compute"] += float(compute.mean(dim=0).sum())
        self.sums_ms["waiting"] += float(waiting.mean(dim=0).sum())
        self.sums_ms["communication"] += float(communication.mean(dim=0).sum())
        means = {
            f"{name}_ms": [round(value, 3) for value in part.mean(dim=1).tolist()]
            for name, part in (("compute", compute), ("communication", communication), ("wait", waiting))
        }
        self._write("ranks", last_step, shares=self.plan.shares, **means)

    def _show_progress(self, rate: float) -> None:
        if not self.worker.is_main:
            return
        text = f"loss {self.last_loss:.4f}, {rate:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(self.last_step - self.bar.n)
        elif time.perf_counter() - self.spoke > LINE_SECONDS:
            self.spoke = time.perf_counter()
            done = self.last_step - self.first_step
            left = (self.spoke - self.began) / max(1, done) * (self.total_steps - self.last_step)
            say(self.worker, f"step {self.last_step}/{self.total_steps}: {text}, {left:,.0f} s left")

    # --- evaluation, summary -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self):
        """Around evaluation and checkpoints: their time does not count as training. Collective."""
        self.flush()
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.paused_seconds += spent
        self.flushed += spent

    @property
    def training_seconds(self) -> float:
        """Seconds of training, without evaluation and checkpoints, with those before a resume."""
        return self.earlier_seconds + time.perf_counter() - self.began - self.paused_seconds

    def evaluation(self, step: int, **numbers: float) -> None:
        """Write what an evaluation after `step` steps found, such as loss=, accuracy= and count=."""
        self.last_eval = {name: value for name, value in numbers.items() if name != "count"}
        self._write("eval", step, training_seconds=round(self.training_seconds, 3), **numbers)
        if self.worker.is_main:
            shown = ", ".join(f"{name} {_show(name, value)}" for name, value in numbers.items())
            self.line(f"step {step}: {shown}")

    def reached(self, target_accuracy: float | None) -> bool:
        """Has the last evaluation reached `--target-accuracy`? The same on every rank. Says after how many seconds."""
        if target_accuracy is None or self.last_eval.get("accuracy", 0.0) < target_accuracy:
            return False
        self.line(f"reached {target_accuracy:.2%} after {self.training_seconds:.1f} s of training")
        return True

    def line(self, text: str) -> None:
        """One line from rank 0, above the progress bar where there is one."""
        if self.worker.is_main:
            if self.bar is not None:
                self.bar.clear()
            say(self.worker, text)
            if self.bar is not None:
                self.bar.refresh()

    def summary(self, step: int, **numbers: object) -> None:
        """The last lines, the last row and curves.png. Collective."""
        self.flush()
        if not self.worker.is_main:
            return
        if self.bar is not None:
            self.bar.close()
        if self.last_step == self.first_step:
            say(self.worker, f"done     nothing was left to do: {self.folder} has its {step} steps")
            return
        seconds = self.training_seconds
        rate = self.samples / (seconds - self.earlier_seconds)
        parts = {f"{name}_seconds": round(value / 1e3, 3) for name, value in self.sums_ms.items()}
        row = {
            "steps": step,
            "seconds": round(seconds, 3),
            "samples_per_second": rate,
            **parts,
            **self.last_eval,
            **numbers,
        }
        self._write("summary", step, **row)
        found = ", ".join(f"{name} {_show(name, value)}" for name, value in self.last_eval.items())
        spent = ", ".join(f"{name} {value / 1e3:.1f} s" for name, value in self.sums_ms.items())
        say(self.worker, f"done     {step} steps: {found}" if found else f"done     {step} steps")
        say(self.worker, f"time     {seconds:.1f} s of training, {rate:,.0f} {self.unit}/s; mean over ranks: {spent}")
        try:
            plot_curves(self.folder / "metrics.jsonl", self.folder / "curves.png")
        except OSError as error:  # the training itself is done, and saved
            say(self.worker, f"could not write {self.folder / 'curves.png'}: {error.strerror}", error=True)
        say(self.worker, f"files    {self.folder}: curves.png, metrics.jsonl, run.json, checkpoints/latest")
        if self.board is not None:
            self.board.close()

    def _write(self, kind: str, step: int, **numbers: Any) -> None:
        """One row in one write, so that a reader or a crash never meets half a line. `epoch` is that of the step."""
        if self.metrics is None:  # not rank 0, or no files at all
            return
        row = {"kind": kind, "step": step, "epoch": (step - 1) // self.plan.steps_per_epoch, **numbers}
        try:
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
        except OSError as error:
            raise RunError(f"could not write {self.metrics.name}: {error.strerror}; checkpoints are whole") from error
        if self.board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(f"{kind}/{name}", value, step)


# --- plots ------------------------------------------------------------------------------------------------------


def plot_curves(metrics: Path, picture: Path) -> None:
    """Loss, evaluation and time by rank of one metrics.jsonl as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    ranks = [row for row in rows if row["kind"] == "ranks"]
    figure, (losses, quality, speed) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    losses.plot([row["step"] for row in train], [row["loss"] for row in train], linewidth=0.8, label="training")
    if evals and "loss" in evals[0]:
        losses.plot([row["step"] for row in evals], [row["loss"] for row in evals], "o-", label="held out")
    losses.set(xlabel="optimizer step", ylabel="loss", title="Loss", yscale="log" if train else "linear")
    losses.legend()
    # of what evaluations found, accuracy, F1 and other shares have this plot; perplexity would flatten them
    others = {"kind", "step", "epoch", "loss", "count", "training_seconds"}
    found = [name for name in (evals[0] if evals else {}) if name not in others]
    measures = [name for name in found if all(0 <= row[name] <= 1 for row in evals)]
    for name in measures:
        quality.plot([row["step"] for row in evals], [row[name] for row in evals], "o-", label=name)
    quality.set(xlabel="optimizer step", title="Held out")
    if measures:
        quality.legend()
    last = [row for row in ranks if row["shares"] == ranks[-1]["shares"]]
    if last:
        _plot_ranks(speed, last)
    for axes in (losses, quality, speed):
        axes.grid(alpha=0.3)
    aside = picture.with_name(f".{picture.name}")
    figure.savefig(aside, dpi=110, format="png")
    aside.replace(picture)
    pyplot.close(figure)


def _plot_ranks(axes, rows: list[dict]) -> None:
    """One bar a rank: how a step's time divides into compute, communication and waiting; its share above."""
    shares = rows[-1]["shares"]
    bottom = [0.0] * len(shares)
    for name, color in (("compute", "tab:green"), ("communication", "tab:blue"), ("wait", "tab:orange")):
        # the median over the run: the first steps warm up and would hide the rest
        values = [sorted(row[f"{name}_ms"][rank] for row in rows)[len(rows) // 2] for rank in range(len(shares))]
        axes.bar(range(len(shares)), values, bottom=bottom, label=name, color=color)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    for rank, (share, top) in enumerate(zip(shares, bottom, strict=True)):
        computing = sorted(row["compute_ms"][rank] for row in rows)[len(rows) // 2]
        rate = f"\n{share / computing * 1e3:,.0f}/s" if computing else ""
        axes.annotate(f"{share}{rate}", (rank, top), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.15)
    axes.set(ylabel="ms a step", title="Time by rank", xticks=range(len(shares)))
    axes.set_xlabel("rank (above: its share, and its rate while it computes)")
    axes.legend()


# --- small helpers ----------------------------------------------------------------------------------------------


def _runs(values: tuple[int, ...]) -> str:
    """(64, 64, 64, 32) -> '64 x3, 32'."""
    parts: list[list[int]] = []
    for value in values:
        if parts and parts[-1][0] == value:
            parts[-1][1] += 1
        else:
            parts.append([value, 1])
    return ", ".join(f"{value} x{times}" if times > 1 else str(value) for value, times in parts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"


def _count(views: list[dict]) -> str:
    names = [view["device"].partition("(")[2].rstrip(")") for view in views]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _show(name: str, value: object) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:.2%}" if name in ("accuracy", "precision", "recall", "f1", "macro_f1") else f"{value:.4f}"


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str | bool | list | tuple | None) else str(value)
