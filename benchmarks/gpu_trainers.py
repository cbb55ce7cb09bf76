#!/usr/bin/env python3
"""The trainers themselves on one CUDA GPU, as a person starts them: what gpu.py measures as loops, and more.

    gpu_trainers.py [--tiny] [--only pretrain,finetune,mnist,loop] [--data-dir data] [--seeds 10]

`pretrain`: bert-distributed.py in bf16, compiled, BERT-base and BERT-large, rows of 128 and 512 tokens of real text:
tokens a second by its own report, utilisation as in gpu.py, and the peak of the memory in use. `finetune`:
bert-finetune.py in bf16 beside transformers.Trainer on WNUT 17 (finetune.py): MiniLM for three epochs, and a model of
BERT-base's size with random weights, for its speed. `mnist`: seconds of training to 99.0 %, over ten seeds, and those
of a known record's recipe (record_mnist.py). `loop`: the MNIST trainer beside a bare DDP loop of the same model and
batches (bare_mnist.py), steps a second.
`--tiny` runs small versions on a CPU, to see that they work: of `mnist` and `loop` only where --data-dir has MNIST.
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
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from benchmarks.data import require_mnist, require_wnut17
from benchmarks.finetune import minilm
from benchmarks.gpu import flops_a_row, matrix_rate
from benchmarks.machine import describe
from benchmarks.processes import ended
from common.launch.addresses import free_port
from tests.small_bert import save_model, save_ner

BERT, MNIST = ROOT / "bert_ddp" / "bert-distributed.py", ROOT / "mnist_ddp" / "mnist-distributed.py"
FINETUNE, BARE, RECORD = (ROOT / "benchmarks" / name for name in ("finetune.py", "bare_mnist.py", "record_mnist.py"))
ROWS = {128: 256, 512: 64}  # a step
STEPS, FIRST_STEP = 120, 40  # of pretraining, and the first that counts: compiled, allocated, tuned
FINETUNE_STEPS = 200  # of the model of BERT-base's size
LOOP_STEPS, TINY_LOOP_STEPS, LOOP_FIRST = 2_000, 200, 50


def run(*command: object, **environ: str) -> tuple[str, float]:
    """(what it prints, the most memory in use on the GPU meanwhile, in GiB)."""
    used, environ = 0.0, {**os.environ, "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false", **environ}
    with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody reads meanwhile would fill up
        program = [sys.executable, *map(str, command)]
        process = subprocess.Popen(program, env=environ, stdout=output, stderr=subprocess.STDOUT)
        with ended([process]):
            while process.poll() is None:
                if torch.cuda.is_available():
                    free, total = torch.cuda.mem_get_info()
                    used = max(used, (total - free) / 2**30)
                time.sleep(0.2)
        output.seek(0)
        said = output.read()
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
    """A table: preset, length, tokens a second, utilisation as in gpu.py, memory."""
    (folder / "text.txt").write_text("\n\n".join(list(topics.topics.values()) * (1 if tiny else 40)))
    peak = matrix_rate(torch.device(device), 256 if tiny else 8192)
    print(f"{peak / 1e12:.3g} TFLOP/s in matrix products")
    print("| model | length | rows | tokens/s | utilisation | GiB in use |\n| --- " + "| --- " * 5 + "|")
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
            full, _ = flops_a_row(BertConfig.from_pretrained(out / "checkpoints" / "latest"), length, 0.15)
            part = f"{rate / length * full / peak:.1%}"
            print(f"| BERT-{preset} | {length} | {size} | {rate:,.0f} | {part} | {used:.1f} |", flush=True)


def finetune(folder: Path, data: Path, tiny: bool) -> None:
    """Two tables of finetune.py: seconds, and F1."""
    if tiny:
        model, sentences = save_model(folder / "model"), save_ner(folder / "ner")
        print(run(FINETUNE, "--model", model, "--data", sentences, "--epochs", 1)[0], flush=True)
        return
    base = folder / "base"
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(base)  # both have BERT's 30,522 words
    BertForMaskedLM(BertConfig()).save_pretrained(base)
    flags = ["--data", require_wnut17(data), "--precision", "bf16"]
    print(run(FINETUNE, "--model", minilm(), *flags)[0], flush=True)
    print(run(FINETUNE, "--model", base, *flags, "--max-steps", FINETUNE_STEPS)[0], flush=True)


def mnist(folder: Path, device: str, data: Path, seeds: int) -> None:
    """Seconds of training to 99.0 %, of each seed; and those of a known record's recipe."""
    seconds = []
    for seed in range(seeds):
        flags = ["-g", 1, "--device", device, "--data-dir", data, "--target-accuracy", 99, "--seed", seed]
        precision = "fp32" if device == "cpu" else "bf16"
        run(MNIST, *flags, "--precision", precision, "--epochs", 4, "--out-dir", folder / f"seed{seed}")
        last = rows_of(folder / f"seed{seed}", "eval")[-1]
        if last["accuracy"] < 0.99:
            sys.exit(f"gpu_trainers.py: seed {seed} reached {last['accuracy']:.2%} in 4 epochs, not 99.0 %")
        seconds.append(last["training_seconds"])
    spread = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    print(f"MNIST to 99.0 %: {statistics.mean(seconds):.2f} s of training, +- {spread:.2f} s over {seeds} seeds")
    said, _ = run(RECORD, "--data-dir", data, "--device", device, "--seeds", seeds)
    print(f"beside it, one epoch of the record's recipe:\n{said}", end="")


def loop(folder: Path, device: str, data: Path, steps: int) -> None:
    """The trainer's steps a second over those of a bare loop, one rank."""
    print("| global batch | bare | ours | ratio |\n| --- | --- | --- | --- |")
    for size in (256, 1024):
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        flags = ["--data-dir", data, "--global-batch", size, "--max-steps", steps]
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
    parser.add_argument("--only", default="pretrain,finetune,mnist,loop")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("gpu_trainers.py: error: torch sees no CUDA GPU here: use a machine with one, or --tiny")
    device = "cpu" if args.tiny else "cuda"
    parts = set(args.only.split(","))
    if args.tiny and not (args.data_dir / "MNIST").exists():
        print(f"{args.data_dir} has no MNIST: mnist and loop are left out")
        parts -= {"mnist", "loop"}
    if parts & {"mnist", "loop"}:
        require_mnist(args.data_dir)
    if "finetune" in parts and not args.tiny:
        minilm()
        require_wnut17(args.data_dir)
    print(f"{'CPU' if args.tiny else torch.cuda.get_device_name()}; {describe()}")
    with tempfile.TemporaryDirectory() as folder:
        if "pretrain" in parts:
            pretrain(Path(folder), device, args.tiny)
        if "finetune" in parts:
            finetune(Path(folder), args.data_dir, args.tiny)
        if "mnist" in parts:
            mnist(Path(folder), device, args.data_dir, 1 if args.tiny else args.seeds)
        if "loop" in parts:
            loop(Path(folder), device, args.data_dir, TINY_LOOP_STEPS if args.tiny else LOOP_STEPS)


if __name__ == "__main__":
    main()
