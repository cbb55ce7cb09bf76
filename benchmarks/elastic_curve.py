#!/usr/bin/env python3
"""A node is killed in the middle of a run and comes back, a machine joins, another one leaves: the loss curve on top of
the undisturbed one.

    elastic_curve.py [--picture docs/elastic.png]

Both nodes of `-n 2 -g 3,1` run on this machine, in float64. Node 1, with its launcher and its worker, is ended with
SIGKILL, and its command is typed again a little later. Then a third machine joins, and node 0 leaves, as at Ctrl-C.
Prints what the nodes say, and how far the two curves are apart. One to two minutes on two cores.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.played import PlayedRun
from common.record.metrics import read_metrics
from common.record.plots import plot_members

FLAGS = ["--device", "cpu", "--dataset", "digits", "--precision", "fp64", "--global-batch", "64", "--epochs", "100"]
KILLED_AT, LATER = 300, 250  # steps
LIMIT_SECONDS = 300.0
SCRIPT = ROOT / "mnist_ddp" / "mnist-distributed.py"


class Watched(PlayedRun):
    def heard(self, node: int, line: str) -> None:
        if " step " not in line:
            name = f"node {node}" if len(self.gpus) > 1 else "alone "
            print(f"{name} | {line}", flush=True)

    def wait_for(self, kind: str, count: int) -> None:
        """Until the run has written so many rows of a kind."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(self.rows(kind)) < count:
            if time.monotonic() > deadline or any(node.poll() for node in self.nodes if node.returncode != -9):
                raise SystemExit(f"{self.folder} has not come to {count} rows of kind {kind}")
            time.sleep(0.1)

    def require_success(self) -> None:
        if any(node.wait(LIMIT_SECONDS) for node in self.nodes):
            raise SystemExit("a node has failed")


def disturbed(folder: Path) -> None:
    run = Watched(SCRIPT, (3, 1), folder, "--elastic", 2, *FLAGS)
    run.wait_for("train", KILLED_AT)
    print("       > node 1 is killed", flush=True)
    run.kill_node(1)
    run.nodes[1].wait()
    run.wait_for("train", KILLED_AT + LATER)
    print("       > node 1 is started again", flush=True)
    run.start(1)
    run.wait_for("members", 2)
    run.wait_for("train", run.steps() + LATER)
    print("       > a machine with two processes joins", flush=True)
    run.join(2)
    run.wait_for("members", 3)
    run.wait_for("train", run.steps() + LATER)
    print("       > Ctrl-C on node 0", flush=True)
    run.nodes[0].send_signal(signal.SIGINT)
    run.wait_for("members", 4)
    run.require_success()


def losses(folder: Path) -> dict[int, float]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "a step is missing, or there twice"
    return {row["step"]: row["loss"] for row in rows}


def draw(undisturbed: dict[int, float], found: dict[int, float], rows: list[dict[str, Any]], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
    loss, members = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    loss.plot(*zip(*undisturbed.items(), strict=True), color="tab:orange", alpha=0.5, linewidth=4, label="undisturbed")
    loss.plot(*zip(*found.items(), strict=True), color="black", linewidth=0.7, label="disturbed")
    loss.set(
        ylabel="loss of each step",
        yscale="log",
        title="3+1 ranks: a node dies and comes back, two more join, three leave",
    )
    loss.legend()
    plot_members(members, rows)
    members.set(title="", ylabel="rank")
    for axes in (loss, members):
        axes.grid(alpha=0.3)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=ROOT / "runs" / "elastic.png", help="where to draw the curves")
    picture = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder) / "alone", Path(folder) / "together"
        Watched(SCRIPT, (1,), alone, *FLAGS).require_success()
        disturbed(together)
        expected, found = losses(alone), losses(together)
        assert expected.keys() == found.keys()
        apart = max(abs(found[step] / loss - 1) for step, loss in expected.items())
        rows = read_metrics(together / "metrics.jsonl")
        draw(expected, found, rows, picture)
    print(
        f"{len(found):,} steps, each done once; the losses differ by at most {apart:.1e} of their value: see {picture}"
    )


if __name__ == "__main__":
    main()
