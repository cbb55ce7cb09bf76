"""metrics.jsonl: what a run has measured, for programs. One object a line."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import RunError, UserError
from common.record.lock import lock
from common.record.trackers import Trackers


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. A last line that is incomplete is left out: after a crash, or because the run writes
    it at this moment. Raises UserError if any other line is not JSON."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # after the last line break, nothing is complete
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: name a run's --out-dir, or its metrics.jsonl") from None
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number} is not JSON: correct that line, or remove it") from None
        if not isinstance(rows[-1], dict):
            raise UserError(f"{path}, line {number} is not an object: name a metrics.jsonl that a run has written")
    return rows


class Metrics:
    """The metrics.jsonl of a run, open for appending. Each row is handed to the run's trackers too."""

    def __init__(
        self, folder: Path, first_step: int, steps_per_epoch: int, trackers: Trackers, takes_over: bool = False
    ):
        """Drops rows after `first_step`: a resumed run does those steps again. `takes_over` where other members of
        it have written before (--elastic). Raises OSError."""
        self.path, self.steps_per_epoch, self.trackers = folder / "metrics.jsonl", steps_per_epoch, trackers
        self.lock = lock(folder, takes_over=takes_over)
        self.rows_before = self._drop_rows_after(first_step)
        self.file = self.path.open("a")

    def _drop_rows_after(self, step: int) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        rows = [row for row in read_metrics(self.path) if not isinstance(row.get("step"), int) or row["step"] <= step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aside.replace(self.path)
        return rows

    def write(self, kind: str, step: int, **numbers: Any) -> None:
        """Append a row, and those added before. `epoch` is that of the step; a number that is not finite becomes null.

        Raises RunError when the disk is full.
        """
        self.add(kind, step, **numbers)
        with self._explained():
            self.file.flush()

    def add(self, kind: str, step: int, **numbers: Any) -> None:
        """Like `write`, but the row may be in the file only once another one is written."""
        row = {"kind": kind, "step": step, "epoch": (step - 1) // self.steps_per_epoch, **numbers}
        for name, one in numbers.items():
            if isinstance(one, float) and not math.isfinite(one):
                row[name] = None
        with self._explained():
            self.file.write(json.dumps(row) + "\n")
        self.trackers(row)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"could not write {self.path}: {error.strerror}; checkpoints are intact") from error

    def close(self) -> None:
        """Once, or more often."""
        self.file.close()
        self.lock.close()
        self.trackers.close()
