#!/usr/bin/env python3
"""What `--compress` and `--sync-every` save on a slow link: bytes of a step, and steps per second.

    slow_links.py [--repeat 3] [--only bytes,100mbit,delay,loss] [--ways "every 50;..."]

Two nodes with one rank each pretrain a small BERT. `bytes` and the others run on two network namespaces of this
machine, whose interfaces count what crosses: `100mbit` with a limit of 100 Mbit/s, `delay` with that and 20 ms each
way. `loss` compares the held-out loss of `make bert`'s recipe after the same tokens. The ways are run in turns. Needs
root and iproute2.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from benchmarks.processes import ended
from common.launch.addresses import free_port

HOSTS, SLOWLINK = ROOT / "tests" / "cluster" / "hosts.sh", ROOT / "tests" / "cluster" / "slowlink.py"
TRAINER = ROOT / "bert_ddp" / "bert-distributed.py"
MODEL = ["--preset", "tiny", "--dropout", "0", "--vocab-size", "2000", "--sequence-length", "64"]
RECIPE = [*MODEL, "--global-batch", "32", "--epochs", "20", "--lr", "2e-3", "--warmup-steps", "100", "--clip-norm", "1"]
WAYS = {
    "exact": [],
    "bf16": ["--compress", "bf16"],
    "every 50": ["--sync-every", "50"],
    "every 100": ["--sync-every", "100"],
    "every 50, bf16": ["--sync-every", "50", "--compress", "bf16"],
    "every 25, bf16": ["--sync-every", "25", "--compress", "bf16"],
    "every 100, bf16": ["--sync-every", "100", "--compress", "bf16"],
}
LIMITED = ["exact", "bf16", "every 50"]
DELAYED = ["exact", "every 50", "every 50, bf16", "every 25, bf16", "every 100, bf16"]
# A guess: AdamW on each of two nodes sees half of the batch, with 1.41 times the noise, and might want larger steps.
LARGER = ["--lr", "2.83e-3", "--clip-norm", "1.41"]
FIRST_STEP = 20
# An outer step waits where an evaluation is due, so an epoch should be much longer than H: here 255 steps of 64 rows.
LONGER_TEXT = ["--corpus", *["python-docs"] * 8]
ADDRESSES = {"uneven-va": "10.77.0.1", "tund0": "10.78.0.1"}  # of nodea


@contextmanager
def hosts(rate: str = "off", delay_ms: int = 0):
    """Two hosts, joined by a link of this rate, and with `delay_ms` by one of 100 Mbit/s with a delay. Yields the
    interface of nodea."""
    subprocess.run([HOSTS, "down"], check=True)
    slow = None
    try:
        subprocess.run([HOSTS, "up"], check=True)
        subprocess.run([HOSTS, "rate", rate], check=True)
        if delay_ms:
            slow = subprocess.Popen([sys.executable, SLOWLINK, str(delay_ms), "0", "100"], stdout=subprocess.PIPE)
            assert slow.stdout and slow.stdout.readline() == b"up\n"
        yield "tund0" if delay_ms else "uneven-va"
    finally:
        if slow:
            slow.kill()
            slow.wait()
        subprocess.run([HOSTS, "down"], check=True)


def bytes_sent(interface: str) -> int:
    """What nodea has sent through this interface so far."""
    shown = subprocess.run(
        ["ip", "-n", "uneven-a", "-s", "-j", "link", "show", interface], check=True, capture_output=True
    )
    return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]


def train(folder: Path, flags: list[str], interface: str) -> list[dict]:
    """Train with one rank on each host. Returns the rows of metrics.jsonl."""
    port, other = str(free_port()), interface.replace("va", "vb")
    layout = ["-n", "2", "-g", "1,1", "--master-addr", ADDRESSES[interface], "--master-port", port, "--device", "cpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.mkdir()
    with (folder / "nodes.log").open("w") as log:
        nodes = []
        for number, (host, name) in enumerate((("nodea", interface), ("nodeb", other))):
            own = ["-i", str(number), "--interface", name, "--out-dir", str(folder / "run")]
            command = [HOSTS, "on", host, sys.executable, TRAINER, *layout, *own, *flags]
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log))
        with ended(nodes):
            codes = [node.wait() for node in nodes]
    if any(codes):
        sys.exit(f"slow_links.py: a run has failed:\n{(folder / 'nodes.log').read_text()}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def measure(flags: list[str], steps: int, interface: str) -> tuple[int, list[dict]]:
    """(bytes that nodea has sent, rows) of one run."""
    before = bytes_sent(interface)
    with tempfile.TemporaryDirectory() as folder:
        rows = train(Path(folder) / "job", [*flags, "--max-steps", str(steps)], interface)
    return bytes_sent(interface) - before, rows


def speed(rows: list[dict]) -> tuple[float, float]:
    """(steps per second, part of the time spent on computing) from the first "ranks" row after step 20 to the last."""
    ranks = [row for row in rows if row["kind"] == "ranks"]
    first, last = next(row for row in ranks if row["step"] >= FIRST_STEP), ranks[-1]
    seconds = last["training_seconds"] - first["training_seconds"]
    steps, busy = last["step"] - first["step"], 0.0
    for before, row in pairwise(ranks):
        if before["step"] >= first["step"]:
            busy += (row["step"] - before["step"]) * statistics.mean(row["compute_ms"]) / 1e3
    return steps / seconds, busy / seconds


def only(ways: dict[str, list[str]], chosen: set[str]) -> dict[str, list[str]]:
    """The exact way, and those that are chosen; all of them where none is."""
    return {way: flags for way, flags in ways.items() if not chosen or way == "exact" or way in chosen}


def show_bytes(flags: list[str], chosen: set[str]) -> None:
    """Bytes of a step, from runs of 30 and 130 steps: the difference has no start, no evaluation and no end."""
    print("| exchange | MB a step from nodea | of the exact | of the gradients |\n| --- | --- | --- | --- |")
    found, gradients = {}, 4 * 737_360 / 1e6  # of that model, in MB
    with hosts() as interface:
        for way, more in only(WAYS, chosen).items():
            one, many = (
                measure([*flags, *more, "--global-batch", "32", "--micro-batch", "4"], n, interface)[0]
                for n in (30, 130)
            )
            found[way] = (many - one) / 100 / 1e6
            cells = [way, f"{found[way]:.3f}", f"{found[way] / found['exact']:.3f}", f"{found[way] / gradients:.3f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


def show_speed(flags: list[str], repeat: int, ways: list[str], **link) -> None:
    print(f"\n{link}\n\n| exchange | steps/s | times the exact | computing |\n| --- | --- | --- | --- |")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with hosts(**link) as interface:
        for _ in range(repeat):
            for way in ways:
                all_flags = [*flags, *LONGER_TEXT, "--global-batch", "64", *WAYS[way]]
                found[way].append(speed(measure(all_flags, 220, interface)[1]))
    for way in ways:
        rate, busy = (statistics.median(values) for values in zip(*found[way], strict=True))
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(found[way], found["exact"], strict=True))
        print(f"| {way} | {rate:.2f} | {ratio:.2f} | {busy:.2f} |", flush=True)


def show_loss(flags: list[str], chosen: set[str]) -> None:
    print("\n| exchange | held-out loss | against the exact |\n| --- | --- | --- |")
    exact = 0.0
    nesterov = ["--outer-lr", "0.7", "--outer-momentum", "0.9"]
    others = {f"{way}, Nesterov": [*WAYS[way], *nesterov] for way in ("every 50", "every 100")}
    for steps in ("5", "13", "25", "50"):
        others[f"every {steps}"] = ["--sync-every", steps]
        others[f"every {steps}, lr and clipping x 1.41"] = ["--sync-every", steps, *LARGER]
    # A guess: AdamW on half of the batch has 1/1.41 of the signal, and a larger outer step gives it back. It does not.
    for outer in ("1.2", "1.41"):
        others[f"every 50, outer lr {outer}"] = ["--sync-every", "50", "--outer-lr", outer]
        others[f"every 25, bf16, outer lr {outer}"] = [*WAYS["every 25, bf16"], "--outer-lr", outer]
    others["every 50, outer momentum 0.3"] = ["--sync-every", "50", "--outer-momentum", "0.3"]
    others["exact, lr and clipping x 1.41"] = LARGER
    others["exact, half of the batch, as many steps"] = ["--global-batch", "16", "--epochs", "10"]
    others |= {f"{way}, four times as long": [*WAYS[way], "--epochs", "80"] for way in ("exact", "every 50")}
    others |= {f"{way}, lr x 2": [*WAYS[way], "--lr", "4e-3"] for way in ("exact", "every 50")}
    with hosts() as interface:
        for way, more in only({**WAYS, **others}, chosen).items():
            with tempfile.TemporaryDirectory() as folder:
                rows = train(Path(folder) / "job", [*RECIPE, *flags, *more], interface)
            loss = [row["loss"] for row in rows if row["kind"] == "eval"][-1]
            exact = exact or loss
            print(f"| {way} | {loss:.4f} | {loss / exact:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="bytes,100mbit,delay,loss")
    parser.add_argument("--ways", default="", help="these beside the exact one, with ; between them")
    parser.add_argument("--cache-dir", type=Path, default=ROOT / "cache")
    args = parser.parse_args()
    parts, corpus = args.only.split(","), ["--cache-dir", str(args.cache_dir.resolve())]
    chosen = set(filter(None, args.ways.split(";")))
    flags = [*MODEL, *corpus]
    if "bytes" in parts:
        show_bytes(flags, chosen)
    if "100mbit" in parts:
        show_speed(flags, args.repeat, list(only(WAYS, chosen)) if chosen else LIMITED, rate="100mbit")
    if "delay" in parts:
        show_speed(flags, args.repeat, list(only(WAYS, chosen)) if chosen else DELAYED, delay_ms=20)
    if "loss" in parts:
        show_loss(corpus, chosen)
    print(f"\nMedian of {args.repeat}. {describe()}")


if __name__ == "__main__":
    main()
