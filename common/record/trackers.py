"""Trackers: where each row of metrics.jsonl is handed on, such as to TensorBoard, wandb or MLflow.

A tracker is any callable that takes a row, a dict as in metrics.jsonl: "kind", "step" and "epoch", then numbers. It may
have a `close()`. `Run(..., trackers=[...])` takes them; docs/trackers.md has an example.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.console import say

Tracker = Callable[[dict[str, Any]], object]


class Trackers:
    """The trackers of a run, on rank 0. One that raises is named once, and is called no more."""

    def __init__(self, trackers: Iterable[Tracker]):
        self.trackers = list(trackers)

    def __call__(self, row: dict[str, Any]) -> None:
        """Hand each tracker a copy of `row`."""
        for tracker in list(self.trackers):
            try:
                tracker(dict(row))
            except Exception as error:  # a tracker is somebody else's code: whatever it raises, training goes on
                self.trackers.remove(tracker)
                fate = f"it gets no more rows from step {row['step']} on; metrics.jsonl has them all"
                say(f"the tracker {_name(tracker)} failed ({_problem(error)}): {fate}", rank=0, error=True)
                self._close(tracker)

    def close(self) -> None:
        """Close those that have a `close`."""
        while self.trackers:
            self._close(self.trackers.pop(0))

    def _close(self, tracker: Tracker) -> None:
        try:
            getattr(tracker, "close", lambda: None)()
        except Exception as error:
            say(f"the tracker {_name(tracker)} could not be closed ({_problem(error)})", rank=0, error=True)


class TensorBoard:
    """A tracker that writes each number as a scalar KIND/NAME, such as train/loss."""

    def __init__(self, folder: Path, first_step: int):
        """Rows after `first_step`, which a resumed run does again, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=first_step + 1)
        self.close = self.writer.close

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row as KIND/NAME, such as train/loss, without its step and epoch."""
    kind, left_out = row["kind"], ("step", "epoch")
    return {f"{kind}/{k}": value for k, value in row.items() if isinstance(value, int | float) and k not in left_out}


def _name(tracker: Tracker) -> str:
    return getattr(tracker, "__qualname__", type(tracker).__qualname__)


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
