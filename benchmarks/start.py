#!/usr/bin/env python3
"""How long a start takes: --help, the first step of one rank, of eight and of two nodes, hello with very many ranks.

    start.py [--repeat 3] [--ranks 16,64,256]

Beside them stand `import torch` alone, and the import of the trainer, which are a part of each start.

The starts are run in turns, hello once. Memory is what all processes of hello hold together at most (shared pages
counted once, PSS; looked at each second); requests are those that the ranks make to the store, ours to join and torch's
to connect them.
"""

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from benchmarks.processes import ended
from common.launch import cli, start
from common.launch.addresses import free_port

TRAINER = ROOT / "mnist_ddp" / "mnist-distributed.py"


def seconds_of(*command: object) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_step(*nodes: int) -> float:
    """Seconds from the commands to the first row of metrics.jsonl, on nodes with so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-n", len(nodes), "-g", ",".join(map(str, nodes)), "--device", "cpu", "--dataset", "digits"]
        flags += ["--max-steps", 1, "--out-dir", folder]
        flags += ["--master-addr", "127.0.0.1", "--master-port", free_port()] if len(nodes) > 1 else []
        commands = [[sys.executable, TRAINER, *map(str, flags), "-i", str(node)] for node in range(len(nodes))]
        began = time.perf_counter()
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        metrics = Path(folder) / "metrics.jsonl"
        with ended(started):
            while not (metrics.exists() and metrics.stat().st_size) and started[0].poll() is None:
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"start.py: -g {flags[3]} failed")
    return seconds


def hello(ranks: int) -> tuple[float, float, str]:
    """(seconds, GB, the ranks' line about their requests) of `ranks` ranks that join, connect and leave."""
    command = [sys.executable, __file__, "-g", str(ranks), "--device", "cpu"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = [0]
    watcher = threading.Thread(target=_watch_memory, args=(process, peak), daemon=True)
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"start.py: hello with {ranks} ranks failed")
    return seconds, peak[0] / 1e9, next(line for line in output.splitlines() if line.startswith("requests"))


def _watch_memory(process: subprocess.Popen, peak: list[int]) -> None:
    while process.poll() is None:
        total = 0
        try:
            main = psutil.Process(process.pid)
            for one in [main, *main.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    total += one.memory_full_info().pss
        except psutil.Error:
            pass
        peak[0] = max(peak[0], total)
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", default="16,64,256")
    args = parser.parse_args()
    ways: dict[str, Callable[[], float]] = {
        "`--help`": lambda: seconds_of(TRAINER, "--help"),
        "`import torch`": lambda: seconds_of("-c", "import torch"),
        "`import mnist_ddp.train`": lambda: seconds_of("-c", "import mnist_ddp.train"),
        "`-g 1`, to the first step": lambda: first_step(1),
        "`-g 8`, to the first step": lambda: first_step(8),
        "`-n 2 -g 1,1`, to the first step": lambda: first_step(1, 1),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.repeat):
        for way, measure in ways.items():
            found[way].append(measure())
    _, of_torch, _, one, *_ = found.values()
    print("| start | seconds (median) | of `import torch` | of `-g 1` |\n| --- | --- | --- | --- |")
    for way, seconds in found.items():
        ratios = (statistics.median(a / b for a, b in zip(seconds, base, strict=True)) for base in (of_torch, one))
        print(f"| {way} | {statistics.median(seconds):.2f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    print()
    if not args.ranks:
        print(describe())
        return
    print("| hello, ranks | seconds | GB | requests to join, a rank | requests by torch to connect, a rank |")
    print("| --- | --- | --- | --- | --- |")
    for ranks in map(int, args.ranks.split(",")):
        seconds, memory, said = hello(ranks)
        join, connect = (int(number) / ranks for number in re.findall(r"(?:join|connect) (\d+)", said))
        print(f"| {ranks} | {seconds:.1f} | {memory:.2f} | {join:.1f} | {connect:.0f} |", flush=True)
    print(f"\n{describe()}")


if __name__ == "__main__":
    if "-g" in sys.argv:  # as `hello` starts it
        start.main(cli.parser(__doc__), "benchmarks.counted_hello:greet")
    main()
