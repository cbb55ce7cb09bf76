#!/usr/bin/env python3
"""How good is `python -m common.predict`? Its step times beside those measured, and its advice beside the fastest.

    predicted.py [--only 3+1,slow] [--links "no limit,100 Mbit"] [--cache-dir cache]

Nodes are processes on two network namespaces of this machine, in control groups that give each rank a fraction of a
core. For each link, `python -m common.doctor --json` measures it, and runs measure the step time of each way to train.
Before and after these, the ranks train alone, all at once, with two batch sizes: that gives each rank's speed, and what
a step takes besides. The step times are predicted from the mean of both; `drift` is the largest difference between the
speeds before and after, which no prediction can know. Needs root and iproute2.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cores import Cores, fractions
from benchmarks.machine import describe
from benchmarks.processes import ended
from benchmarks.slow_links import ADDRESSES, HOSTS, MODEL, TRAINER, hosts
from common.launch.addresses import free_port
from common.predict import figures
from common.predict.step import Cluster, Link, Way, predict, ways

GRADIENTS = 4.0 * 737_360  # bytes, of that model
LAYOUTS = {  # processes of each node, cores of each process
    "1": ((1,), (0.4,)),
    "2": ((2,), (0.4,)),
    "3+1": ((3, 1), (0.4, 0.4)),
    "2+1+1": ((2, 1, 1), (0.4, 0.4, 0.4)),
    "slow": ((1, 1), (0.9, 0.3)),
}
LINKS = {"no limit": {}, "1 Gbit": {"rate": "1gbit"}, "100 Mbit": {"rate": "100mbit"}, "20 ms": {"delay_ms": 20}}
GLOBAL_BATCH = 64
FLAGS = [*MODEL, "--device", "cpu", "--log-every", "1", "--precision", "fp32"]
INSIDE = Link(1e9, 3e-5)  # within a node: loopback


class Nodes:
    """Starts a program on every node of a layout."""

    def __init__(self, gpus: tuple[int, ...], cores: list[Cores], interface: str | None):
        self.gpus, self.cores, self.interface = gpus, cores, interface

    def run(self, program: list[str], folder: Path) -> list[str]:
        """What each node prints on standard output. Ends the benchmark where one fails."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        address = ADDRESSES[self.interface] if self.interface else "127.0.0.1"
        layout = ["-n", str(len(self.gpus)), "-g", ",".join(map(str, self.gpus)), "--device", "cpu"]
        layout += ["--master-addr", address, "--master-port", str(free_port())]
        started, log = [], (folder / "nodes.log").open("w")
        for number, group in enumerate(self.cores):
            own = [sys.executable, *program, *layout, "-i", str(number)]
            if self.interface:
                host, name = ("nodea", self.interface) if not number else ("nodeb", self.interface.replace("va", "vb"))
                own = [str(HOSTS), "on", host, *own, "--interface", name]
            started.append(
                subprocess.Popen(
                    own, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=group.enter
                )
            )
        with ended(started):
            printed = [one.communicate()[0] for one in started]
        if any(one.returncode for one in started):
            sys.exit(f"predicted.py: a run has failed:\n{printed}\n{(folder / 'nodes.log').read_text()}")
        return printed


