"""--elastic on two hosts: a network that is split, and a host that is gone and comes back."""

import os
import signal
from pathlib import Path

import pytest

from tests.harness import ROOT, losses, rows, rows_so_far, wait_until
from tests.trainers import Patient

PORT = 29670
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")  # as on another machine


@pytest.fixture
def undisturbed(tmp_path_factory):
    return losses(Patient.undisturbed(tmp_path_factory.getbasetemp()))


class Job:
    """3+1 ranks on the two hosts, which share a folder."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.trainer = hosts, folder, Patient(folder.parent)
        self.first, self.second = self.start(0), self.start(1)
        self.wait_for("train", 20)

    def start(self, node: int):
        layout = ("-n", 2, "-g", "3,1", "--device", "cpu", "--elastic", 1, "--timeout", 20, "--master-port", PORT)
        where = () if node == 0 else ("--master-addr", "10.77.0.1")
        command = (
            *OWN_PIDS,
            "python",
            self.trainer.script,
            *layout,
            *Patient.FLAGS,
            "-i",
            node,
            *where,
            "--out-dir",
            self.folder,
        )
        return self.hosts.on(("nodea", "nodeb")[node], *command)

    def wait_for(self, kind: str, count: int) -> None:
        wait_until(lambda: len(rows_so_far(self.folder, kind)) >= count)

    def kill(self, node: int) -> None:
        for pid in self.hosts.processes():
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if "mnist-distributed" in title and f"node {node}" in title:
                os.kill(pid, signal.SIGKILL)


def test_of_a_split_network_the_majority_goes_on_and_the_other_side_ends(hosts, tmp_path, undisturbed):
    job = Job(hosts, tmp_path / "run")
    hosts.cut()
    try:
        second = job.second.result()
        job.wait_for("members", 1)
    finally:
        hosts.mend()
    assert second.code == 1 and "1 of 4 ranks are no majority, so this side ends" in second.output, second.output
    again = job.start(1)
    job.wait_for("members", 2)
    last = job.trainer.end(tmp_path / "run")
    for result in hosts.together(job.first, again):
        assert result.code == 0, result.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed[:last], rel=1e-9)
    first, last = rows(tmp_path / "run", "members")
    assert "lost rank 3, node 1 (nodeb): does not answer" in first["cause"]
    assert [len(row["ranks"]) for row in (first, last)] == [3, 4]


def test_the_masters_host_dies_and_comes_back(hosts, tmp_path, undisturbed):
    job = Job(hosts, tmp_path / "run")
    job.kill(0)
    job.wait_for("members", 1)
    job.first.result()
    again = job.start(0)
    wait_until(lambda: len((rows_so_far(tmp_path / "run", "members") or [{"ranks": []}])[-1]["ranks"]) == 4)
    last = job.trainer.end(tmp_path / "run")
    for result in hosts.together(again, job.second):
        assert result.code == 0, result.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed[:last], rel=1e-9)


def test_a_preempted_node_leaves_and_comes_back_and_nothing_is_lost(slurm, warm, tmp_path, undisturbed):
    """An array of two tasks, each with a node of its own; a job of a partition that comes first takes one of them."""
    trainer = Patient(tmp_path)
    options = ("--parsable", "--array=0-1", "--exclusive", f"--chdir={tmp_path}", f"--output={tmp_path}/log-%a")
    script = ROOT / "launch_scripts" / "slurm_elastic.sbatch"
    training = (*Patient.FLAGS, "--device", "cpu", "--timeout", 20, "--no-plot")
    number = slurm("sbatch", *options, script, trainer.script, *training, PYTHON=str(warm)).result().output.split()[-1]
    folder = tmp_path / "runs" / f"slurm-{number}"

    def ranks() -> int:
        found = rows_so_far(folder, "members")
        return len(found[-1]["ranks"]) if found else 0

    wait_until(lambda: ranks() == 2)
    urgent = ("--parsable", "--partition=urgent", "--exclusive", "--nodelist=nodeb", "--output=/dev/null")
    first = slurm("sbatch", *urgent, "--wrap", "sleep infinity").result().output.split()[-1]
    wait_until(lambda: ranks() == 1)
    slurm("scancel", first).result()
    wait_until(lambda: ranks() == 2)
    last = trainer.end(folder)
    wait_until(lambda: not slurm("squeue", "--noheader", "--jobs", number).result().output.strip())
    assert losses(folder) == pytest.approx(undisturbed[:last], rel=1e-9)
    joined, left, again = [row["cause"] for row in rows(folder, "members")]
    assert "let in rank" in joined and "left: SIGTERM" in left and "let in rank" in again
