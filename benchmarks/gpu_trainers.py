#!/usr/bin/env python3
"""The trainers themselves on one CUDA GPU, as a person starts them: what gpu.py measures as loops, and more.

    gpu_trainers.py [--tiny] [--only pretrain,mnist,loop] [--data-dir data] [--seeds 10]

`pretrain`: bert-distributed.py in bf16, compiled, BERT-base and BERT-large, rows of 128 and 512 tokens of real text:
tokens a second by its own report, and the peak of the memory in use. `mnist`: seconds of training to 99.0 %, over ten
seeds, and those of a known record's recipe (record_mnist.py). `loop`: the MNIST trainer beside a bare DDP loop of the
same model and batches (bare_mnist.py), steps a second.
`--tiny` runs small versions of the first on a CPU, to see that it works.
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
from pydoc_data import topics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.data import require_mnist
from benchmarks.machine import describe
from common.launch.addresses import free_port

BERT, MNIST = ROOT / "bert_ddp" / "bert-distributed.py", ROOT / "mnist_ddp" / "mnist-distributed.py"
BARE, RECORD = ROOT / "benchmarks" / "bare_mnist.py", ROOT / "benchmarks" / "record_mnist.py"
ROWS = {128: 256, 512: 64}  # a step
STEPS, FIRST_STEP = 120, 40  # of pretraining, and the first that counts: compiled, allocated, tuned
LOOP_STEPS, LOOP_FIRST = 2_000, 50


def run(*command: object, **environ: str) -> tuple[str, float]:
    """(what it prints, the most memory in use on the GPU meanwhile, in GiB)."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    used = 0.0
    while process.poll() is None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            used = max(used, (total - free) / 2**30)
        time.sleep(0.2)
    assert process.stdout
    said = process.stdout.read()
    if process.returncode:
        sys.exit(f"gpu_trainers.py: {command[0]} failed:\n{said}")
    return said, used


def rows_of(folder: Path, kind: str) -> list[dict]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def steps_per_second(folder: Path, first: int) -> float:
    rows = [row for row in rows_of(folder, "ranks") if row["step"] >= first]
    return (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["training_seconds"] - rows[0]["training_seconds"])


def pretrain(folder: Path, device: str, tiny: bool) -> None:
    """A table: preset, length, tokens a second, memory."""
    (folder / "text.txt").write_text("\n\n".join(list(topics.topics.values()) * (1 if tiny else 40)))
    print("| model | length | rows | tokens/s | GiB in use |\n| --- | --- | --- | --- | --- |")
    for preset in ("tiny",) if tiny else ("base", "large"):
        for length in (128,) if tiny else (128, 512):
            size = 8 if tiny else ROWS[length]
            out, steps = folder / f"{preset}-{length}", 30 if tiny else STEPS
            flags = ["-g", 1, "--device", device, "--preset", preset, "--sequence-length", length, "--out-dir", out]
            flags += ["--global-batch", size, "--max-steps", steps, "--epochs", 1000, "--save-every", "10h"]
            flags += ["--corpus", folder / "text.txt", "--cache-dir", folder / "cache", "--vocab-size", 30_522]
            flags += [] if tiny else ["--precision", "bf16", "--compile"]
            _, used = run(BERT, *flags)
            rate = steps_per_second(out, 1 if tiny else FIRST_STEP) * size * length
            print(f"| BERT-{preset} | {length} | {size} | {rate:,.0f} | {used:.1f} |", flush=True)


def mnist(folder: Path, device: str, data: Path, seeds: int) -> None:
    """Seconds of training to 99.0 %, of each seed; and those of a known record's recipe."""
    seconds = []
    for seed in range(seeds):
        flags = ["-g", 1, "--device", device, "--data-dir", data, "--target-accuracy", 99, "--seed", seed]
        run(MNIST, *flags, "--precision", "bf16", "--epochs", 4, "--out-dir", folder / f"seed{seed}")
        seconds.append(rows_of(folder / f"seed{seed}", "eval")[-1]["training_seconds"])
    spread = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    print(f"MNIST to 99.0 %: {statistics.mean(seconds):.2f} s of training, +- {spread:.2f} s over {seeds} seeds")
    said, _ = run(RECORD, "--data-dir", data, "--device", device, "--seeds", seeds)
    print(f"beside it, one epoch of the record's recipe:\n{said}", end="")


def loop(folder: Path, device: str, data: Path) -> None:
    """The trainer's steps a second over those of a bare loop, one rank."""
    print("| global batch | bare | ours | ratio |\n| --- | --- | --- | --- |")
    for size in (256, 1024):
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        flags = ["--data-dir", data, "--global-batch", size, "--max-steps", LOOP_STEPS]
        said, _ = run(BARE, *flags, "--device", device, **one, MASTER_PORT=str(free_port()))
        words = said.split()
        bare = int(words[3]) / float(words[1])
        out = folder / f"loop{size}"
        run(MNIST, "-g", 1, "--device", device, *flags, "--epochs", 100, "--save-every", "10h", "--out-dir", out)
        ours = steps_per_second(out, LOOP_FIRST)
        print(f"| {size} | {bare:,.0f} | {ours:,.0f} | {ours / bare:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="pretrain,mnist,loop")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("gpu_trainers.py: error: torch sees no CUDA GPU here: use a machine with one, or --tiny")
    device = "cpu" if args.tiny else "cuda"
    print(f"{'CPU' if args.tiny else torch.cuda.get_device_name()}; {describe()}")
    with tempfile.TemporaryDirectory() as folder:
        if "pretrain" in args.only:
            pretrain(Path(folder), device, args.tiny)
        if args.tiny:
            return
        if "mnist" in args.only or "loop" in args.only:
            require_mnist(args.data_dir)
        if "mnist" in args.only:
            mnist(Path(folder), device, args.data_dir, args.seeds)
        if "loop" in args.only:
            loop(Path(folder), device, args.data_dir)


if __name__ == "__main__":
    main()
