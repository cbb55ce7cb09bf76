#!/usr/bin/env python3
"""Pretrain a small BERT on every layout and compare: the curves must agree.

    bert_layouts.py --out-dir runs/bert-layouts [--corpus FILES]

Runs `-g 1`, `-n 2 -g 3,1` and torchrun 3+1 on this machine for one epoch without dropout, with MLM and MLM+NSP, in
fp64 (the loss of every step must agree to 1e-9, the weights to 1e-8) and fp32 (the first 20 steps to 1e-4, the
held-out loss at the end to 1 %). Prints a table and exits with 1 where a bound is missed.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file

from benchmarks.layouts import largest_difference, train
from benchmarks.machine import describe

TRAINER = ROOT / "bert_ddp" / "bert-distributed.py"
NAMES = ("-g 1", "-n 2 -g 3,1", "torchrun 3+1")
CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
CONFIG |= {"vocab_size": 4000, "max_position_embeddings": 128}
FLAGS = ["--dropout", "0", "--vocab-size", "4000", "--global-batch", "64", "--epochs", "1", "--lr", "1e-3"]


def weights_of(folder: Path) -> dict:
    return load_file(folder / "checkpoints" / "latest" / "model.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="text files; the trainer's own default when left out: Python's docs")
    parser.add_argument("--out-dir", type=Path, required=True)
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    config = args.out_dir / "config.json"
    config.write_text(json.dumps(CONFIG))
    same = [*FLAGS, "--config-file", str(config), "--cache-dir", str(args.out_dir / "cache")]
    same += ["--corpus", args.corpus] if args.corpus else []
    broken, lines = 0, []
    for objective in ("mlm", "mlm+nsp"):
        found: dict[tuple[str, str], dict] = {}
        for precision in ("fp64", "fp32"):
            for name in NAMES:
                folder = args.out_dir / objective / precision / name.replace(" ", "_").replace(",", "+")
                flags = [*same, "--objective", objective, "--precision", precision]
                found[precision, name] = {**train(TRAINER, name, folder, flags), "weights": weights_of(folder)}
        for name in NAMES[1:]:
            (exact, exact_first), (single, single_first) = (
                (found[precision, name], found[precision, NAMES[0]]) for precision in ("fp64", "fp32")
            )
            losses = largest_difference(exact["losses"], exact_first["losses"])
            weights = max(
                (exact["weights"][key] - exact_first["weights"][key]).abs().max().item() for key in exact["weights"]
            )
            begin = largest_difference(single["losses"][:20], single_first["losses"][:20])
            end = abs(single["loss"] / single_first["loss"] - 1)
            broken += not (losses < 1e-9 and weights < 1e-8 and begin < 1e-4 and end < 0.01)
            steps = len(exact["losses"])
            lines.append(
                f"| {objective}, {steps} steps | `{name}` | {losses:.1e} | {weights:.1e} | {begin:.1e} | {end:.1e} |"
            )
    print("| largest difference to `-g 1` | layout | fp64 loss | fp64 weights | fp32 loss, 20 steps | held-out loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    print("\nevery promise is kept" if not broken else f"\n{broken} layouts break a promise")
    print(describe())
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
