#!/usr/bin/env python3
"""What `--balance auto` wins where ranks differ in speed: steps per second against equal shares, beside the ceiling.

    balance.py [--repeat 3] [--only two,four,four-large,equal,changes,settle] [--data-dir data]

Each rank is a node of its own, in a control group that gives it a fraction of a core. With equal shares the slowest
rank sets the pace; the ceiling is what shares by speed can win at most, sum(speeds) / (ranks x slowest speed). It
takes no note of the exchange of gradients, which takes as long whatever the shares: the last columns are what the
exchange took of a balanced step. The ways are run in turns, and steps count from step 20 on. `changes` swaps the speeds
in the middle of a run and shows how many steps the shares need to follow. `settle`: a rank whose processor is taken
away in slices, or shared with a neighbour that computes half of the time, and how often its share changes after step
30; with --fixed, beside four fixed shares. Needs root, for the control groups.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cores import Cores, fractions
from benchmarks.data import require_mnist
from benchmarks.machine import describe
from benchmarks.processes import ended
from common.launch.addresses import free_port

FIRST_STEP = 20
CHANGE_STEP = 40  # at which `changes` swaps the speeds
TRAINERS = {
    "MNIST": ["mnist_ddp/mnist-distributed.py"],
    "BERT": [
        *("bert_ddp/bert-distributed.py", "--preset", "tiny", "--dropout", "0", "--vocab-size", "2000"),
        *("--sequence-length", "64"),
    ],
}
FOUR = (0.5, 0.5, 0.5, 0.2)  # a fraction below 0.2 is less than the kernel's shortest quota
SPEEDS = {"two": (1.0, 0.25), "four": FOUR, "four-large": FOUR, "equal": (0.95, 0.95)}
# The exchange takes processor time on the slow rank too, whatever its samples: the more samples, the less of a step.
LARGE = {
    "MNIST": (15_000, ["--micro-batch", "1000", "--epochs", "50"]),
    "BERT": (1536, ["--micro-batch", "128"]),
}
# name -> speeds, the period in which a fraction of a core comes in one piece, in ms, and whether a neighbour computes
SETTLE: dict[str, tuple[tuple[float, float], float, bool]] = {
    "slices of 10 ms": ((1.0, 0.25), 10, False),
    "slices of 50 ms": ((1.0, 0.25), 50, False),
    "slices of 100 ms": ((1.0, 0.25), 100, False),
    "a neighbour": ((1.0, 0.75), 100, True),
    "slower by nature": ((1.0, 0.25), 5, False),
}
SETTLED = 30  # steps
FIXED = (1.0, 0.75, 0.5, 0.25)  # of the share of rank 1 by speed, for --fixed
SETTLE_BATCHES = {"MNIST": (256, 512, 1024), "BERT": (64, 128)}
NEIGHBOUR = """
import random, time
while True:
    end = time.perf_counter() + random.uniform(0.05, 0.15)
    while time.perf_counter() < end:
        pass
    time.sleep(random.uniform(0.05, 0.15))
"""
BATCH = {"MNIST": 1024, "BERT": 128}  # elsewhere


class Job:
    """A run with one rank in each control group."""

    def __init__(self, trainer: str, cores: list[Cores], folder: Path, flags: list[str], pinned: bool = False):
        self.folder, port, count = folder, str(free_port()), len(cores)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        layout = ["-n", str(count), "-g", ",".join("1" * count), "--master-addr", "127.0.0.1", "--master-port", port]
        command = [sys.executable, *TRAINERS[trainer], *layout, *flags, "--device", "cpu", "--out-dir", str(folder)]
        self.log = folder / "nodes.log"
        folder.mkdir()
        with self.log.open("w") as log:
            self.nodes = [
                subprocess.Popen(
                    ["taskset", "-c", str(number), *command, "-i", str(number)]
                    if pinned
                    else [*command, "-i", str(number)],
                    cwd=ROOT,
                    env=environ,
                    stdout=log,
                    stderr=log,
                    preexec_fn=one.enter,
                )
                for number, one in enumerate(cores)
            ]

    def rows(self, kind: str = "ranks") -> list[dict]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def step(self) -> int:
        """That of the last line: to read all of them again and again would take a part of a rank's processor."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().rsplit("\n", 2) if file.exists() else [""]
        return json.loads(lines[-2])["step"] if len(lines) > 1 else 0

    def wait_for(self, step: int) -> bool:
        """Wait until it has done so many steps, or for 0, until it is about to begin. False if it ends before."""
        while not (self.step() >= step and (self.folder / "run.json").exists()):
            if any(node.poll() is not None for node in self.nodes):
                return False
            time.sleep(0.05)
        return True

    def wait(self) -> None:
        with ended(self.nodes):
            codes = [node.wait() for node in self.nodes]
        if any(codes):
            sys.exit(f"balance.py: a run has failed:\n{self.log.read_text()}")


