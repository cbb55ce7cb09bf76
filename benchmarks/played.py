"""A run whose nodes are all on this machine, of which benchmarks kill and start some."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

import psutil

from common.launch.addresses import free_port
from common.record.metrics import read_metrics

LIMIT_SECONDS = 120.0
PROCESS_ENDED = (psutil.NoSuchProcess, psutil.AccessDenied)


class PlayedRun:
    """The nodes of a run, and when they have said what."""

    def __init__(self, script: Path, gpus: tuple[int, ...], folder: Path, *flags: object):
        self.script, self.gpus, self.folder = script, gpus, folder
        self.lines = list[tuple[float, str]]()  # (time.monotonic(), line)
        layout = ["-n", len(gpus), "-g", ",".join(map(str, gpus))]
        layout += ["--master-addr", "127.0.0.1", "--master-port", free_port()] if len(gpus) > 1 else []
        self.flags = list(map(str, [*layout, *flags, "--out-dir", folder]))
        self.joined = dict[int, list[str]]()  # the flags of nodes that have joined
        self.nodes = [self._started(node) for node in range(len(gpus))]

    def start(self, node: int) -> None:
        """Type a node's command again."""
        self.nodes[node] = self._started(node)

    def address(self) -> str:
        """Where others join the run now, which has said so."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := re.findall(r"joins by: .* --join (\S+)", self.said())):
            if time.monotonic() > deadline:
                raise SystemExit(f"the run does not say how others join:\n{self.said()}")
            time.sleep(0.02)
        return found[-1]

    def join(self, gpus: int) -> int:
        """Start a machine that joins the run. Returns its number."""
        node, self.gpus = len(self.nodes), (*self.gpus, gpus)
        self.join_as(node)
        self.nodes.append(self._started(node))
        return node

    def join_as(self, node: int) -> None:
        """From now on, this machine is started to join the run."""
        self.joined[node] = ["--join", self.address(), "-g", str(self.gpus[node]), "--device", "cpu"]

    def _started(self, node: int) -> subprocess.Popen:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{self.script.parents[1]}:{ROOT}"}
        process = subprocess.Popen(
            self.command(node), cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(process, node), daemon=True).start()
        return process

    def command(self, node: int) -> list[str]:
        which = ["-i", str(node)] if len(self.gpus) > 1 else []
        return [sys.executable, str(self.script), *self.joined.get(node, [*self.flags, *which])]

    def _read(self, process: subprocess.Popen, node: int) -> None:
        assert process.stdout
        for line in process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            self.heard(node, line.rstrip())

    def heard(self, node: int, line: str) -> None:
        """Called with every line that a node prints."""

    def said(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def rows(self, kind: str) -> list[dict]:
        with contextlib.suppress(OSError):
            return [row for row in read_metrics(self.folder / "metrics.jsonl") if row["kind"] == kind]
        return []

    def steps(self) -> int:
        """The last step that has been written."""
        with contextlib.suppress(OSError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return max(map(int, re.findall(rb'"kind": "train", "step": (\d+)', file.read())), default=0)
        return 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.steps() < step:
            if time.monotonic() > deadline or any(node.poll() for node in self.nodes):
                raise SystemExit(f"the run has not come to step {step}:\n{self.said()}")
            time.sleep(0.02)

    def node_of(self, rank: int) -> int:
        return next(number for number in range(len(self.gpus)) if rank < sum(self.gpus[: number + 1]))

    def workers(self, node: int) -> dict[int, psutil.Process]:
        """The processes that train on a node now, by their ranks of now."""
        supervisor, found = self.nodes[node].pid, dict[int, psutil.Process]()
        with contextlib.suppress(*PROCESS_ENDED):
            for one in psutil.Process(supervisor).children():
                with contextlib.suppress(*PROCESS_ENDED):
                    if title := re.search(r" rank (\d+) of", " ".join(one.cmdline())):
                        found[int(title[1])] = one
        return found

    def kill_node(self, node: int) -> None:
        """The launcher of a node and all that it has started, by SIGKILL."""
        with contextlib.suppress(*PROCESS_ENDED):
            supervisor = psutil.Process(self.nodes[node].pid)
            for one in [supervisor, *supervisor.children(recursive=True)]:
                with contextlib.suppress(*PROCESS_ENDED):
                    one.kill()

    def end(self) -> None:
        for number, node in enumerate(self.nodes):
            self.kill_node(number)
            node.wait()
