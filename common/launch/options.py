"""Flags as small frozen records, so that functions below `train(worker, args)` do not take the whole Namespace."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LayoutFlags:
    """Which processes run where, as typed; None or False for a flag that was left out."""

    nodes: int | None = None
    gpus: tuple[int, ...] | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    device: str = "auto"
    oversubscribe: bool = False
    distributed_init_method: str | None = None
    distributed_world_size: int | None = None
    distributed_gpus: int | None = None
    distributed_rank: int | None = None
    distributed_no_spawn: bool = False
    device_id: int | None = None
    join: str | None = None


@dataclass(frozen=True)
class JoinOptions:
    """How the ranks join, and what must be the same on all of them."""

    backend: str = "auto"
    interface: str | None = None
    oversubscribe: bool = False
    join_timeout_seconds: float = 300.0
    timeout_seconds: float = 600.0  # of one collective, and of a rank without a heartbeat
    work_timeout_seconds: float = 7200.0  # of one rank's own work that the others wait for
    secret: bytes = b""  # of the job: processes without it are not let in
    elastic: int | None = None  # go on after the loss of ranks, while at least so many are left
    agreed_flags: Mapping[str, str] | None = None  # flag -> value as typed; the join compares them between the ranks
    flags: Mapping[str, Any] = field(default_factory=dict)  # for a machine that joins: name -> value, as plain JSON


@dataclass(frozen=True)
class SaveEvery:
    """When a checkpoint is due besides each epoch's end: every so many steps, or after so many seconds."""

    text: str  # as typed
    steps: int | None = None
    seconds: float | None = None

    def is_due(self, step: int, unsaved_seconds: float) -> bool:
        """Whether to save after `step` steps in all, `unsaved_seconds` after the last checkpoint."""
        if self.steps:
            return step % self.steps == 0
        return self.seconds is not None and unsaved_seconds >= self.seconds

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RunOptions:
    """What a run writes, and where."""

    name: str  # of the folder runs/NAME-0001
    out_dir: Path | None
    resume: str | None  # None, "auto" or a path
    eval_only: bool
    save_every: SaveEvery
    async_save: bool  # write checkpoints beside the training
    log_every: int  # steps between rows of metrics.jsonl
    no_plot: bool
    tensorboard: bool
    trace: int | None  # steps
    flags: Mapping[str, Any]  # all of them, as plain JSON, for run.json
    unit: str = "samples"  # what a batch is counted in
