#!/usr/bin/env python3
"""The labs of docs/labs.md, as a reader would do them: what `predict` expects, and what the run says.

    labs.py [--only slow,link,killed] [--write docs/labs.md] [--turns 3]

Runs the commands that the chapter gives, for the median of several turns, and writes the tables and pictures of the
chapter. About eight minutes; on a machine with fewer than two free cores the ranks slow one another down.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from benchmarks.faults import put_table
from benchmarks.machine import describe
from common.join.waiting import poll
from common.record.metrics import read_metrics

PLAY = ROOT / "launch_scripts" / "play_nodes.py"
LAYOUT = ["-n", "2", "-g", "1,1", "--device", "cpu"]
TRAIN = ["bert_ddp/bert-distributed.py", *LAYOUT, "--preset", "tiny", "--dropout", "0", "--vocab-size", "2000"]
TRAIN += ["--sequence-length", "64", "--global-batch", "64", "--epochs", "10", "--max-steps", "100", "--trace", "12"]
NEAR = "80Gbit,0.03ms"  # between two processes of this machine
FIRST_STEP = 50  # that counts: --balance auto has found its shares
WAYS = {
    "equal shares": [],
    "--balance auto": ["--balance", "auto", "--trace", "50"],
    "--compress bf16": ["--compress", "bf16"],
}
WAYS["--sync-every 50"] = ["--sync-every", "50", "--max-steps", "300"]  # the last step of all exchanges, too
SECONDS = 300.0


def run(folder: Path, played: list[str], flags: list[str]) -> float:
    """Train on two played nodes. Returns the milliseconds of a step."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, PLAY, *played, *TRAIN, *flags, "--out-dir", folder]
    subprocess.run(command, cwd=ROOT, env=environ(), check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
    return step_ms(folder, FIRST_STEP)


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def step_ms(folder: Path, first: int, last: int = 10**9) -> float:
    """The mean time of the steps from `first` to `last`, in milliseconds, without evaluations and checkpoints."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "ranks"]
    rows = [row for row in rows if first <= row["step"] <= last]
    seconds = rows[-1]["training_seconds"] - rows[0]["training_seconds"]
    return seconds / (rows[-1]["step"] - rows[0]["step"]) * 1e3


def ask(folder: Path, *flags: str) -> str:
    """What `predict` prints about the machines of a run."""
    command = [sys.executable, "-m", "common.predict", "--run", folder, *flags]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def predicted(folder: Path, *flags: str) -> dict[str, float]:
    """What it expects of each way to train, in milliseconds."""
    lines = re.findall(r"^(.{43})([\d.]+) ms", ask(folder, *flags), re.MULTILINE)
    return {way.strip(): float(ms) for way, ms in lines}


def examined(file: Path, link: list[str]) -> Path:
    """What the doctor measures of two nodes on this link."""
    command = [sys.executable, PLAY, *link, "-m", "common.doctor", *LAYOUT, "--json", "--min-rate", "1"]
    said = subprocess.run(command, cwd=ROOT, env=environ(), check=True, capture_output=True, text=True).stdout
    file.write_text(next(line.removeprefix("node 0 | ") for line in said.splitlines() if line.startswith("node 0 | {")))
    return file


def table(rows: list[tuple[str, float, float]]) -> list[str]:
    lines = [describe(), "", "| | predicted | measured | off by |", "| --- | --- | --- | --- |"]
    for what, expected, found in rows:
        lines.append(f"| {what} | {expected:.1f} ms | {found:.1f} ms | {expected / found - 1:+.0%} |")
    return lines


def compare(played: list[str], expected: dict[str, float], pictures: dict[str, str], turns: int) -> list[str]:
    """A row for each way of `pictures`, which gives the name of the picture of its trace in docs/, or an empty one."""
    found: dict[str, list[float]] = {way: [] for way in pictures}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(turns):
            for way, picture in pictures.items():
                found[way].append(run(Path(place) / "run", played, WAYS[way]))
                if picture and not turn:
                    shutil.copy(Path(place) / "run" / "trace.png", ROOT / "docs" / picture)
    return table([(way, expected[way], statistics.median(times)) for way, times in found.items()])


def killed(even: Path, turns: int) -> list[str]:
    """Two nodes with a rank each, one of which is killed: the other one does all of the work."""
    before, after = [], []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            command = [sys.executable, PLAY, *TRAIN, "--elastic", "1", "--out-dir", folder]
            played = subprocess.Popen(command, cwd=ROOT, env=environ(), stdout=subprocess.DEVNULL)
            poll(partial(has_done, folder, 50), SECONDS)
            for one in psutil.Process(played.pid).children(recursive=True):
                if "(node 1)" in " ".join(one.cmdline()):
                    one.send_signal(signal.SIGKILL)
            played.wait(SECONDS)
            lost = next(row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "members")
            before.append(step_ms(folder, 10, lost))
            after.append(step_ms(folder, lost + 1))
            shutil.copy(folder / "curves.png", ROOT / "docs" / "lab-killed.png")
    speed = ask(even, "--link", NEAR).split()[1].rstrip(",").replace(",", "")  # of rank 0
    two = predicted(even, "--link", NEAR)["equal shares"]
    one = predicted(even, "-g", "1", "--speed", speed, "--fixed-ms", "0.01")["equal shares"]
    rows = [("two ranks", two, statistics.median(before)), ("one is left", one, statistics.median(after))]
    return table(rows)


def has_done(folder: Path, steps: int) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and any(row.get("step", 0) >= steps for row in read_metrics(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="slow,link,killed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", type=Path, help="put the tables into this file, between its markers")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as place:
        even = Path(place) / "even"
        print(f"two ranks, nothing in the way: {run(even, [], []):.1f} ms a step", flush=True)
        shutil.copy(even / "trace.png", ROOT / "docs" / "lab-even.png")
        if "slow" in args.only:
            slow = ["--slow", "1=0.25"]
            pictures = {"equal shares": "lab-slow.png", "--balance auto": "lab-balanced.png"}
            found["slow"] = compare(slow, predicted(even, "--link", NEAR, *slow), pictures, args.turns)
        if "link" in args.only:
            link = ["--link", "100Mbit,20ms"]
            expected = predicted(even, "--doctor", examined(Path(place) / "doctor.json", link))
            pictures = {"equal shares": "lab-link.png", "--compress bf16": "", "--sync-every 50": ""}
            found["link"] = compare(link, expected, pictures, args.turns)
        if "killed" in args.only:
            found["killed"] = killed(even, args.turns)
    for name, lines in found.items():
        print(name, *lines, sep="\n", flush=True)
        if args.write:
            put_table(args.write, f"lab {name}", lines)


if __name__ == "__main__":
    main()
