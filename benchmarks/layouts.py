#!/usr/bin/env python3
"""Train MNIST on every layout with default settings and compare: the curves must agree.

    layouts.py --out-dir runs/layouts [--data-dir data] [--hosts]

Runs `-g 1`, `-g 2`, `-n 2 -g 3,1` and torchrun 3+1 on this machine, in fp64 (the loss of every step must agree to
1e-9) and fp32 (the first 20 steps to 1e-5, the accuracy within 0.15 points). `--hosts` adds two real hosts (network
namespaces; needs root). Prints a table, draws layouts.png, and exits with 1 where a bound is missed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import FOLDER, require_mnist
from benchmarks.processes import ended
from common.launch.addresses import free_port

TRAINER = ROOT / "mnist_ddp" / "mnist-distributed.py"
HOSTS = ROOT / "tests" / "cluster" / "hosts.sh"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def commands(trainer: Path, name: str, port: int) -> list[list[str]]:
    """One command for each node of a layout."""
    python = [sys.executable, str(trainer)]
    if name in ("-g 1", "-g 2"):
        return [[*python, *name.split()]]
    if name == "torchrun 3+1":
        return [
            [*TORCHRUN, "--nnodes=2", f"--nproc-per-node={gpus}", f"--node-rank={node}", "--master-addr=127.0.0.1",
             f"--master-port={port}", str(trainer)]
            for node, gpus in enumerate((3, 1))
        ]  # fmt: skip
    address = "10.77.0.1" if "hosts" in name else "127.0.0.1"
    nodes = []
    for node, host in enumerate(("nodea", "nodeb")):
        on = [str(HOSTS), "on", host] if "hosts" in name else []
        flags = ["-n", "2", "-g", "3,1", "-i", str(node), "--master-port", str(port)]
        nodes.append([*on, *python, *flags, *(["--master-addr", address] if node else [])])
    return nodes


def train(trainer: Path, name: str, folder: Path, flags: list[str]) -> dict:
    """Train one layout to its end; returns the losses of all steps and what the last evaluation found."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    port = free_port()
    nodes = [
        subprocess.Popen([*command, "--device", "cpu", *flags, "--out-dir", str(folder)], env=environ)
        for command in commands(trainer, name, port)
    ]
    with ended(nodes):
        codes = [node.wait() for node in nodes]  # wait for all before checking any
    if any(codes):
        sys.exit(f"layouts.py: {name} failed")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    return {"losses": losses, **[row for row in rows if row["kind"] == "eval"][-1]}


def largest_difference(mine: list[float], first: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(mine, first, strict=True))


def draw(results: dict[str, dict], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, (name, result) in enumerate(results.items()):
        axes.plot(result["losses"], label=f"{name}: {result['accuracy']:.2%}", linewidth=3 - 0.5 * number, alpha=0.7)
    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log", title="MNIST in fp32: one curve")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=FOLDER, help="where MNIST is, or is downloaded to")
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--hosts", action="store_true")
    args = parser.parse_args()
    require_mnist(args.data_dir)
    names = ["-g 1", "-g 2", "-n 2 -g 3,1", "torchrun 3+1"]
    if args.hosts:
        subprocess.run([HOSTS, "up"], check=True)
        names.append("-n 2 -g 3,1 on two hosts")
    try:
        results = {
            precision: {
                name: train(
                    TRAINER,
                    name,
                    args.out_dir / precision / name.replace(" ", "_").replace(",", "+"),
                    ["--data-dir", str(args.data_dir), "--precision", precision],
                )
                for name in names
            }
            for precision in ("fp64", "fp32")
        }
    finally:
        if args.hosts:
            subprocess.run([HOSTS, "down"], check=True)
    draw(results["fp32"], args.out_dir / "layouts.png")
    return table(results)


def table(results: dict[str, dict]) -> int:
    """Print the results. Returns 1 if a bound is missed."""
    print("| layout | accuracy fp32 | accuracy fp64 | largest loss difference, fp64, all steps | fp32, 20 steps |")
    print("| --- | --- | --- | --- | --- |")
    broken = 0
    for name in results["fp32"]:
        differences = []
        for precision, steps in (("fp64", None), ("fp32", 20)):
            mine, first = results[precision][name]["losses"], results[precision]["-g 1"]["losses"]
            assert len(mine) == len(first)
            differences.append(largest_difference(mine[:steps], first[:steps]))
        low, high = results["fp32"][name]["accuracy"], results["fp64"][name]["accuracy"]
        print(f"| `{name}` | {low:.2%} | {high:.2%} | {differences[0]:.1e} | {differences[1]:.1e} |")
        near = abs(low - results["fp32"]["-g 1"]["accuracy"]) <= 0.0015
        broken += not (low >= 0.99 and high >= 0.99 and near and differences[0] < 1e-9 and differences[1] < 1e-5)
    steps = len(results["fp64"]["-g 1"]["losses"])
    print(f"\n{steps} steps each; " + ("every promise is kept" if not broken else f"{broken} layouts break a promise"))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
