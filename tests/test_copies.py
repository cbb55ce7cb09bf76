"""--elastic where each node has a disk of its own: the run's files are on each, and no disk may take them along.

The nodes are started in folders of their own, with the same relative --out-dir, as on machines that share none.
"""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from common.record import checkpoint
from tests.harness import Result, nodes_of, play, playing, rows, rows_so_far, wait_until
from tests.test_elastic import ELASTIC, require_same, undisturbed  # noqa: F401 (a fixture)
from tests.trainers import EPOCH, Patient


def writes(process: psutil.Process) -> bool:
    """May this process still do something?"""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Nodes:
    """A patient run of 2+1 ranks under way, each node in a folder of its own, or another one in the same folders."""

    def __init__(self, folder: Path, *flags: object, patient: Patient | None = None):
        self.folder, self.patient = folder, patient or Patient(folder)
        self.nodes = nodes_of((2, 1), Path("run"), *Patient.FLAGS, *ELASTIC, *flags)
        for node in self.nodes:
            node.flags.remove("--no-plot")
        self.playing = [self.start(node) for node in (0, 1)]

    def start(self, node: int) -> playing:
        disk = self.folder / f"disk{node}"
        disk.mkdir(exist_ok=True)
        return playing(self.patient.script, [self.nodes[node]], self.folder, cwd=disk)

    def files(self, node: int) -> Path:
        return self.folder / f"disk{node}" / "run"

    def wait_for(self, node: int, kind: str, count: int = 1) -> None:
        """Wait until there are so many rows of this kind on a node's disk."""
        wait_until(lambda: len(rows_so_far(self.files(node), kind)) >= count, self)

    def wait_for_members(self, node: int, *there: int) -> None:
        """Wait until a node's disk says that the run goes on with these ranks."""

        def found() -> list[int]:
            changes = rows_so_far(self.files(node), "members")
            return sorted(one["original"] for one in changes[-1]["ranks"]) if changes else []

        wait_until(lambda: found() == list(there), self)

    def kill(self, node: int) -> None:
        """End a node, and wait until none of its processes writes any more."""
        processes = psutil.Process(self.playing[node].processes[0].pid).children(recursive=True)
        self.playing[node].kill()
        wait_until(lambda: not any(map(writes, processes)))

    def goes_on(self) -> bool:
        return any(node.goes_on() for node in self.playing)

    def said(self) -> str:
        return "\n".join(node.said() for node in self.playing)

    def results(self) -> list[Result]:
        return [result for node in self.playing for result in node.results()]


def test_both_disks_have_all_files_of_the_run(undisturbed, tmp_path):  # noqa: F811
    nodes = Nodes(tmp_path)
    last = nodes.patient.end(nodes.files(0))
    results = nodes.results()
    assert [result.code for result in results] == [0, 0], results
    for node in (0, 1):
        require_same(nodes.files(node), undisturbed, last)
        assert (nodes.files(node) / "curves.png").exists() and (nodes.files(node) / "run.json").exists()
    first, second = ([row["loss"] for row in rows(nodes.files(node), "eval")] for node in (0, 1))
    assert first == second
    assert "done " not in results[1].output


def test_a_disk_that_is_lost_with_its_node_takes_nothing_along(undisturbed, tmp_path):  # noqa: F811
    nodes = Nodes(tmp_path)
    nodes.wait_for(1, "train", 2 * EPOCH)
    nodes.kill(0)
    shutil.rmtree(nodes.files(0))
    nodes.wait_for_members(1, 2)
    last = nodes.patient.end(nodes.files(1))
    (result,) = nodes.playing[1].results()
    assert result.code == 0, result.output
    require_same(nodes.files(1), undisturbed, last)
    assert len(rows(nodes.files(1), "members")) == 1


@pytest.mark.long
def test_a_node_that_comes_back_with_an_empty_disk_gets_the_rows_that_it_has_missed(undisturbed, tmp_path):  # noqa: F811
    nodes = Nodes(tmp_path)
    nodes.wait_for(0, "train", 2 * EPOCH)
    nodes.kill(1)
    shutil.rmtree(nodes.files(1))
    nodes.wait_for_members(0, 0, 1)
    nodes.playing[1] = nodes.start(1)
    nodes.wait_for_members(0, 0, 1, 2)
    last = nodes.patient.end(nodes.files(0))
    assert [result.code for result in nodes.results()] == [0, 0], nodes.said()
    require_same(nodes.files(1), undisturbed, last)


@pytest.mark.long
def test_a_node_that_comes_back_to_a_disk_that_takes_no_files_goes_on_without_copies(undisturbed, tmp_path):  # noqa: F811
    nodes = Nodes(tmp_path)
    nodes.wait_for(0, "train", 2 * EPOCH)
    nodes.kill(1)
    metrics = nodes.files(1) / "metrics.jsonl"
    metrics.unlink()
    (metrics / "in the way").mkdir(parents=True)  # stands for a full disk: rows cannot be put there
    nodes.wait_for_members(0, 0, 1)
    nodes.playing[1] = nodes.start(1)
    nodes.wait_for_members(0, 0, 1, 2)
    last = nodes.patient.end(nodes.files(0))
    results = nodes.results()
    assert [result.code for result in results] == [0, 0], nodes.said()
    require_same(nodes.files(0), undisturbed, last)
    assert "cannot be written (Is a directory): no copies of the run's files here" in results[1].output
    assert [one.name for one in nodes.files(1).iterdir() if one.name.startswith(".metrics")] == []


def test_a_shared_disk_has_one_set_of_files(tmp_path):
    play(Patient(tmp_path).script, (1, 1), tmp_path / "run", *Patient.FLAGS, "--max-steps", 30, *ELASTIC)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not any(name.startswith(".disk") for name in names), names
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(1, 31))


def test_a_resume_from_the_disk_that_is_behind_is_refused(tmp_path):
    nodes = Nodes(tmp_path)
    latest = [nodes.files(node) / "checkpoints" / "latest" for node in (0, 1)]
    wait_until(lambda: all(link.exists() for link in latest), nodes)
    nodes.kill(0)
    wait_until(lambda: latest[1].resolve().name > latest[0].resolve().name, nodes)
    nodes.kill(1)
    ahead = checkpoint.find(nodes.files(1)).state["step"]
    said = f"node 1 ({os.uname().nodename}, rank 2) has step {ahead} of this run in run on its own disk"
    for result in Nodes(tmp_path, "--resume", patient=nodes.patient).results():
        assert result.code == 2 and said in result.output, result.output
    assert checkpoint.find(nodes.files(1)).state["step"] == ahead


def test_a_disk_with_another_run_is_not_overwritten(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.wait_for(1, "train", 20)
    nodes.kill(0)
    nodes.kill(1)
    shutil.rmtree(nodes.files(0))
    before = (nodes.files(1) / "metrics.jsonl").read_text()
    for result in Nodes(tmp_path, patient=nodes.patient).results():
        assert result.code == 2 and "holds a run already on the disk of node 1" in result.output, result.output
    assert (nodes.files(1) / "metrics.jsonl").read_text() == before
