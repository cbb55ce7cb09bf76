"""A run as its files tell it: the rows of metrics.jsonl, and how it was started, from run.json."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import reading, refuse_stand_in
from common.record.metrics import read_metrics

Row = dict[str, Any]
MOST = 10**15  # that a whole number in a row may be


@dataclass(frozen=True)
class Run:
    """Rows by step. Where a file goes back to earlier steps, the last row of each counts."""

    path: Path  # of metrics.jsonl
    train: dict[int, Row]
    evaluations: dict[int, Row]
    ranks: dict[int, Row]  # the shares, and each rank's times, since the row before
    starts: list[dict[str, Any]]  # of run.json; empty where there is none
    state: dict[str, Any]  # state.json of its newest checkpoint: data and flags that decide the result; may be empty
    is_complete: bool = True  # it has a summary: it was neither interrupted nor has it failed

    def lacks(self, other: "Run") -> list[str]:
        """In words, what the other one has and this one should have too."""
        found, last, end = [], max(self.train), max(other.train)
        if not self.is_complete and last < end:
            found.append(f"ends after step {last} without a summary: was it interrupted, or has it failed?")
        extra = {*other.resumes, *self.resumes, end}  # a run is evaluated where it ends, too
        often, as_often = ({str(start["flags"].get("eval_every")) for start in run.starts} for run in (self, other))
        steps = sorted(other.evaluations.keys() - self.evaluations.keys() - extra)
        if often == as_often and steps and steps[0] <= last:
            found.append(f"has no evaluation after step {steps[0]}")
        if self.starts and other.state and not self.state:
            found.append("has no checkpoint")
        return found

    @property
    def resumes(self) -> list[int]:
        """The steps after which the run was resumed."""
        return [start["first_step"] for start in self.starts if start["first_step"]]

    @property
    def is_uneven(self) -> bool:
        """Did any rank ever have another share than the others? --balance and --elastic change shares in mid-run; parts
        that are balanced by tokens have different numbers of samples."""
        if any("parts" in start["facts"] for start in self.starts):
            return True
        shares = [holder.get("shares") for holder in (*self.starts, *self.ranks.values())]
        return any(share != one[0] for one in shares if isinstance(one, list) for share in one)

    def start_at(self, step: int) -> dict[str, Any] | None:
        """The start that has done this step, or None."""
        return next((start for start in reversed(self.starts) if start["first_step"] < step), None)


def read_run(path: Path) -> Run:
    """The run in the folder `path`, or that of a metrics.jsonl. Raises UserError where there is none."""
    with reading(path, str(path)):
        if not path.exists():
            what = "there is no such file or folder"
            raise UserError(f"{path}: {what}: name the --out-dir of a run, or its metrics.jsonl")
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    with reading(metrics, str(metrics)):
        rows = read_metrics(metrics)
    by_kind: dict[str, dict[int, Row]] = {"train": {}, "eval": {}, "ranks": {}}
    before: dict[str, Row] = {}  # the last row of each kind
    has_ended = False
    for row in rows:
        kind, step = row.get("kind"), row.get("step")
        has_ended = has_ended or kind == "summary"
        if has_ended and kind == "train" and step == 1:
            raise UserError(f"{metrics} begins again at step 1 after a run has ended in it: is it of two runs?")
        if kind in by_kind and isinstance(step, int):
            _require_of_one_run(metrics, row, before.get(kind, row))
            by_kind[kind][step] = before[kind] = row
    train = {step: row for step, row in sorted(by_kind["train"].items()) if "loss" in row}
    if not any(row["loss"] is not None for row in train.values()):
        raise UserError(f"{metrics} has no losses of training steps: name the metrics.jsonl that a run has written")
    for kind in ("train", "eval"):
        for step, row in by_kind[kind].items():
            if not isinstance(row.get("loss"), int | float | None):
                raise UserError(f"{metrics}: the loss of step {step} is {row['loss']!r}, and no number")
    starts, state = _starts(metrics.parent / "run.json"), _state(metrics.parent)
    is_complete = not starts or any(row.get("kind") == "summary" for row in rows)
    return Run(metrics, train, by_kind["eval"], by_kind["ranks"], starts, state, is_complete)


def _require_of_one_run(metrics: Path, row: Row, before: Row) -> None:
    """Raise UserError for a row that a run does not write, and where the one `before` is of that step too."""
    where = f"{metrics}: the {row['kind']} row of step {row['step']}"
    if row["step"] < 0 or any(isinstance(value, int) and abs(value) > MOST for value in row.values()):
        raise UserError(f"{where} has a number that no run writes: name a metrics.jsonl that a run has written")
    if row["step"] == before["step"] and row.get("loss") != before.get("loss"):
        raise UserError(f"{where} is there twice, with losses {before['loss']} and {row['loss']}: is it of two runs?")


def _starts(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        refuse_stand_in(path, str(path))
        starts = json.loads(path.read_text(encoding="utf-8-sig"))["starts"]
        for start in starts:
            assert type(start["first_step"]) is type(start["layout"]["world_size"]) is int
            assert isinstance(start["layout"]["source"], str) and "commit" in start
            assert all(isinstance(start[name], dict) for name in ("versions", "facts", "flags"))
            assert start["shares"] and all(type(share) is int for share in start["shares"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        raise UserError(f"{path} is not what a run writes: correct it, or remove it to compare without it") from None
    return starts


def _state(folder: Path) -> dict[str, Any]:
    states = sorted(folder.glob("checkpoints/*/state.json"))  # `latest` first, the newest step last
    with contextlib.suppress(IndexError, OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(states[-1].read_text()))
    return {}
