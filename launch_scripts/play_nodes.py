#!/usr/bin/env python3
"""Run every node of a layout on this machine: one terminal, real processes, the loopback interface.

    play_nodes.py mnist_ddp/mnist-distributed.py -n 2 -g 3,1 --device cpu ...
    play_nodes.py -m common.doctor -n 2 -g 2,1 --device cpu
    play_nodes.py --slow 3=0.25 mnist_ddp/mnist-distributed.py -n 2 -g 3,1 --device cpu ...
    play_nodes.py --link 100Mbit,20ms mnist_ddp/mnist-distributed.py -n 2 -g 3,1 --device cpu ...

Starts the given script or module once for each node, adds `-i 0`, `-i 1`, ... and a master address, and shows the
output of each node with the node's number in front of each line. When one node fails, the others may go on for another
20 seconds, to print what they know, and are ended after that; with `--elastic` they go on. Ctrl-C ends all of them.

`--slow 3=0.25` makes rank 3 a machine of a quarter of the speed: its process is stopped and continued in short turns
(several: `--slow 1=0.5,3=0.25`). `--link 100Mbit,20ms` joins the nodes by a cable: each sends so much, which arrives so
much later; it needs Linux, but not root. For demos and study: on real machines each node runs its own command.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from common.launch import values
from common.launch.addresses import free_port
from launch_scripts.played_link import Hosts

GRACE_SECONDS = 20.0  # after one node has failed, for the others to end by themselves
KILL_SECONDS = 30.0  # after that, from SIGTERM to SIGKILL
LOOK_SECONDS = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERRUPTED = 130  # as shells report SIGINT
TURN_SECONDS = 0.02  # of a slow rank: it runs for a part of this, and is stopped for the rest
NO_HOSTS = "it needs Linux, the command `ip` (iproute2) and user namespaces, which root has where others may not"


def main() -> int:
    command, speeds, link = sys.argv[1:], dict[int, float](), None
    try:
        while command[:1] in (["--slow"], ["--link"]):
            flag, value, command = command[0], "".join(command[1:2]), command[2:]
            if flag == "--slow":
                speeds = values.slow_ranks(value)
            else:
                link = values.link(value)
    except ArgumentTypeError as error:
        print(f"error: {flag} {error}", file=sys.stderr)
        return 2
    if not _is_complete(command):
        print(__doc__, file=sys.stderr)
        return 2
    gpus = command[command.index("-g") + 1]
    ranks = sum(int(one) for one in gpus.split(",") if one.isdigit())
    if speeds and max(speeds) >= ranks:
        print(f"error: --slow names rank {max(speeds)}, but -g {gpus} has ranks 0 to {ranks - 1}", file=sys.stderr)
        return 2
    port, count = str(free_port()), len(gpus.split(","))
    try:
        hosts = Hosts(count, *link) if link else None
    except OSError as error:
        print(f"error: --link: {error.strerror or error}: {NO_HOSTS}", file=sys.stderr)
        return 1
    master, over = hosts.address(0) if hosts else "127.0.0.1", threading.Event()
    nodes: list[subprocess.Popen[str]] = []
    slow = [threading.Thread(target=_slow_down, args=(nodes, *one, over), daemon=True) for one in speeds.items()]
    # Ctrl-C and `kill` end the nodes from the first on. They raise nothing: between the start of a node and that of the
    # thread which shows its lines, that would lose the lines.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: signals.append(received))
    try:
        for number in range(count):
            own = ["-i", str(number), "--master-addr", master, "--master-port", port]
            node = _start([*command, *own], partial(hosts.enter, number) if hosts else None)
            nodes.append(node)
            threading.Thread(target=show, args=(number, node.stdout)).start()
        for thread in slow:
            thread.start()
        return _wait_for_all(nodes, signals, goes_on="--elastic" in command)
    finally:
        over.set()
        for thread in slow:
            if thread.is_alive():
                thread.join()
        _end(nodes)
        if hosts:
            hosts.close()


def _slow_down(nodes: list[subprocess.Popen[str]], rank: int, speed: float, over: threading.Event) -> None:
    """Let the process of a rank run for this part of the time, from when it trains until `over`."""
    process: psutil.Process | None = None
    while not over.wait(TURN_SECONDS * speed):
        try:
            process = process or _process_of(nodes, rank)
            if process is None:
                over.wait(LOOK_SECONDS)
                continue
            process.suspend()
            over.wait(TURN_SECONDS * (1 - speed))
            process.resume()
        except psutil.NoSuchProcess:  # --elastic starts another one
            process = None
    if process:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _process_of(nodes: list[subprocess.Popen[str]], rank: int) -> psutil.Process | None:
    """The process of a rank, which has it in its title; None while it has not begun."""
    for node in nodes:
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(node.pid)
            for one in [launcher, *launcher.children()]:
                if re.search(rf" rank {rank} of ", " ".join(one.cmdline())):
                    return one
    return None


def _is_complete(command: list[str]) -> bool:
    """Does the command name a script or a module, and a layout?"""
    names_program = bool(command) and (command[0] == "-m" or command[0].endswith(".py"))
    return names_program and "-g" in command[1:-1]


def _start(command: list[str], enter_host: Callable[[], None] | None) -> subprocess.Popen[str]:
    """Start a node, on a host of its own or on this one. A module of this checkout is found from any folder. Ctrl-C
    does not reach the node itself: it has a session of its own, so that this program alone ends it."""

    def first() -> None:
        if sys.platform == "linux":
            _end_with_parent()
        if enter_host:
            enter_host()

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=first,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def _end_with_parent() -> None:
    """The kernel sends SIGTERM to this node when this program has been killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def show(number: int, lines: Iterable[str]) -> None:
    """Print each line whole, in one write, with the node's number in front."""
    for line in lines:
        end = "" if line.endswith("\n") else "\n"  # the last line of a node that was killed
        sys.stdout.write(f"node {number} | {line}{end}")
        sys.stdout.flush()


def _wait_for_all(nodes: list[subprocess.Popen[str]], signals: list[int], goes_on: bool) -> int:
    """Wait until all have ended, or for a limited time after one has failed, or until a signal has come. Returns the
    first failure, or 0.

    With `goes_on`, the nodes go on without one that has failed, and the run has succeeded where one of them has.
    """
    first_failure, deadline = 0, float("inf")
    running = list(nodes)
    while running and time.monotonic() < deadline:
        if signals:
            return INTERRUPTED
        time.sleep(LOOK_SECONDS)
        for node in [node for node in running if node.poll() is not None]:
            running.remove(node)
            if node.returncode and not first_failure:
                first_failure = node.returncode if node.returncode > 0 else 128 - node.returncode
                deadline = float("inf") if goes_on else time.monotonic() + GRACE_SECONDS
    return 0 if goes_on and any(node.returncode == 0 for node in nodes) else first_failure


def _end(nodes: list[subprocess.Popen[str]]) -> None:
    """No node outlives this program: SIGTERM, then SIGKILL."""
    running = [node for node in nodes if node.poll() is None]
    for node in running:
        node.terminate()
    deadline = time.monotonic() + KILL_SECONDS
    for node in running:
        try:
            node.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


if __name__ == "__main__":
    sys.exit(main())
