"""Ranks that meet over a file: they train as over TCP, also over the file of a run that died."""

import pytest
import torch.distributed as dist

from common.errors import UserError
from common.join import meeting_file
from tests.harness import MNIST, Node, losses, playing, wait_until

TRAINING = ["--dataset", "digits", "--max-steps", 2, "--device", "cpu", "--join-timeout", 60]


def nodes(meeting, folder) -> list[Node]:
    """2+1 in HetSeq's flags."""
    common = ["--distributed-init-method", f"file://{meeting}", "--distributed-world-size", 3, "--out-dir", folder]
    first = Node([*TRAINING, *common, "--distributed-gpus", 2, "--distributed-rank", 0])
    return [first, Node([*TRAINING, *common, "--distributed-gpus", 1, "--distributed-rank", 2])]


def test_ranks_meet_over_a_file_and_take_it_away(tmp_path):
    results = playing(MNIST, nodes(tmp_path / "meeting", tmp_path / "run"), tmp_path).results()
    assert [result.code for result in results] == [0, 0], results
    assert len(losses(tmp_path / "run")) == 2
    assert not (tmp_path / "meeting").exists()


def test_the_file_of_a_run_that_died_is_used_again(tmp_path):
    meeting = tmp_path / "meeting"
    dead = playing(MNIST, nodes(meeting, tmp_path / "run")[:1], tmp_path)
    wait_until(lambda: meeting.exists() and b"answer/" in meeting.read_bytes(), dead)
    dead.kill()
    results = playing(MNIST, nodes(meeting, tmp_path / "run"), tmp_path).results()
    assert [result.code for result in results] == [0, 0], results
    assert "of a run that has ended: they are ignored" in results[0].output


def test_a_file_that_another_rank_is_still_writing_is_a_store(tmp_path):
    dist.FileStore(str(tmp_path / "whole"), 2).set("key", "value")
    whole = (tmp_path / "whole").read_bytes()
    for written in (0, 4, 7, 13, 17, len(whole)):  # torch writes a length, then a key, then a length, then a value
        (tmp_path / "part").write_bytes(whole[:written])
        assert meeting_file.check(f"file://{tmp_path / 'part'}") == tmp_path / "part"


@pytest.mark.parametrize("text", ["x", "abc\n", "a list of hosts\n", "refcount/ but no length"])
def test_a_file_of_another_kind_is_not_a_store(text, tmp_path):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(UserError, match="exists and is something else"):
        meeting_file.check(f"file://{tmp_path / 'notes'}")


def test_a_rank_that_is_claimed_twice_is_refused_over_a_file_too(tmp_path):
    first, second = nodes(tmp_path / "meeting", tmp_path / "run")
    second.flags[-1] = 1
    results = playing(MNIST, [first, second], tmp_path).results()
    for result in results:
        assert result.code == 2
        assert "rank 1 is claimed twice" in result.output
