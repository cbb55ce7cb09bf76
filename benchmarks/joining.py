#!/usr/bin/env python3
"""How long a machine takes to join a run and to leave it, and how long the others stand still meanwhile.

    joining.py [--turns 5]

A run of one process on this machine, with --elastic, in whose trainer rank 0 notes the time after each step. In each
turn another process joins (--join), and leaves some steps later, as at Ctrl-C. Prints medians and ranges, in seconds:

    start        from typing --join until the newcomer has loaded its data and built its model, and waits
    joined       from then until the first common step is done; the leader waits a second for others that come too
    still (in)   the longest time between two steps around that, less the median step: the others stand still
    left         from Ctrl-C until the last process of that machine has ended
    still (out)  as above, around that
"""

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from benchmarks.played import LIMIT_SECONDS, PlayedRun

FLAGS = ["--device", "cpu", "--dataset", "digits", "--global-batch", 256, "--epochs", 100_000, "--no-plot"]
STEP_ENDS = "            run.end_step()\n"
NOTES_TIME = """            if worker.is_main:
                with open({file!r}, "a") as times:
                    print(__import__("time").monotonic(), worker.world_size, file=times)
"""
SETTLE_SECONDS = 4.0  # of steps before and after each change


def trainer(folder: Path) -> Path:
    """A copy of MNIST's trainer that notes the time after each step. Returns its script."""
    place = folder / "timed_ddp"
    place.mkdir()
    for name in ("mnist-distributed.py", "train.py"):
        text = (ROOT / "mnist_ddp" / name).read_text().replace("mnist_ddp.train", "timed_ddp.train")
        notes = NOTES_TIME.format(file=str(folder / "times"))
        (place / name).write_text(text.replace(STEP_ENDS, STEP_ENDS + notes))
    return place / "mnist-distributed.py"


class Timed(PlayedRun):
    def times(self) -> list[tuple[float, int]]:
        """(when, ranks) of each step."""
        rows = (self.script.parents[1] / "times").read_text().splitlines()
        return [(float(when), int(ranks)) for when, ranks in map(str.split, rows)]

    def wait_for_ranks(self, ranks: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.times()[-1][1] != ranks:
            if time.monotonic() > deadline:
                raise SystemExit(self.said())
            time.sleep(0.05)

    def still(self, since: float) -> float:
        """The longest time between two steps since then, less the median one."""
        moments = [when for when, _ in self.times() if when > since]
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        return max(gaps) - statistics.median(gaps)


def turn(run: Timed) -> dict[str, float]:
    began, lines = time.monotonic(), len(run.lines)
    node = run.join(1)
    run.wait_for_ranks(2)
    waits = next(when for when, line in run.lines[lines:] if "waiting to be let in" in line)
    joined = next(when for when, ranks in run.times() if when > began and ranks == 2)
    time.sleep(SETTLE_SECONDS)
    found = {"start": waits - began, "joined": joined - waits, "still (in)": run.still(waits - 1)}
    asked = time.monotonic()
    run.nodes[node].send_signal(signal.SIGINT)
    if run.nodes[node].wait(LIMIT_SECONDS):
        raise SystemExit(run.said())
    found["left"] = time.monotonic() - asked
    run.wait_for_ranks(1)
    time.sleep(SETTLE_SECONDS)
    return found | {"still (out)": run.still(asked)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as place:
        run = Timed(trainer(Path(place)), (1,), Path(place) / "run", "--elastic", 1, *FLAGS)
        try:
            run.wait_for_step(50)
            found = [turn(run) for _ in range(turns)]
            step = statistics.median(later[0] - earlier[0] for earlier, later in itertools.pairwise(run.times()))
        finally:
            run.end()
    print(f"{describe()}; a step takes {1e3 * step:.1f} ms")
    for name in found[0]:
        values = sorted(one[name] for one in found)
        print(f"{name:12} {statistics.median(values):6.2f}   {values[0]:.2f} to {values[-1]:.2f}")


if __name__ == "__main__":
    main()
