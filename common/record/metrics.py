"""metrics.jsonl: what a run has measured, for programs. One object a line."""

import contextlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import RunError, UserError
from common.record.lock import lock, refuse_another_run
from common.record.trackers import Trackers

to_json = json.JSONEncoder(allow_nan=False).encode  # raises ValueError for numbers that are not finite
OF_STEPS = ("train", "ranks")  # kinds of rows of which there is one for each step, or each exchange


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. A last line that is incomplete is left out: after a crash, or because the run writes
    it at this moment. Raises UserError if any other line is not JSON."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, one row after the other: all together may not fit in memory."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = _row(path, f"line {number}", line)
                except UserError:
                    if line.endswith("\n"):
                        raise
                    return  # it is the last one
                yield row
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: name a run's --out-dir, or its metrics.jsonl") from None


def _row(path: Path, where: str, line: str | bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(
            f"{path}, {where} is not JSON: correct that line, or name a metrics.jsonl that a run has written"
        ) from None
    is_row = isinstance(row, dict) and isinstance(row.get("kind", ""), str)
    if not is_row or not all(isinstance(row.get(name), int | float | None) for name in ("step", "training_seconds")):
        raise UserError(f"{path}, {where} is no row of a run: name a metrics.jsonl that a run has written")
    return row


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """The bytes of a file, of which only those are read that are looked at: a run of a week has a gigabyte of rows."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            yield text


def _from_the_end(path: Path, text: mmap.mmap | bytes) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(where it begins, the line, its row) of each complete line, the last one first."""
    end = text.rfind(b"\n")
    while end >= 0:
        begin = text.rfind(b"\n", 0, end) + 1
        yield begin, text[begin:end], _row(path, f"the line at byte {begin}", text[begin:end])
        end = begin - 1


def drop_rows_after(path: Path, step: int) -> None:
    """Take the rows of later steps away, and a last line that is incomplete. Reads from the end, up to an exchange that
    stays: what was written before it is of earlier steps. Raises UserError for a line that is not JSON."""
    stay: list[bytes] = []  # lines after the first one that goes, the last one first
    with _mapped(path) as text:
        size, keep, seen = len(text), text.rfind(b"\n") + 1, list[bytes]()
        for begin, line, row in _from_the_end(path, text):
            if isinstance(at := row.get("step"), int) and at > step:
                keep, stay = begin, list(seen)
            elif row.get("kind") == "ranks":
                break
            else:
                seen.append(line)
    if keep == size:
        return
    if not stay:
        os.truncate(path, keep)
        return
    aside = path.with_suffix(".tmp")
    shutil.copyfile(path, aside)
    os.truncate(aside, keep)
    with aside.open("ab") as file:
        file.writelines(line + b"\n" for line in reversed(stay))
    aside.replace(path)


def last_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each kind, the earliest one first. Reads from the end until it has those of OF_STEPS, looks for
    the last evaluation before these, and leaves out what else is there."""
    found: dict[str, dict[str, Any]] = {}
    with _mapped(path) as text:
        rest = len(text)  # bytes that have not been looked at
        for begin, _, row in _from_the_end(path, text):
            found.setdefault(row.get("kind", ""), row)
            rest = begin
            if found.keys() >= {*OF_STEPS}:
                break
        while "eval" not in found and (at := text.rfind(b'"eval"', 0, rest)) >= 0:
            rest = text.rfind(b"\n", 0, at) + 1
            row = _row(path, f"the line at byte {rest}", text[rest : text.find(b"\n", at)])
            if row.get("kind") == "eval":
                found["eval"] = row
    return dict(reversed(found.items()))


class Metrics:
    """The metrics.jsonl of a run, open for appending. Each row is handed to the run's trackers too."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        steps_per_epoch: int,
        trackers: Trackers,
        takes_over: bool = False,
        is_new: bool = False,
    ):
        """Drops rows after `first_step`: a resumed run does those steps again. `takes_over` where other members of
        it have written before (--elastic). Raises OSError; and UserError for a run that `is_new`, where another one,
        started at the same moment, has written into the folder meanwhile."""
        self.path, self.steps_per_epoch, self.trackers = folder / "metrics.jsonl", steps_per_epoch, trackers
        self.lock = lock(folder, takes_over=takes_over)
        if is_new:
            refuse_another_run(folder)
        if self.path.exists():
            drop_rows_after(self.path, first_step)
        self.file = self.path.open("a")
        self.added: list[str] = []  # rows that are to be written
        self.last_before = last_rows(self.path)

    def write(self, kind: str, step: int, **numbers: Any) -> None:
        """Append a row, and those added before. `epoch` is that of the step; a number that is not finite becomes null.

        Raises RunError when the disk is full.
        """
        self.add(kind, step, **numbers)
        try:
            self._write_added()
            self.file.flush()
        except OSError as error:
            raise RunError(f"could not write {self.path}: {error.strerror}; checkpoints are intact") from error

    def add(self, kind: str, step: int, **numbers: Any) -> None:
        """Like `write`, but the row is in the file only once another one is written."""
        row = {"kind": kind, "step": step, "epoch": (step - 1) // self.steps_per_epoch, **numbers}
        try:
            line = to_json(row)
        except ValueError:
            row |= {k: None for k, one in numbers.items() if isinstance(one, float) and not math.isfinite(one)}
            line = json.dumps(row)
        self.added.append(line)
        self.trackers(row)

    def _write_added(self) -> None:
        added, self.added = self.added, []
        self.file.writelines(f"{line}\n" for line in added)

    def close(self) -> None:
        """Once, or more often."""
        with contextlib.ExitStack() as closed:
            for one in (self.trackers, self.lock, self.file):
                closed.callback(one.close)
            if not self.file.closed:
                self._write_added()
