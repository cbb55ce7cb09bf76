#!/usr/bin/env python3
"""What each process of a long run keeps: memory, descriptors and threads, by step. A table and a plot.

    memory.py [--steps 100000] [--only plain,elastic,balance,async] [--plot memory.png]

The MNIST trainer on digits, 3+1 ranks, with an evaluation and a checkpoint every 180 steps; `async` has loader workers
too. Memory is what a process has resident (RSS), and what of that it holds alone (USS): libraries are shared, and so is
what a rank has from the launcher that has forked it, until either writes there. Growth counts from step 1,000.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from benchmarks.machine import describe
from benchmarks.played import PROCESS_ENDED, PlayedRun

SCRIPT = ROOT / "mnist_ddp" / "mnist-distributed.py"
FLAGS = ["--device", "cpu", "--dataset", "digits", "--global-batch", 8, "--epochs", 100_000, "--keep", 2, "--no-plot"]
CASES: dict[str, list] = {
    "plain": [],
    "elastic": ["--elastic", 2],
    "balance": ["--balance", "auto"],
    "async": ["--async-save", "--elastic", 2, "--balance", "auto"],
}
LOADERS = "async"  # the case in which each rank has a process that loads
EVERY_SECONDS = 2.0
FIRST_STEP = 1000  # from which growth counts: until then, caches fill

Sample = tuple[int, float, float, int, int]  # step, MB resident, MB of its own, descriptors, threads


def watch(case: str, steps: int) -> dict[str, list[Sample]]:
    """By process, its samples."""
    found: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = loading_script(Path(folder) / "loading_ddp") if case == LOADERS else SCRIPT
        run = PlayedRun(script, (3, 1), Path(folder) / "run", *FLAGS, "--max-steps", steps, *CASES[case])
        try:
            run.wait_for_step(1)
            while any(node.poll() is None for node in run.nodes):
                step = run.steps()
                for name, process in processes(run).items():
                    with contextlib.suppress(*PROCESS_ENDED):
                        memory = process.memory_full_info()
                        kept = memory.rss / 1e6, memory.uss / 1e6, process.num_fds(), process.num_threads()
                        if memory.rss:  # nothing, where it has just ended
                            found.setdefault(name, []).append((step, *kept))
                time.sleep(EVERY_SECONDS)
        except BaseException:
            run.end()
            raise
        if any(node.returncode for node in run.nodes):
            raise SystemExit(run.said())
    return found


def loading_script(folder: Path) -> Path:
    """A copy of the trainer in which each rank has a process that loads. Returns its script."""
    folder.mkdir()
    for file in (SCRIPT, SCRIPT.parent / "train.py"):
        text = file.read_text().replace("mnist_ddp.train", f"{folder.name}.train")
        loading = text.replace("run.global_batches(train_set)", "run.global_batches(train_set, num_workers=1)")
        assert file == SCRIPT or loading != text, f"{file} makes its loader in another way"
        (folder / file.name).write_text(loading)
    return folder / SCRIPT.name


def processes(run: PlayedRun) -> dict[str, psutil.Process]:
    """All processes of a run now, by name."""
    found = dict[str, psutil.Process]()
    for node, launcher in enumerate(run.nodes):
        with contextlib.suppress(*PROCESS_ENDED):  # one of them ends first
            found[f"launcher {node}"] = psutil.Process(launcher.pid)
            for rank, process in run.workers(node).items():
                found[f"rank {rank}"] = process
                for number, loader in enumerate(process.children()):
                    found[f"loader {number} of rank {rank}"] = loader
    return found


def at(samples: list[Sample], step: int) -> Sample:
    """The medians of the five samples around a step: in one of them the process may have just begun, or be ending."""
    nearest = sorted(samples, key=lambda one: abs(one[0] - step))[:5]
    around, resident, alone, descriptors, threads = map(statistics.median_low, zip(*nearest, strict=True))
    return int(around), resident, alone, int(descriptors), int(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.steps <= FIRST_STEP:
        parser.error(f"--steps is {args.steps}: growth counts from step {FIRST_STEP:,}, so give more")
    marks = sorted({FIRST_STEP, args.steps // 10, args.steps // 2, args.steps})
    cells = [f"MB at {step:,}" for step in marks]
    print(f"| run | process | {' | '.join(cells)} | since 1,000 | its own | descriptors | threads |")
    print("| --- " * (len(marks) + 6) + "|")
    all_found: dict[str, Any] = {}
    for case in args.only.split(","):
        all_found[case] = found = watch(case, args.steps)
        for process, samples in found.items():
            then = [at(samples, step) for step in marks]
            megabytes = " | ".join(f"{one[1]:.1f}" for one in then)
            first = at(samples, FIRST_STEP)
            grown, alone = then[-1][1] - first[1], then[-1][2] - first[2]
            others = " | ".join(f"{first[column]} to {then[-1][column]}" for column in (3, 4))
            print(f"| {case} | {process} | {megabytes} | {grown:+.1f} | {alone:+.1f} | {others} |", flush=True)
    print(f"\n{describe()}")
    if args.plot:
        plot(all_found, args.plot)


def plot(found: dict[str, Any], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, (case, processes) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for process, samples in processes.items():
            first = at(samples, FIRST_STEP)[1]
            axes.plot([one[0] for one in samples], [one[1] - first for one in samples], label=process, linewidth=1)
        axes.set(title=case, xlabel="step", ylabel=f"resident MB since step {FIRST_STEP:,}", ylim=(-5, 10))
        axes.axhspan(0, 1, color="lightgrey")
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
