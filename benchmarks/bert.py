#!/usr/bin/env python3
"""BERT pretraining against transformers.Trainer, side by side in one run: tokens per second and peak memory.

    bert.py [--steps 30] [--tries 3] [--threads CORES]

The same model (4 layers, width 256, 30,522 words), the same rows, 16 of them of 128 tokens a step, the same cores,
dropout 0.1, fused AdamW and gradients clipped to a norm of 1 in both. Medians of all tries, in turns. Prints a table of
docs/benchmarks.md.
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

from benchmarks.machine import describe
from common.launch.addresses import free_port

TRAINER = ROOT / "bert_ddp" / "bert-distributed.py"
PEER = ROOT / "benchmarks" / "bert_with_trainer.py"
ROWS, LENGTH, WORDS = 16, 128, 30_522
CONFIG = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
CONFIG |= {"vocab_size": WORDS, "max_position_embeddings": 512}


def run(*command: object, **environ: str) -> tuple[str, float]:
    """Run one program on all cores; what it printed and its peak memory in GiB."""
    environ = {**os.environ, **environ}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        sys.exit(f"bert.py: {command[0]} failed:\n{text}")
    return text, usage.ru_maxrss / 2**20


def ours(flags: list[object], folder: Path, steps: int) -> tuple[float, float]:
    """Run in place, as one rank of a launcher would, so that the memory is the trainer's own."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    _, memory = run(TRAINER, *flags, "--max-steps", steps, "--out-dir", folder, **one_rank, **address)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # one rate for each second or so; the first holds the warm-up
    rates = [row["samples_per_second"] for row in rows if row["kind"] == "train"][3:]
    return statistics.median(rates) * LENGTH, memory


def peer(cache: Path, config: Path, steps: int) -> tuple[float, float]:
    text, memory = run(PEER, cache, config, steps, ROWS)
    (rate,) = re.findall(r"^tokens/s (\S+)$", text, re.MULTILINE)
    return float(rate), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each program")
    parser.add_argument("--tries", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG))
        # speed depends on the number of words only
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))]
        special += [f"##{chr(number)}" for number in range(33, 127)]
        words = special + [f"word{number}" for number in range(WORDS - len(special))]
        (folder / "vocab.txt").write_text("\n".join(words))
        flags = ["--device", "cpu", "--config-file", config, "--vocab", folder / "vocab.txt", "--cache-dir", folder]
        flags += ["--sequence-length", LENGTH, "--global-batch", ROWS, "--lr", 1e-4, "--clip-norm", 1]
        ours(flags, folder / "cache", 5)  # the memory that makes the corpus does not count
        cache = next(folder.glob("corpus-*"))
        results = {"here": [], "transformers.Trainer": []}
        for number in range(args.tries):  # in turns, so that other load on the machine affects both
            results["here"].append(ours(flags, folder / f"ours-{number}", args.steps))
            results["transformers.Trainer"].append(peer(cache, config, args.steps))
    print(f"| BERT 4 x 256, {WORDS:,} words, {ROWS} x {LENGTH} tokens a step | tokens/s | peak memory, GiB |")
    print("| --- | --- | --- |")
    medians = {}
    for name, pairs in results.items():
        medians[name] = statistics.median(rate for rate, _ in pairs)
        print(f"| {name} | {medians[name]:,.0f} | {statistics.median(memory for _, memory in pairs):.2f} |")
    print(f"| ratio | {medians['here'] / medians['transformers.Trainer']:.2f} | |")
    print(f"\n{describe()}")


if __name__ == "__main__":
    main()
