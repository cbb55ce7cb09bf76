#!/usr/bin/env python3
"""How long a rank waits for its loader's processes: seconds to the first batch of the first and the second epoch.

    loading.py [--repeat 3] [--ways before,now] [--cache-dir CACHE]

Two processes a loader, on one rank and on `-n 2 -g 3,1`, all on this machine: BERT's token rows, and images of
torchvision with torch's collate function. Each epoch reads a training and an evaluation loader, as the trainers do.
The ways are run in turns: `now` is common/uneven/options/workers.py; `before` is the fork server of earlier versions,
with new processes for each loader and epoch; `fork` (torch's default on Linux, not safe in a rank, which has
threads) and `spawn` are those start methods, also with new processes each time.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from bert_ddp.text.flags import add_corpus_flags
from common.launch import cli, start, values

LAYOUTS = {"1 rank": ["-g", "1"], "3 + 1 ranks": ["-n", "2", "-g", "3,1"]}
WAYS = ("before", "now", "fork", "spawn")


def flags() -> argparse.ArgumentParser:
    """The flags of a rank."""
    parser = cli.parser(__doc__)
    parser.add_argument("--way", choices=WAYS, default="now")
    parser.add_argument("--data", choices=("token rows", "images"), default="images")
    parser.add_argument("--data-workers", type=values.natural_int, default=2)
    add_corpus_flags(parser)
    return parser


def seconds_of(layout: str, data: str, way: str, cache: Path) -> list[float]:
    """Seconds to the first batch: training and evaluation in the first epoch, then in the second."""
    command = [str(ROOT / "launch_scripts" / "play_nodes.py"), __file__] if "-n" in LAYOUTS[layout] else [__file__]
    more = ["--device", "cpu", "--data", data, "--way", way, "--cache-dir", str(cache)]
    done = subprocess.run([sys.executable, *command, *LAYOUTS[layout], *more], stdout=subprocess.PIPE, text=True)
    said = re.search(r"seconds ([\d. ]+)", done.stdout)
    if done.returncode or not said:
        sys.exit(f"loading.py: {data}, {layout}, {way} failed:\n{done.stdout}")
    return [float(number) for number in said[1].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ways", default="before,now")
    parser.add_argument("--cache-dir", type=Path, default=Path("cache"))
    args = parser.parse_args()
    ways = args.ways.split(",")
    print("| data, ranks | way | epoch 1: training | evaluation | epoch 2: training | evaluation | all, ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for data in ("token rows", "images"):
        for layout in LAYOUTS:
            found: dict[str, list[list[float]]] = {way: [] for way in ways}
            for _ in range(args.repeat):
                for way in ways:
                    found[way].append(seconds_of(layout, data, way, args.cache_dir))
            medians = {way: [statistics.median(column) for column in zip(*found[way], strict=True)] for way in ways}
            for way, median in medians.items():
                cells = " | ".join(f"{seconds:.2f}" for seconds in median)
                ratio = sum(medians[ways[0]]) / sum(median)
                print(f"| {data}, {layout} | {way} | {cells} | {ratio:.1f} |", flush=True)
    print(f"\nMedian of {args.repeat}. {describe()}")


if __name__ == "__main__":
    if "--way" in sys.argv:  # as `seconds_of` starts it
        start.main(flags(), "benchmarks.loaded_ranks:measure")
    main()
