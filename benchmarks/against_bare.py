#!/usr/bin/env python3
"""The MNIST trainer beside the least that a DDP script needs (bare_mnist.py): steps per second, both under torchrun.

    against_bare.py [--repeat 5] [--data-dir data]

On 1 and 2 ranks, each bound to a core of its own, with global batches of 256 and 1,024, in turns. The ceiling is what
two processes reach that each compute half of the batch and exchange nothing. All keep the memory that torch frees.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import require_mnist
from benchmarks.machine import describe
from benchmarks.processes import ended
from common.launch.addresses import free_port

BARE, OURS = ROOT / "benchmarks" / "bare_mnist.py", ROOT / "mnist_ddp" / "mnist-distributed.py"
FIRST_STEP = 50
STEPS = {256: 400, 1024: 200}
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # what the trainer does for itself


def start(script: Path, ranks: int, *flags: object, core: int = 0) -> list[subprocess.Popen]:
    """The processes that torchrun would start, the first on this core and each on one of its own."""
    environ = {
        **os.environ,
        **KEPT_MEMORY,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = []
    for rank in range(ranks):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        of_rank |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1"}
        command = [
            "taskset",
            "-c",
            str((core + rank) % (os.cpu_count() or 1)),
            sys.executable,
            script,
            *map(str, flags),
        ]
        processes.append(
            subprocess.Popen(command, env=environ | of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return processes


def output(processes: list[subprocess.Popen]) -> str:
    with ended(processes):
        outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"against_bare.py: a run has failed:\n{outputs}")
    return outputs[0][0]


def of_bare(text: str) -> float:
    found = re.search(r"seconds (\S+) steps (\d+)", text)
    assert found, text
    seconds, steps = found.groups()
    return int(steps) / float(seconds)


def bare(ranks: int, batch: int, flags: list[object]) -> float:
    return of_bare(output(start(BARE, ranks, "--global-batch", batch, "--max-steps", STEPS[batch], *flags)))


def ours(ranks: int, batch: int, flags: list[object]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        more = ("--out-dir", folder, "--device", "cpu", "--epochs", 100, *flags)
        output(start(OURS, ranks, "--global-batch", batch, "--max-steps", STEPS[batch], *more))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "ranks"]
    first, last = next(row for row in rows if row["step"] >= FIRST_STEP), rows[-1]
    return (last["step"] - first["step"]) / (last["training_seconds"] - first["training_seconds"])


def apart(ranks: int, batch: int, flags: list[object]) -> float:
    """Steps per second of processes that each compute their part of the batch alone."""
    size = ("--global-batch", batch // ranks, "--max-steps", STEPS[batch])
    jobs = [start(BARE, 1, *size, *flags, core=rank) for rank in range(ranks)]
    return min(of_bare(output(job)) for job in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    require_mnist(args.data_dir)
    flags: list[object] = ["--data-dir", args.data_dir.resolve()]
    print("| ranks | global batch | bare: steps/s | ours: steps/s | ours / bare | ceiling | ours / ceiling |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in map(int, args.ranks.split(",")):
        for batch in STEPS:
            found = [
                (bare(ranks, batch, flags), ours(ranks, batch, flags), apart(ranks, batch, flags))
                for _ in range(args.repeat)
            ]
            rates = [statistics.median(column) for column in zip(*found, strict=True)]
            ratio, of_ceiling = (statistics.median(one[1] / one[other] for one in found) for other in (0, 2))
            cells = [str(ranks), f"{batch:,}", f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{ratio:.2f}", f"{rates[2]:.1f}"]
            print("| " + " | ".join([*cells, f"{of_ceiling:.2f}"]) + " |", flush=True)
    print(f"\nMedian of {args.repeat}. {describe()}")


if __name__ == "__main__":
    main()