def step_seconds(folder: Path, first: int, last: int) -> float:
    """The mean time of a step, from step `first` to step `last` of the run in `folder`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    times = {row["step"]: row["training_seconds"] for row in map(json.loads, lines) if row["kind"] == "ranks"}
    first, last = (min(times, key=lambda step: abs(step - wanted)) for wanted in (first, last))
    return (times[last] - times[first]) / (last - first)


Calibration = tuple[list[float], list[float]]  # samples a second, and seconds besides, of each rank


def calibrate(gpus: tuple[int, ...], speeds: tuple[float, ...], corpus: list[str]) -> Calibration:
    """(samples a second, seconds besides) of each rank, from runs of one process each, all at the same time."""
    each = [speed for count, speed in zip(gpus, speeds, strict=True) for _ in range(count)]
    share, found = GLOBAL_BATCH // len(each), []
    for batch in (share // 2, share * 3 // 2):
        with fractions(each) as cores, tempfile.TemporaryDirectory() as parent:
            folders = [Path(parent) / str(rank) for rank in range(len(each))]
            flags = [*FLAGS, *corpus, "--max-steps", "70", "--global-batch", str(batch), "-g", "1"]
            runs = [
                subprocess.Popen(
                    [sys.executable, TRAINER, *flags, "--out-dir", folder],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                    stdout=subprocess.DEVNULL,
                    preexec_fn=group.enter,
                )
                for folder, group in zip(folders, cores, strict=True)
            ]
            with ended(runs):
                codes = [run.wait() for run in runs]
            if any(codes):
                sys.exit("predicted.py: a run of one process has failed")
            found.append([step_seconds(folder, 20, 70) for folder in folders])
    few, many = found
    rates = [share / (b - a) for a, b in zip(few, many, strict=True)]  # the batches differ by one share
    return rates, [max(0.0, a - share // 2 / rate) for a, rate in zip(few, rates, strict=True)]


def measure(nodes: Nodes, way: Way, corpus: list[str]) -> float:
    """Seconds of a step."""
    steps = {"last": 100, "first": 50 if way.balanced else 20}
    if way.sync_every:  # the last step of all exchanges, too
        steps = {"last": 300, "first": 50}
    flags = way.flags.split() if way != Way() else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = [str(TRAINER), *FLAGS, *corpus, *flags, "--global-batch", str(GLOBAL_BATCH)]
        nodes.run([*program, "--max-steps", str(steps["last"]), "--out-dir", str(folder / "run")], folder)
        return step_seconds(folder / "run", steps["first"], steps["last"])


def examine(nodes: Nodes) -> dict:
    with tempfile.TemporaryDirectory() as name:
        printed = nodes.run(["-m", "common.doctor", "--json", "--min-rate", "1"], Path(name))
    return json.loads(printed[0])


def mean(before: Calibration, after: Calibration) -> Calibration:
    pairs = zip(before, after, strict=True)
    rates, besides = ([statistics.mean(both) for both in zip(*lists, strict=True)] for lists in pairs)
    return rates, besides


def compare(name: str, link: str, before: Calibration, corpus: list[str]) -> tuple[list[float], Calibration]:
    """Print the rows of one layout on one link. Returns the errors, and the speeds afterwards."""
    gpus, speeds = LAYOUTS[name]
    per_node = [count * speed for count, speed in zip(gpus, speeds, strict=True)]
    with hosts(**LINKS[link]) as interface, fractions(per_node) as cores:
        nodes = Nodes(gpus, cores, interface if len(gpus) > 1 else None)
        report = examine(nodes)
        between = figures.slowest_link(report["links"]) or INSIDE
        all_reduces = figures.all_reduces_of(report["all_reduce"])
        cluster = Cluster(gpus, tuple(before[0]), tuple(before[1]), INSIDE, between, all_reduces)
        # Equal fractions of a core differ by chance alone.
        found = {way: measure(nodes, way, corpus) for way in ways(cluster, 50) if name == "slow" or not way.balanced}
    after = calibrate(gpus, speeds, corpus)
    rates, besides = mean(before, after)
    cluster = Cluster(gpus, tuple(rates), tuple(besides), INSIDE, between, all_reduces)
    drift = max(max(pair) / min(pair) - 1 for pair in zip(before[0], after[0], strict=True))
    expected = {way: predict(cluster, GLOBAL_BATCH, GRADIENTS, way).seconds for way in found}
    advised = min(expected, key=expected.__getitem__)
    for way, seconds in found.items():
        mark = "advised" if way == advised else ""
        times = f"{expected[way] * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{expected[way] / seconds - 1:+.0%}"
        cells = [name, link, way.flags, *times, mark, f"{seconds / min(found.values()):.2f}", f"{drift:.0%}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    return [expected[way] / seconds - 1 for way, seconds in found.items()], after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LAYOUTS))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--cache-dir", type=Path, default=ROOT / "cache")
    args = parser.parse_args()
    corpus, errors = ["--cache-dir", str(args.cache_dir.resolve())], []
    print("| layout | link | flags | predicted ms | measured ms | error | | of the fastest | drift |")
    print("| --- " * 9 + "|")
    for name in args.only.split(","):
        calibrated = calibrate(*LAYOUTS[name], corpus)
        for link in args.links.split(",") if len(LAYOUTS[name][0]) > 1 else ["no limit"]:
            more, calibrated = compare(name, link, calibrated, corpus)
            errors += more
    sizes = sorted(map(abs, errors))
    print(f"\n{len(errors)} cells: median error {statistics.median(sizes):.0%}, worst {sizes[-1]:.0%}. {describe()}")


if __name__ == "__main__":
    main()