def steps_per_second(rows: list[dict]) -> float:
    """From the first row at or after step 20 to the last."""
    first, last = next(row for row in rows if row["step"] >= FIRST_STEP), rows[-1]
    return _rate(first, last)


def _mean(rows: list[dict], value: Callable[[dict], float]) -> float:
    """Over the steps of all rows but the first: a row is of the steps since the one before it."""
    pairs = list(pairwise(rows))
    return sum((row["step"] - before["step"]) * value(row) for before, row in pairs) / (
        rows[-1]["step"] - rows[0]["step"]
    )


def _rate(first: dict, last: dict) -> float:
    return (last["step"] - first["step"]) / (last["training_seconds"] - first["training_seconds"])


def _seconds(rows: list[dict]) -> float:
    """Of a step, from the first row to the last."""
    return 1 / _rate(rows[0], rows[-1])


def measure(trainer: str, speeds: tuple[float, ...], flags: list[str]) -> tuple[float, list[dict]]:
    """(steps per second, rows) of one run."""
    with fractions(speeds) as cores, tempfile.TemporaryDirectory() as folder:
        job = Job(trainer, cores, Path(folder) / "run", flags)
        job.wait()
        rows = job.rows()
    return steps_per_second(rows), rows


def compare(trainer: str, name: str, flags: list[str], repeat: int) -> None:
    """Print a row of the table."""
    speeds, found, exchanges = SPEEDS[name], {"off": [], "auto": []}, []
    batch, more = LARGE[trainer] if name == "four-large" else (BATCH[trainer], [])
    for _ in range(repeat):
        for way in found:
            rate, rows = measure(trainer, speeds, [*flags, *more, "--global-batch", str(batch), "--balance", way])
            found[way].append(rate)
        settled = [row for row in rows if row["step"] >= FIRST_STEP]
        exchanges.append(_mean(settled, lambda row: statistics.mean(row["communication_ms"])))
    equal, auto = (statistics.median(rates) for rates in found.values())
    ratio = statistics.median(b / a for a, b in zip(*found.values(), strict=True))
    ceiling = sum(speeds) / (len(speeds) * min(speeds))
    rates = [f"{one:.2f}" for one in (equal, auto, ratio, ceiling, ratio / ceiling)]
    times = [f"{statistics.median(exchanges):.0f}", f"{1000 / auto:.0f}"]
    shares = " ".join(map(str, rows[-1]["shares"]))
    print(
        "| " + " | ".join([trainer, " ".join(map(str, speeds)), f"{batch:,}", *rates, *times, shares]) + " |",
        flush=True,
    )


