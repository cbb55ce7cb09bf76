"""Ranks that meet at a file: they train as over TCP, also where a run that died has left the file."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import RankLost, UserError
from common.join import meeting_file
from common.join.meeting_file import Place
from common.join.store import open_store, serve_at
from common.launch.layout import Layout
from common.launch.options import JoinOptions
from tests.harness import MNIST, Node, losses, playing, wait_until

TRAINING = ["--dataset", "digits", "--max-steps", 2, "--device", "cpu", "--join-timeout", 60]


def nodes(meeting, folder) -> list[Node]:
    """2+1 in HetSeq's flags."""
    common = ["--distributed-init-method", f"file://{meeting}", "--distributed-world-size", 3, "--out-dir", folder]
    first = Node([*TRAINING, *common, "--distributed-gpus", 2, "--distributed-rank", 0])
    return [first, Node([*TRAINING, *common, "--distributed-gpus", 1, "--distributed-rank", 2])]


def test_ranks_meet_at_a_file_and_take_it_away(tmp_path):
    results = playing(MNIST, nodes(tmp_path / "meeting", tmp_path / "run"), tmp_path).results()
    assert [result.code for result in results] == [0, 0], results
    assert len(losses(tmp_path / "run")) == 2
    assert not (tmp_path / "meeting").exists()


def test_the_file_of_a_run_that_died_is_used_again(tmp_path):
    meeting = tmp_path / "meeting"
    dead = playing(MNIST, nodes(meeting, tmp_path / "run")[:1], tmp_path)
    wait_until(lambda: meeting.exists() and meeting_file.read(meeting), dead)
    dead.kill()
    assert meeting.exists()
    results = playing(MNIST, nodes(meeting, tmp_path / "run"), tmp_path).results()
    assert [result.code for result in results] == [0, 0], results
    assert not meeting.exists()


@pytest.mark.parametrize("found", [None, Place("127.0.0.1", 9, "dead")])
def test_of_two_processes_that_want_to_be_rank_0_at_the_same_moment_one_is(found, tmp_path):
    path, start = tmp_path / "meeting", threading.Barrier(2)
    places = [Place("fd77::1", 47110, "first"), Place("10.0.0.1", 47111, "second")]

    def write(place: Place) -> bool:
        start.wait(60)
        return meeting_file.write(path, place, instead_of=found)

    with ThreadPoolExecutor(2) as both:
        for _ in range(200):
            path.unlink(missing_ok=True)
            assert found is None or meeting_file.write(path, found)
            written = list(both.map(write, places))
            assert sorted(written) == [False, True]
            assert meeting_file.read(path) == places[written.index(True)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_taken_away_by_the_run_that_wrote_it(tmp_path):
    path, ours = tmp_path / "meeting", Place("127.0.0.1", 9, "ours")
    meeting_file.write(path, ours)
    meeting_file.remove(path, Place("127.0.0.1", 9, "theirs"))
    assert meeting_file.read(path) == ours
    meeting_file.remove(path, ours)
    assert not path.exists()


def test_a_port_that_another_run_has_by_now_is_no_place_to_meet(tmp_path):
    store, port = serve_at("127.0.0.1")  # it answers, but it has another key
    meeting_file.write(tmp_path / "meeting", Place("127.0.0.1", port, "dead"))
    layout = Layout("-g 2", world_size=2, first_rank=1, local_world_size=1, init_method=f"file://{tmp_path}/meeting")
    with pytest.raises(RankLost, match=f"rank 0 did not join within 1 s .*listens at 127.0.0.1 port {port}, which"):
        open_store(layout.workers()[0], JoinOptions(join_timeout_seconds=1))
    del store


@pytest.mark.parametrize("text", ["x", "abc\n", "a list of hosts\n", "Uneven DDP: notes"])
def test_a_file_of_another_kind_is_not_a_store(text, tmp_path):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(UserError, match="exists and is something else"):
        meeting_file.check(f"file://{tmp_path / 'notes'}")


def test_a_pipe_is_not_a_meeting_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="exists and is something else"):
        meeting_file.check(f"file://{tmp_path / 'pipe'}")


def test_a_link_to_nothing_is_not_a_meeting_file(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(UserError, match="which is a link to a file that is not there: name the file itself"):
        meeting_file.check(f"file://{tmp_path / 'link'}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_claimed_twice_is_refused_at_a_file_too(rank, tmp_path):
    first, second = nodes(tmp_path / "meeting", tmp_path / "run")
    second.flags[-1] = rank
    results = playing(MNIST, [first, second], tmp_path).results()
    for result in results:
        assert result.code == 2
        assert f"rank {rank} is claimed twice" in result.output
