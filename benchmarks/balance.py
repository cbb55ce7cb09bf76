#!/usr/bin/env python3
"""What `--balance auto` wins where ranks differ in speed: steps per second against equal shares, beside the ceiling.

    balance.py [--repeat 3] [--only two,four,four-large,equal,changes,settle] [--data-dir data]

Each rank is a node of its own, in a control group that gives it a fraction of a core. With equal shares the slowest
rank sets the pace; the ceiling is what shares by speed can win at most, sum(speeds) / (ranks x slowest speed). It
takes no note of the exchange of gradients, which takes as long whatever the shares: the last columns are what the
exchange took of a balanced step. The ways are run in turns, and steps count from step 20 on. `changes` swaps the speeds
in the middle of a run and shows how many steps the shares need to follow. `settle`: a rank whose processor is taken
away in slices, or shared with a neighbour that computes half of the time, and how often its share changes after step
30. Needs root, for the control groups.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cores import Cores, fractions
from benchmarks.data import require_mnist
from benchmarks.machine import describe
from common.launch.addresses import free_port

FIRST_STEP = 20
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

    def wait(self) -> None:
        if [code for code in [node.wait() for node in self.nodes] if code]:
            sys.exit(f"balance.py: a run has failed:\n{self.log.read_text()}")


def steps_per_second(rows: list[dict]) -> float:
    """From the first row at or after step 20 to the last."""
    first, last = next(row for row in rows if row["step"] >= FIRST_STEP), rows[-1]
    return _rate(first, last)


def _rate(first: dict, last: dict) -> float:
    return (last["step"] - first["step"]) / (last["training_seconds"] - first["training_seconds"])


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
        exchanges += [statistics.mean(row["communication_ms"]) for row in rows if row["step"] >= FIRST_STEP]
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
        while not (rows := job.rows()) or rows[-1]["step"] < 40:
            time.sleep(0.01)
            if any(node.poll() for node in job.nodes):
                break
        for one, speed in zip(cores, after, strict=True):
            one.set(speed)
        changed = job.rows()[-1]["step"]
        job.wait()
        rows, changes = job.rows(), job.rows("shares")
    batch, wanted = sum(rows[0]["shares"]), after[0] / sum(after)
    there = next(
        (row["step"] for row in changes if row["step"] > changed and abs(row["shares"][0] / batch - wanted) < 0.1), None
    )
    print(
        f"{trainer}: speeds {before} become {after} about step {changed}: shares {rows[-1]['shares']} at the end, "
        f"within a tenth of them at step {there}; "
        f"changes: {', '.join(str(row['step']) + ' ' + str(row['shares']) for row in changes)}",
        flush=True,
    )


def settle(trainer: str, name: str, batch: int, flags: list[str], repeat: int) -> None:
    """Print how a run goes on from step 30 on in which rank 1 is slow in this way."""
    speeds, period, has_neighbour = SETTLE[name]
    ceiling = sum(speeds) / (len(speeds) * min(speeds))
    found: dict[str, list[float]] = {"part": [], "reachable": [], "changes": [], "off": [], "exchange": []}
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    for _ in range(repeat):
        for way in rates:
            cores = (1.0, 1.0) if has_neighbour else speeds
            with fractions(cores, int(period * 1000)) as groups, tempfile.TemporaryDirectory() as folder:
                neighbour = subprocess.Popen(
                    ["taskset", "-c", "1", sys.executable, "-c", NEIGHBOUR] if has_neighbour else ["true"]
                )
                try:
                    more = [*flags, "--global-batch", str(batch), "--balance", way]
                    more += ["--max-steps", str(3 * SETTLED)] if way == "off" else []  # nothing changes
                    job = Job(trainer, groups, Path(folder) / "run", more, pinned=True)
                    job.wait()
                finally:
                    neighbour.kill()
                    neighbour.wait()
                rows, changes = job.rows(), job.rows("shares")
            first, last = next(row for row in rows if row["step"] >= SETTLED), rows[-1]
            rates[way].append(_rate(first, last))
        later = [row for row in changes if row["step"] > SETTLED]
        at_30 = [row["shares"] for row in changes if row["step"] <= SETTLED][-1:] or [rows[0]["shares"]]
        kept = statistics.mean(row["shares"][1] for row in rows if row["step"] > SETTLED)
        found["changes"].append(len(later))
        found["off"].append(abs(at_30[0][1] - kept) / kept)
        exchange = statistics.mean(row["communication_ms"][0] for row in rows if row["step"] >= SETTLED)
        found["exchange"].append(exchange * rates["auto"][-1] / 1000)
        found["part"].append(rates["auto"][-1] / rates["off"][-1] / ceiling)
        least = (1000 / rates["off"][-1] - exchange) / ceiling + exchange  # which no shares make shorter
        found["reachable"].append(least * rates["auto"][-1] / 1000)
    middle = {what: statistics.median(values) for what, values in found.items()}
    cells = [f"{1000 / statistics.median(rates['auto']):.0f} ms", f"{middle['part']:.2f}", f"{middle['exchange']:.0%}"]
    cells += [f"{middle['reachable']:.2f}", f"{middle['changes']:.0f}", f"{middle['off']:.0%}"]
    cells += [", ".join(f"{row['shares'][1]} from {row['step']}" for row in changes)]
    print("| " + " | ".join([trainer, name, f"{batch:,}", *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--only", default="two,four,four-large,equal,changes")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batches", default="", help="of --only settle, such as 256,512")
    args = parser.parse_args()
    require_mnist(args.data_dir)
    flags = {name: ["--max-steps", str(args.steps), "--log-every", "1"] for name in TRAINERS}
    flags["MNIST"] += ["--data-dir", str(args.data_dir.resolve())]
    flags["BERT"] += ["--cache-dir", str((ROOT / "cache").resolve())]
    only = args.only.split(",")
    if "settle" in only:
        print(
            "| trainer | rank 1 | global batch | step | part of the ceiling | exchange | part of the ceiling with it | "
            "changes after step 30 | off at 30 | shares of rank 1 in the last run |\n" + "| --- " * 10 + "|"
        )
        for trainer, batches in SETTLE_BATCHES.items():
            for batch in [int(one) for one in args.batches.split(",")] if args.batches else batches:
                for name in SETTLE if batch in batches else ():
                    settle(trainer, name, batch, flags[trainer], args.repeat)
        print(f"\nMedians of {args.repeat}. {describe()}")
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
