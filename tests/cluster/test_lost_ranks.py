"""A rank or a host that is lost is named on the other host, which cannot look up its processes."""

import os
import re
import signal
from pathlib import Path

from tests.harness import MNIST, rows_so_far, wait_until

FLAGS = ("-n", 2, "-g", "2,3", "--device", "cpu", "--dataset", "digits", "--epochs", 5000, "--precision", "fp64")
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")  # as on another machine
PORT = 29650


def trained_until_killed(hosts, folder, wanted: str):
    """Both hosts' results, after the processes on nodeb whose command has `wanted` in it were killed in training."""
    nodes = [
        hosts.on(host, *OWN_PIDS, "python", MNIST, *FLAGS, "-i", number, "--master-port", PORT, *more)
        for number, (host, more) in enumerate([
            ("nodea", ("--out-dir", folder)),
            ("nodeb", ("--master-addr", "10.77.0.1", "--out-dir", folder)),
        ])
    ]  # fmt: skip
    wait_until(lambda: rows_so_far(folder, "train"), nodes[0])
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in hosts.processes()}
    victims = [pid for pid, title in titles.items() if wanted in title and "node 1" in title]
    assert victims, titles
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none can say what has happened to another one
        for pid in victims:
            os.kill(pid, number)
    return hosts.together(*nodes)


def errors(output: str) -> dict[int, str]:
    """What each rank has said as an error."""
    return {int(rank): said for rank, said in re.findall(r"^\[(\d+)[^]]*\] error: (.*)$", output, re.MULTILINE)}


def test_a_worker_that_is_killed_is_named_on_both_hosts(hosts, tmp_path):
    first, second = trained_until_killed(hosts, tmp_path, "rank 3 of 5")
    said = errors(first.output) | errors(second.output)
    assert set(said) == {0, 1, 2, 4}
    killed = "was ended by SIGKILL (out of memory? see `dmesg`)"
    assert set(said.values()) == {f"lost rank 3, node 1 (nodeb): {killed}; see the log of that node"}


def test_a_host_whose_processes_are_all_killed_is_named_with_its_ranks(hosts, tmp_path):
    first, _ = trained_until_killed(hosts, tmp_path, "mnist-distributed.py")
    line = "lost contact with one of ranks 2 to 4, node 1 (nodeb), which do not answer: see the log of that node"
    assert errors(first.output) == {0: line, 1: line}