def follow(trainer: str, flags: list[str], before: tuple[float, float], after: tuple[float, float]) -> None:
    """Change the speeds in the middle of a run, and print when the shares have followed."""
    flags = [*flags, "--global-batch", str(BATCH[trainer]), "--balance", "auto"]
    with fractions(before) as cores, tempfile.TemporaryDirectory() as folder:
        job = Job(trainer, cores, Path(folder) / "run", flags)
        with ended(job.nodes):
            if not job.wait_for(CHANGE_STEP):
                job.wait()
                sys.exit(f"balance.py: --steps must be more than {CHANGE_STEP} for --only changes")
            for one, speed in zip(cores, after, strict=True):
                one.set(speed)
            changed = job.step()
            job.wait()
        rows, changes = job.rows(), job.rows("shares")
    batch, wanted = sum(rows[0]["shares"]), after[0] / sum(after)
    there = next(
        (row["step"] for row in changes if row["step"] > changed and abs(row["shares"][0] / batch / wanted - 1) < 0.1),
        None,
    )
    print(
        f"{trainer}: speeds {before} become {after} about step {changed}: shares {rows[-1]['shares']} at the end, "
        f"within a tenth of {wanted * batch:.0f} at step {there}; "
        f"changes: {', '.join(str(row['step']) + ' ' + str(row['shares']) for row in changes)}",
        flush=True,
    )


