"""Figures for a prediction: typed by hand, or those of a run and of the doctor."""

import argparse
import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from common.errors import UserError
from common.files import refuse_stand_in
from common.launch import values
from common.launch.values import UNITS
from common.predict.step import Link
from common.record.latest import WEIGHTS, latest_folder
from common.record.metrics import read_metrics

FIRST_STEP = 20  # of a run that counts
MOST = 1e18  # of a time, a rate or a size in any unit
# what a file that is no run's, or no doctor's, raises while its figures are looked up
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def size(text: str) -> float:
    """Bytes: 440MB."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)B", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give bytes, such as 440MB")
    return float(found[1]) * UNITS[found[2]]


def link(text: str) -> Link:
    """A rate each way, and the latency one way: 1Gbit,0.2ms."""
    return Link(*values.link(text))


def of_run(folder: Path) -> dict[str, Any]:
    """What a run tells: processes of each node, each rank's speed and loading, the gradients' bytes, the batch.

    The optimizer's step counts as a part of the samples' time. Raises UserError for a run that cannot tell.
    """
    try:
        start = json.loads((folder / "run.json").read_text(encoding="utf-8-sig"))["starts"][-1]
        rows = read_metrics(folder / "metrics.jsonl")
        gradients = (latest_folder(folder / "checkpoints") / WEIGHTS).stat().st_size
        rows = [row for row in rows if row.get("kind") == "ranks" and row["step"] >= FIRST_STEP]
        if not rows or not all(all(row["shares"]) for row in rows):
            problem = f"has not trained for {FIRST_STEP} steps, or has ranks without samples"
            raise UserError(f"--run {folder} {problem}: name another run")
        pairs = (zip(row["shares"], row["compute_ms"], strict=True) for row in rows)
        by_rank = zip(*([_measured(share / ms * 1e3) for share, ms in row] for row in pairs), strict=True)
        gpus = start["flags"].get("gpus")
        gpus = gpus or [len(list(some)) for _, some in groupby(one["host"] for one in start["ranks"])]
        return {
            "gpus": _ranks_of_nodes(gpus),
            "speed": tuple(median(speeds) for speeds in by_rank),
            "fixed_ms": tuple(
                median(map(_measured, ms)) for ms in zip(*(row["loading_ms"] for row in rows), strict=True)
            ),
            "gradients": float(gradients),
            "global_batch": int(_measured(sum(rows[-1]["shares"]))),
        }
    except BROKEN as error:
        raise UserError(f"--run {folder}: {_reason(error)}: name the --out-dir of a run that has ended") from None


def of_doctor(file: Path) -> dict[str, Any]:
    """What the doctor has measured: the processes of each node, the slowest link between two nodes, and the all-reduces
    of all ranks. Raises UserError."""
    try:
        refuse_stand_in(file, f"--doctor {file}")
        report = json.loads(file.read_text(encoding="utf-8-sig"))
        gpus, measured = report["layout"]["gpus_per_node"], all_reduces_of(report["all_reduce"])
        sizes = _ranks_of_nodes(gpus) if gpus else None
        return {"gpus": sizes, "link": slowest_link(report["links"]), "measured": measured}
    except BROKEN as error:
        fix = "give what `python -m common.doctor --json` has printed"
        raise UserError(f"--doctor {file}: {_reason(error)}: {fix}") from None


def _measured(value: float) -> float:
    """The value itself. Raises ValueError for a time or a rate that cannot be."""
    if not 0 <= value < MOST:
        raise ValueError(f"it says that {value} was measured")
    return value


def _ranks_of_nodes(gpus: Sequence[Any]) -> tuple[int, ...]:
    """The processes of each node. Raises ValueError where they are no whole numbers of 1 or more."""
    if isinstance(gpus, str) or not all(type(one) is int and one >= 1 for one in gpus) or sum(gpus) > values.MOST_RANKS:
        raise ValueError(f"it says that the nodes have {gpus} processes")
    return tuple(gpus)


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def slowest_link(links: Sequence[dict[str, Any]]) -> Link | None:
    """Of the doctor's links between nodes, or None where there is none."""
    measured = [one for one in links if one.get("mbit_per_second")]
    if not measured:
        return None
    rate = min(_measured(one["mbit_per_second"]) for one in measured) * 1e6 / 8
    return Link(rate, max(_measured(one["latency_ms"]) for one in measured) / 1e3)


def all_reduces_of(rows: Sequence[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds) of each of the doctor's all-reduces that took place."""
    found = {_measured(float(row["bytes"])): _measured(row["ms"]) / 1e3 for row in rows if row["ms"] is not None}
    return tuple(sorted(found.items()))
