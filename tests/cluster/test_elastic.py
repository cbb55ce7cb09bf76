"""--elastic on two hosts: a network that is split, and a host that is gone and comes back."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.harness import MNIST, losses, play, rows, rows_so_far

TRAINING = ("--dataset", "digits", "--global-batch", 64, "--precision", "fp64", "--epochs", 300, "--max-steps", 4000)
PORT = 29670
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")  # as on another machine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    play(MNIST, (1,), folder, *TRAINING)
    return losses(folder)


class Job:
    """3+1 ranks on the two hosts, which share a folder."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.first, self.second = self.start(0), self.start(1)
        self.wait_for("train", 100)

    def start(self, node: int):
        layout = ("-n", 2, "-g", "3,1", "--device", "cpu", "--elastic", 1, "--timeout", 10, "--master-port", PORT)
        where = () if node == 0 else ("--master-addr", "10.77.0.1")
        command = (*OWN_PIDS, "python", MNIST, *layout, *TRAINING, "-i", node, *where, "--out-dir", self.folder)
        return self.hosts.on(("nodea", "nodeb")[node], *command)

    def wait_for(self, kind: str, count: int) -> None:
        deadline = time.monotonic() + 90
        while len(rows_so_far(self.folder, kind)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def kill(self, node: int) -> None:
        for pid in self.hosts.processes():
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if "mnist-distributed" in title and f"node {node}" in title:
                os.kill(pid, signal.SIGKILL)


def test_of_a_split_network_the_majority_goes_on_and_the_other_side_ends(hosts, tmp_path, undisturbed):
    job = Job(hosts, tmp_path / "run")
    hosts.cut()
    try:
        second = job.second.result(60)
        job.wait_for("members", 1)
    finally:
        hosts.mend()
    assert second.code == 1 and "1 of 4 ranks are no majority, so this side ends" in second.output, second.output
    again = job.start(1)
    job.wait_for("members", 2)
    for result in hosts.together(job.first, again, timeout=180):
        assert result.code == 0, result.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-9)
    first, last = rows(tmp_path / "run", "members")
    assert "lost rank 3, node 1 (nodeb): does not answer" in first["cause"]
    assert [len(row["ranks"]) for row in (first, last)] == [3, 4]


def test_the_masters_host_dies_and_comes_back(hosts, tmp_path, undisturbed):
    job = Job(hosts, tmp_path / "run")
    job.kill(0)
    job.wait_for("members", 1)
    job.first.result(20)
    again = job.start(0)
    job.wait_for("members", 2)
    for result in hosts.together(again, job.second, timeout=180):
        assert result.code == 0, result.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-9)