def settle(trainer: str, name: str, batch: int, flags: list[str], steps: int, fixed: bool) -> dict[str, Any]:
    """How a run goes on from step 30 on in which rank 1 is slow in this way, beside one with equal shares. `fixed`: and
    beside some with shares that stay."""
    speeds, period, has_neighbour = SETTLE[name]

    def rows(last: int, *way: str) -> tuple[list[dict], list[dict]]:
        """The rows from step 30 on of a run of so many steps, and its changes of shares."""
        with fractions((1.0, 1.0), int(period * 1000)) as groups, tempfile.TemporaryDirectory() as folder:
            computing = ["taskset", "-c", "1", sys.executable, "-c", NEIGHBOUR] if has_neighbour else ["true"]
            with ended([subprocess.Popen(computing)]):
                more = ["--global-batch", str(batch), "--max-steps", str(last), "--no-plot", *way]
                job = Job(trainer, groups, Path(folder) / "run", [*flags, *more], pinned=True)
                with ended(job.nodes):
                    # To start, and to evaluate in the end, would take longer than the steps.
                    job.wait_for(0)
                    if not has_neighbour:
                        groups[1].set(speeds[1])
                    job.wait_for(last)
                    groups[1].set(1.0)
                    job.wait()
            return [row for row in job.rows() if row["step"] >= SETTLED], job.rows("shares")

    # Where nothing changes, it needs no more steps than take some seconds.
    short = min(steps, SETTLED + SETTLED * (max(SETTLE_BATCHES[trainer]) // batch))
    ceiling, equal = sum(speeds) / (len(speeds) * min(speeds)), _seconds(rows(short, "--balance", "off")[0])
    settled, changes = rows(steps, "--balance", "auto")
    seconds = _seconds(settled)
    shares = {1: batch // 2} | {row["step"]: row["shares"][1] for row in changes}
    of_step = [shares[max(change for change in shares if change <= step)] for step in range(1, steps + 1)]
    at_30, kept = of_step[SETTLED - 1], statistics.mean(of_step[SETTLED:])
    exchange = _mean(settled, lambda row: row["communication_ms"][0]) / 1000
    found = {
        "seconds": seconds,
        "part": equal / ceiling / seconds,
        "exchange": exchange / seconds,
        "with it": ((equal - exchange) / ceiling + exchange) / seconds,
        "changes": sum(row["step"] > SETTLED for row in changes),
        "off": abs(at_30 - kept) / kept,
        "shares": {row["step"]: row["shares"][1] for row in changes},
    }
    if fixed:
        of_rank_1 = [int(part * batch * speeds[1] / sum(speeds)) for part in FIXED]
        found["fixed"] = {  # their parts of the ceiling
            str(one): equal / ceiling / _seconds(rows(short, "--shares", f"{batch - one},{one}")[0])
            for one in of_rank_1
        }
    return found


def show_settled(found: dict[tuple[str, str, int], list[dict[str, Any]]]) -> None:
    """Print a table of medians. Shares are those of the turn whose part of the ceiling is the median."""
    names = "trainer", "rank 1", "global batch", "turns", "step", "part of the ceiling", "exchange", "with it"
    names += "changes after step 30", "off at 30", "shares of rank 1"
    if has_fixed := all("fixed" in one for turns in found.values() for one in turns):
        names += ("parts of the ceiling with fixed shares of rank 1",)
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|")
    for (trainer, name, batch), turns in found.items():
        numbers = {what for one in turns for what, value in one.items() if not isinstance(value, dict)}
        middle = {what: statistics.median(one[what] for one in turns) for what in numbers}
        parts = [one["part"] for one in turns]
        spread = f"{middle['part']:.2f} ({min(parts):.2f} to {max(parts):.2f})"
        typical = min(turns, key=lambda one: abs(one["part"] - middle["part"]))
        cells = [
            f"{batch:,}",
            str(len(turns)),
            f"{1000 * middle['seconds']:.0f} ms",
            spread,
            f"{middle['exchange']:.0%}",
        ]
        cells += [f"{middle['with it']:.2f}", f"{middle['changes']:.0f}", f"{middle['off']:.0%}"]
        cells += [", ".join(f"{share} from {step}" for step, share in typical["shares"].items())]
        if has_fixed:
            medians = {share: statistics.median(one["fixed"][share] for one in turns) for share in turns[0]["fixed"]}
            cells += [", ".join(f"{part:.2f} with {share}" for share, part in medians.items())]
        print("| " + " | ".join([trainer, name, *cells]) + " |", flush=True)


def settle_all(
    flags: dict[str, list[str]], cases: list[str], steps: int, repeat: int, only: str, fixed: bool, file: Path | None
) -> None:
    """Measure these cases in turns, and print the table, also of what `file` has from before."""
    found = dict[tuple[str, str, int], list[dict[str, Any]]]()
    for line in file.read_text().splitlines() if file and file.exists() else []:
        *case, one = json.loads(line)
        found.setdefault(tuple(case), []).append(one)
    wanted = {int(batch) for batch in only.split(",")} if only else set()
    for _ in range(repeat):
        for trainer, batches in SETTLE_BATCHES.items():
            for batch in batches:
                for name in cases if not wanted or batch in wanted else ():
                    one = settle(trainer, name, batch, flags[trainer], steps, fixed)
                    found.setdefault((trainer, name, batch), []).append(one)
                    if file:
                        with file.open("a") as lines:
                            lines.write(json.dumps([trainer, name, batch, one]) + "\n")
    show_settled(found)
    print(f"\n{describe()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--only", default="two,four,four-large,equal,changes")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batches", default="", help="of --only settle, such as 256,512")
    parser.add_argument("--cases", default=",".join(SETTLE), help="of --only settle")
    parser.add_argument("--fixed", action="store_true", help="of --only settle: also some fixed shares")
    parser.add_argument("--file", type=Path, help="of --only settle: its turns, to which others are added later")
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - set(SETTLE):
        parser.error(f"--cases: {', '.join(sorted(unknown))}: must be of {', '.join(SETTLE)}")
    require_mnist(args.data_dir)
    flags = {name: ["--max-steps", str(args.steps), "--log-every", "1"] for name in TRAINERS}
    flags["MNIST"] += ["--data-dir", str(args.data_dir.resolve())]
    flags["BERT"] += ["--cache-dir", str((ROOT / "cache").resolve())]
    only = args.only.split(",")
    if "settle" in only:
        settle_all(flags, args.cases.split(","), args.steps, args.repeat, args.batches, args.fixed, args.file)
        only.remove("settle")
        if not only:
            return
    names = "trainer", "speeds", "global batch", "equal: steps/s", "auto: steps/s", "ratio", "ceiling", "part of it"
    names += "exchange: ms", "of a step of", "shares at the end"
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|")
    for name in (name for name in SPEEDS if name in only):
        for trainer in TRAINERS:
            compare(trainer, name, flags[trainer], args.repeat)
    if "changes" in only:
        print()
        for trainer in TRAINERS:
            follow(trainer, flags[trainer], (1.0, 0.25), (0.25, 1.0))
            follow(trainer, flags[trainer], (0.25, 0.9), (0.9, 0.9))  # whole cores may differ: this program needs some
    print(f"\nMedian of {args.repeat}. {describe()}")


if __name__ == "__main__":
    main()
