#!/usr/bin/env python3
"""MNIST against the stock recipe, side by side in one run: time to 99.0 %, and images per second on one model.

    mnist.py [--data-dir data] [--quick]

The stock recipe prepares each image while it trains, ours prepares all before: its seconds of training have those of
that. `--quick` leaves out the stock recipe's full training, which takes minutes. Prints the tables of
docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import FOLDER, require_mnist
from benchmarks.machine import describe

HERE = ROOT / "benchmarks"
TRAINER = ROOT / "mnist_ddp" / "mnist-distributed.py"
STEPS = 150  # of 64 images, for images per second
TRIES = 3
EPOCHS, TARGET = 2, 99.0
STEPS_PER_EPOCH = 235  # of 256 of 60,000 images


def run(*command: object) -> str:
    """Run one program on all cores and return what it printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, command)], env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"mnist.py: {command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def last_row(folder: Path, kind: str) -> dict:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind][-1]


PREPARE = """
import sys, time, torch
from pathlib import Path
from mnist_ddp import data
began = time.perf_counter()
data.load("mnist", Path(sys.argv[1]), torch.float32, torch.device("cpu"))
print(time.perf_counter() - began)
"""


def ours_to_target(data: Path, folder: Path) -> tuple[float, int, float]:
    """(seconds of preparing the images and of training, epochs, accuracy)."""
    flags = ["-g", 1, "--device", "cpu", "--data-dir", data, "--epochs", EPOCHS, "--target-accuracy", TARGET]
    run(TRAINER, *flags, "--out-dir", folder)
    row, prepared = last_row(folder, "eval"), float(run("-c", PREPARE, data.resolve()))
    if 100 * row["accuracy"] < TARGET:
        sys.exit(f"mnist.py: ours has reached {row['accuracy']:.2%} in {EPOCHS} epochs, not {TARGET} %")
    return prepared + row["training_seconds"], math.ceil(row["step"] / STEPS_PER_EPOCH), row["accuracy"]


def stock_to_target(data: Path) -> tuple[float, int, float]:
    """(seconds of training, epochs, accuracy)."""
    lines = run(HERE / "stock_mnist.py", "--data-dir", data, "--target-accuracy", TARGET).splitlines()
    end = json.loads(lines[-1])
    if 100 * end["accuracy"] < TARGET:
        sys.exit(f"mnist.py: the stock recipe has reached {end['accuracy']:.2%}, not {TARGET} %")
    return end["training_seconds"], len(lines), end["accuracy"]


def with_stock_model(folder: Path) -> Path:
    """A copy of our trainer with the stock recipe's model in place of its own. Returns its script."""
    for package in ("common", "mnist_ddp"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "stock_mnist.py", folder / "mnist_ddp")
    (folder / "mnist_ddp" / "model.py").write_text("from mnist_ddp.stock_mnist import StockNet as ConvNet\n")
    return folder / "mnist_ddp" / TRAINER.name


def ours_per_second(trainer: Path, data: Path, folder: Path) -> float:
    """Images per second over all steps, on the stock recipe's model and batch."""
    flags = ["-g", 1, "--device", "cpu", "--data-dir", data, "--global-batch", 64, "--max-steps", STEPS]
    run(trainer, *flags, "--out-dir", folder)
    return last_row(folder, "summary")["samples_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=FOLDER, help="where MNIST is, or is downloaded to")
    parser.add_argument("--quick", action="store_true", help="only images per second")
    args = parser.parse_args()
    require_mnist(args.data_dir)
    with tempfile.TemporaryDirectory() as scratch:
        pairs, trainer = [], with_stock_model(Path(scratch))
        for number in range(TRIES):  # in turns, so that other load on the machine affects both
            stock = json.loads(run(HERE / "stock_mnist.py", "--data-dir", args.data_dir, "--max-steps", STEPS))
            ours = ours_per_second(trainer, args.data_dir, Path(scratch) / f"rate{number}")
            pairs.append((stock["images_per_second"], ours))
        stock, ours = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        ratio = statistics.median(our / their for their, our in pairs)
        print(f"| images per second, same model, batch 64 (median of {TRIES}) | stock | ours | ratio |")
        print("| --- | --- | --- | --- |")
        print(f"| one process, all cores | {stock:,.0f} | {ours:,.0f} | {ratio:.2f} |\n")
        if not args.quick:
            folders = [Path(scratch) / f"target{number}" for number in range(TRIES)]
            half = TRIES // 2  # before the stock recipe, which takes minutes, and the others after it
            reached = [ours_to_target(args.data_dir, folder) for folder in folders[:half]]
            seconds, epochs, accuracy = stock_to_target(args.data_dir)
            reached += [ours_to_target(args.data_dir, folder) for folder in folders[half:]]
            ours_seconds, ours_epochs, _ = map(statistics.median, zip(*reached, strict=True))
            accuracies = ", ".join(f"{one:.2%}" for *_, one in reached)
            print(f"| to {TARGET:.1f} % on the test images | seconds of training | epochs | accuracy |")
            print("| --- | --- | --- | --- |")
            print(f"| stock (one run) | {seconds:.1f} | {epochs} | {accuracy:.2%} |")
            print(f"| ours (median of {TRIES}) | {ours_seconds:.1f} | {ours_epochs:.0f} | {accuracies} |")
            print(f"| ratio | {seconds / ours_seconds:.1f} | | |\n")
    print(describe())


if __name__ == "__main__":
    main()
