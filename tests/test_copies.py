"""--elastic where each node has a disk of its own: the run's files are on each, and no disk may take them along.

The nodes are started in folders of their own, with the same relative --out-dir, as on machines that share none.
"""

import os
import shutil
import time

import pytest

from common.launch.addresses import free_port
from common.record import checkpoint
from common.record.metrics import read_metrics
from tests.harness import MNIST, kill, largest_difference, losses, play, rows, rows_so_far, start, weights

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--epochs", 100, "--device", "cpu")
LONG = (*FLAGS, "--max-steps", 900)
ELASTIC = ("--elastic", 1, "--timeout", 20)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    play(MNIST, (1,), folder, *LONG)
    return folder


class Nodes:
    """2+1 ranks, each node in a folder of its own."""

    def __init__(self, folder, *flags):
        self.folder, self.flags = folder, (*LONG, *ELASTIC, *flags)
        self.where = ("-n", 2, "-g", "2,1", "--master-addr", "127.0.0.1", "--master-port", free_port())
        self.started = [self.start(node) for node in (0, 1)]

    def start(self, node):
        disk = self.folder / f"disk{node}"
        disk.mkdir(exist_ok=True)
        return start("python", MNIST, *self.where, "-i", node, *self.flags, "--out-dir", "run", cwd=disk)

    def files(self, node):
        return self.folder / f"disk{node}" / "run"

    def wait_for(self, node, kind, count):
        deadline = time.monotonic() + 60
        while len(rows_so_far(self.files(node), kind)) < count:
            assert time.monotonic() < deadline and self.started[node].process.poll() is None
            time.sleep(0.1)

    def kill(self, node):
        kill(self.started[node].process.pid)
        self.started[node].process.wait()


def require_same(folder, undisturbed):
    assert [row["step"] for row in rows(folder, "train")] == list(range(1, 901))
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=1e-9)
    assert largest_difference(weights(folder), weights(undisturbed)) < 1e-9


def test_both_disks_have_all_files_of_the_run(undisturbed, tmp_path):
    nodes = Nodes(tmp_path)
    results = [node.result() for node in nodes.started]
    assert [result.code for result in results] == [0, 0], results
    for node in (0, 1):
        require_same(nodes.files(node), undisturbed)
        assert (nodes.files(node) / "curves.png").exists() and (nodes.files(node) / "run.json").exists()
    metrics = [[row for row in read_metrics(nodes.files(node) / "metrics.jsonl") if row["kind"] == "eval"]
               for node in (0, 1)]  # fmt: skip
    assert [row["loss"] for row in metrics[0]] == [row["loss"] for row in metrics[1]]
    assert "done " not in results[1].output


def test_a_disk_that_is_lost_with_its_node_takes_nothing_along(undisturbed, tmp_path):
    nodes = Nodes(tmp_path)
    nodes.wait_for(1, "train", 100)
    nodes.kill(0)
    shutil.rmtree(nodes.files(0))
    result = nodes.started[1].result()
    assert result.code == 0, result.output
    require_same(nodes.files(1), undisturbed)
    assert len(rows(nodes.files(1), "members")) == 1
    evaluated = [row["step"] for row in rows(nodes.files(1), "eval")]
    assert evaluated == [row["step"] for row in rows(undisturbed, "eval")]


def test_a_node_that_comes_back_with_an_empty_disk_gets_the_rows_that_it_has_missed(undisturbed, tmp_path):
    nodes = Nodes(tmp_path)
    nodes.wait_for(0, "train", 100)
    nodes.kill(1)
    shutil.rmtree(nodes.files(1))
    nodes.wait_for(0, "members", 1)
    nodes.started[1] = nodes.start(1)
    results = [node.result() for node in nodes.started]
    assert [result.code for result in results] == [0, 0], results
    require_same(nodes.files(1), undisturbed)


def test_a_shared_disk_has_one_set_of_files(tmp_path):
    play(MNIST, (1, 1), tmp_path / "run", *FLAGS, "--max-steps", 30, *ELASTIC)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not any(name.startswith(".disk") for name in names), names
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(1, 31))


def test_a_resume_from_the_disk_that_is_behind_is_refused(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.wait_for(1, "train", 100)
    nodes.kill(0)
    nodes.wait_for(1, "members", 1)
    nodes.wait_for(1, "train", 400)
    nodes.kill(1)
    ahead = checkpoint.find(nodes.files(1)).state["step"]
    again = Nodes(tmp_path, "--resume")
    for node in again.started:
        result = node.result()
        assert result.code == 2, result.output
        assert (
            f"node 1 ({os.uname().nodename}, rank 2) has step {ahead} of this run in run on its own disk"
            in result.output
        )
    assert checkpoint.find(nodes.files(1)).state["step"] == ahead


def test_a_disk_with_another_run_is_not_overwritten(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.wait_for(1, "train", 20)
    nodes.kill(0)
    nodes.kill(1)
    shutil.rmtree(nodes.files(0))
    before = (nodes.files(1) / "metrics.jsonl").read_text()
    for node in Nodes(tmp_path).started:
        result = node.result()
        assert result.code == 2 and "holds a run already on the disk of node 1" in result.output, result.output
    assert (nodes.files(1) / "metrics.jsonl").read_text() == before
