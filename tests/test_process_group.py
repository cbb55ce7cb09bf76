"""A process group that is up: ranks that need different times, fail or die, and how the others learn of it."""

import re

import pytest

from tests.harness import nodes_of, playing, wait_until, write_trainer

SILENCE = 8  # seconds of --timeout, once all are connected, which may take longer on a busy machine

IMPORTS = """
from dataclasses import replace
import common.join.process_group as joining
from common.join import ended, lost, view
from common.join import turn as turns
from common.join.turn import Turn
from bert_ddp.predict.lines import open_lines
from bert_ddp.predict.parts import Parts
"""

# a node that is lost with its supervisor
WITHOUT_POSTS = (
    IMPORTS
    + """
import common.launch.supervisor
common.launch.supervisor._tell = lambda *given: True
common.launch.supervisor.GRACE_SECONDS = 200.0
"""
)

IN_TIME = f"""
        group = replace(group, options=replace(group.options, timeout_seconds={SILENCE}.0))
        joining.set_timeout({SILENCE}.0)
"""

SLOW = """
        def slow(lines):
            time.sleep(LONGER)
            return [{"text": line} for line in lines]

        parts = Parts(group, FOLDER / "parts", 1)
        parts.compute(open_lines(FOLDER / "lines", 9), slow)
        parts.join(FOLDER / "answers")
""".replace("LONGER", str(SILENCE + 2))

FAILING = """
        with group.run_independently("the others") as raise_failure:
            if worker.rank == 1:
                raise UserError("rank 1 is at its wits' end")
            while worker.rank == 2:
                time.sleep(0.01)
                raise_failure()
"""


SIGNALLED = """
        with group.{turn}("what each does"):
            if worker.rank == {rank}:
                os.kill(os.getpid(), signal.{signal})
"""

ELSEWHERE = """
        for rank in {ranks}:
            if rank != worker.rank:
                group.views[rank]["pid_space"] += " of another machine"
"""

SAME_ERROR = """
        lost.LINGER_SECONDS = 3600.0  # if rank 0 waited for the others before it speaks, it would wait so long
        if worker.rank:
            while "find wrong" not in (FOLDER / "node-0-0.log").read_text():
                time.sleep(0.05)
            time.sleep(1)  # a rank 0 that does not stay has time to end
            group.store.check(["anything"])  # which rank 0 holds
        raise UserError("what all ranks find wrong"{same})
"""

ALONE = """
        if worker.is_main:
            raise {error}("rank 0 is at its wits' end")
        dist.barrier()
"""

BUSY = """
        def look_once_rank_0_has_gone(turn):
            while lost._is_running(group.views[0]["pid"]):
                time.sleep(0.02)

        if worker.rank == 1:
            Turn.raise_failure = look_once_rank_0_has_gone
        with group.{turn}("what rank 0 does"):
            if worker.is_main:
                raise UserError("rank 0 is at its wits' end")
"""

# ranks 1 and 2 end because of rank 3, and rank 0, which exchanges nothing with them, comes to a turn after that
OTHERS_END = """
        others = dist.new_group([1, 2, 3])
        if worker.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if not worker.is_main:
            dist.barrier(others)
        while any(lost._is_running(group.views[rank]["pid"]) for rank in (1, 2, 3)):
            time.sleep(0.05)
{posts}
        with group.run_independently("what each does"):
            pass
"""
# as the supervisor of their node does, where the store answers it in time
ECHOES = OTHERS_END.format(
    posts="""
        for rank in (1, 2):
            ended.post(group.store, rank, "ended with exit code 1")
"""
)
WHOLE_NODE = ELSEWHERE.format(ranks=[3]) + OTHERS_END.format(posts="")

LATER = """
        def look_once_rank_2_has_gone(turn):
            while lost._is_running(group.views[2]["pid"]):
                time.sleep(0.02)

        if worker.rank == 3:
            Turn.raise_failure = look_once_rank_2_has_gone
        with group.first_on_node("what rank 1 does"):
            if worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""

LEAVES = """
        def look_once_rank_0_has_gone(store):
            while lost._is_running(group.views[0]["pid"]):
                time.sleep(0.02)
            return lost.others_have_lost_contact(store)

        joining.LEAVE_SECONDS = 1.0
        {held}
        if worker.rank != {leaver}:
            {others}
"""

DOUBLE = """
        joining.LEAVE_SECONDS = 3600.0  # for which rank 0 stays
        if worker.is_main:  # as the supervisor of a node does that was started twice, here or in another container
            for process in (view.process_name(1), f"another container {group.views[1]['pid']}"):
                ended.post(group.store, 1, "ended with exit code 2", process)
        dist.barrier()
        if worker.rank == 1:
            def poll_late(*given):
                time.sleep(1)  # a rank 0 that does not stay has time to end
                return poll(*given)
            poll, joining.poll = joining.poll, poll_late
"""


def playing_body(body, folder, gpus=(1, 1, 1), imports=IMPORTS):
    """Nodes, by default three of one rank, with `body` as their training."""
    nodes = nodes_of(gpus, folder)
    for node in nodes:
        node.flags = node.flags[: node.flags.index("--out-dir")]
    return playing(write_trainer(folder, body, imports), nodes, folder)


TURNS = ("others_wait", "first_on_node", "run_independently")


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """The folder and the results of each run in which somebody is silent for longer than --timeout. They wait most of
    the time, and so all of them run at once."""
    bodies = {"slow": SLOW}
    bodies |= {f"0 in {turn}": SIGNALLED.format(rank=0, turn=turn, signal="SIGSTOP") for turn in TURNS}
    bodies |= {f"1 in {turn}": SIGNALLED.format(rank=1, turn=turn, signal="SIGSTOP") for turn in TURNS[1:]}
    runs = {}
    for name, body in bodies.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "lines").write_text("one\ntwo\n")
        runs[name] = folder, playing_body(IN_TIME + body, folder)
    for name, (_, run) in runs.items():
        if name != "slow":  # the frozen rank does not end by itself
            frozen = run.processes[int(name[0])]
            others = [process for process in run.processes if process is not frozen]
            wait_until(lambda others=others: all(process.exitcode is not None for process in others))
            frozen.kill()
    return {name: (folder, run.results()) for name, (folder, run) in runs.items()}


@pytest.mark.long
def test_a_chunk_may_take_longer_than_a_collective(silent):
    folder, results = silent["slow"]
    for result in results:
        assert result.code == 0, result.output
    assert (folder / "answers").read_text() == '{"line": 1, "text": "one"}\n{"line": 2, "text": "two"}\n'


def test_a_rank_that_fails_among_others_at_work_or_waiting_is_heard_by_all(tmp_path):
    for result in playing_body(FAILING, tmp_path).results():
        assert result.code == 2 and result.output.count("rank 1 is at its wits' end") == 1


@pytest.mark.parametrize("turn", TURNS[:2])
def test_a_failure_that_a_busy_ranks_heartbeat_has_heard_is_raised_when_the_store_has_gone_since(turn, tmp_path):
    for result in playing_body(BUSY.format(turn=turn), tmp_path, gpus=(1, 1)).results():
        assert result.code == 2 and result.output.count("error: rank 0 is at its wits' end") == 1, result.output


@pytest.mark.parametrize("turn", TURNS[1:])
def test_a_rank_that_freezes_at_work_is_named_by_those_that_wait(turn, silent):
    for number, result in enumerate(silent[f"1 in {turn}"][1]):
        said = re.search(rf"node 1 \(\S+, rank 1\) has had no heartbeat for {SILENCE} s \(--timeout\)", result.output)
        assert result.code == 1 and bool(said) == (number != 1), result.output


@pytest.mark.parametrize(
    "turn, where, said",
    [
        (TURNS[1], "", r"error: lost rank 1, node 1 \(\S+\): its process has ended; see the log of that node"),
        (
            TURNS[2],
            ELSEWHERE.format(ranks=[1]),
            r"error: lost rank 1, node 1 \(\S+\): has closed its connections; see the log of",
        ),
        (
            TURNS[2],
            ELSEWHERE.format(ranks=[1, 2]),
            r"error: lost .*rank 1, node 1 \(\S+\).*: a connection was closed; see the log",
        ),
    ],
    ids=["on this machine", "on another machine", "or another rank on another machine"],
)
def test_a_rank_that_dies_at_work_is_not_waited_for(turn, where, said, tmp_path):
    body = where + SIGNALLED.format(rank=1, turn=turn, signal="SIGKILL")
    first, _, last = playing_body(body, tmp_path, imports=WITHOUT_POSTS).results()
    for result in (first, last):
        assert result.code == 1 and re.search(said, result.output), result.output


@pytest.mark.parametrize("turn", TURNS[1:])
def test_a_rank_that_dies_at_work_beside_its_supervisor_is_named_with_the_cause(turn, tmp_path):
    body = SIGNALLED.format(rank=1, turn=turn, signal="SIGKILL")
    first, second = playing_body(body, tmp_path, gpus=(1, 2)).results()
    assert re.search(r"error: lost rank 1, node 1 \(.*\): was ended by SIGKILL", first.output), first.output
    assert first.code == 1 and second.code == 128 + 9


def test_ranks_that_have_ended_because_of_another_one_are_not_called_lost_by_a_rank_that_comes_later(tmp_path):
    first = playing_body(ECHOES, tmp_path, gpus=(3, 1)).results()[0]
    said = [line for line in first.output.splitlines() if "error: lost" in line]
    assert len(said) == 3 and all("error: lost rank 3, node 1" in line for line in said), first.output


def test_ranks_that_a_turn_has_told_of_a_lost_one_are_not_called_lost_themselves(tmp_path):
    """Who hears it from another rank first does not print it again."""
    results = playing_body(LATER, tmp_path, gpus=(1, 3)).results()
    said = [line for result in results for line in result.lines if "error: lost" in line]
    assert said and all("error: lost rank 1, node 1" in line for line in said), said


def test_nor_where_nobody_can_post_the_end_of_the_one_that_was_lost(tmp_path):
    first = playing_body(WHOLE_NODE, tmp_path, gpus=(3, 1), imports=WITHOUT_POSTS).results()[0]
    said = [line for line in first.output.splitlines() if line.startswith("[0] ") and "error: " in line]
    assert re.fullmatch(r"\[0\] error: lost rank 3, node 1 \(.*\): has closed its .*", said[0]), first.output


@pytest.mark.parametrize("turn", TURNS)
def test_a_rank_0_that_freezes_with_the_store_does_not_hold_the_others(turn, silent):
    for result in silent[f"0 in {turn}"][1][1:]:
        said = rf"a request \(--timeout\) to the store on rank 0, node 0 \(\S+\) did not end within {SILENCE} s"
        assert result.code == 1 and re.search(said, result.output), result.output


@pytest.fixture(scope="module", params=[", same_on_every_rank=True", ""], ids=["known to be", "not known to be"])
def same_error(request, tmp_path_factory):
    """The results of the nodes of a run in which all ranks raise the same error, rank 0 first."""
    return playing_body(SAME_ERROR.format(same=request.param), tmp_path_factory.mktemp("same-error")).results()


def test_rank_0_stays_until_all_ranks_have_raised_the_same(same_error):
    for result in same_error:
        assert result.code == 2 and len(result.lines) == 1, result.output
        assert result.lines[0].endswith("error: what all ranks find wrong")


def test_rank_0_says_what_is_wrong_before_it_waits_for_the_others(same_error):
    """Otherwise the others, which wait for its words, would never have ended."""
    assert "what all ranks find wrong" in same_error[0].output


@pytest.mark.parametrize("error, code", [("UserError", 2), ("RunError", 1)])
def test_what_rank_0_alone_finds_wrong_is_said_by_the_others_with_its_exit_code(error, code, tmp_path):
    first, *others = playing_body(
        "        lost.ANSWER_SECONDS = 200.0\n" + ALONE.format(error=error), tmp_path
    ).results()
    assert first.code == code and first.output.endswith("error: rank 0 is at its wits' end\n")
    for other in others:
        assert other.code == code, other.output
        assert re.search(r"error: lost rank 0, node 0 \(.*\): failed: rank 0 is at its wits' end; see", other.output)


SLOW_TO_CONNECT = """
import common.join.process_group as joining

connect = joining.connect


def connect_and_stay(worker, *rest):
    connect(worker, *rest)  # rank 0 has all of its connections now
    end = time.monotonic() + 1.0
    while worker.rank == 1 and not (FOLDER / "works").exists() and time.monotonic() < end:
        time.sleep(0.01)
    if worker.rank == 1 and (FOLDER / "works").exists():
        (FOLDER / "works before all are connected").touch()


joining.connect = connect_and_stay
"""


def test_no_rank_works_before_all_are_connected(tmp_path):
    """One that ended early would be waited for by a rank that still connects, for --timeout."""
    body = "if worker.is_main:\n    (FOLDER / 'works').touch()"
    for result in playing_body(body, tmp_path, (1, 1), SLOW_TO_CONNECT).results():
        assert result.code == 0, result.output
    assert (tmp_path / "works").exists() and not (tmp_path / "works before all are connected").exists()


STUCK = """
        turns.LINGER_SECONDS = 6.0  # after which rank 0, which holds the store, has been asked for the last time
        group = replace(group, options=replace(group.options, work_timeout_seconds=2.0))
        with group.{turn}("what rank 0 does"):
            if worker.is_main:
                time.sleep(3600)
"""
SINCE = "this rank's own work, since another one has failed or gone (--work-timeout), did not end within 2 s"


@pytest.mark.parametrize(
    "turn, said",
    [(TURNS[0], "what rank 0 does (--work-timeout) did not end within 8 s"), (TURNS[1], SINCE), (TURNS[2], SINCE)],
)
def test_a_rank_whose_own_work_never_ends_is_ended_once_the_others_have_given_up(turn, said, tmp_path):
    """It may be alone on its node, where nobody else would end it."""
    first, second = playing_body(STUCK.format(turn=turn), tmp_path, (1, 1)).results()
    assert first.code == 1 and said in first.output, first.output
    gave_up = re.compile(r"gave up waiting for what rank 0 does.* after 2 s \(--work-timeout\)")
    assert second.code == 1 and gave_up.search(second.output), second.output
    assert said != SINCE or gave_up.search(first.output), first.output  # why the other one has failed


OWN_PART = """
        turns.LINGER_SECONDS = 6.0
        group = replace(group, options=replace(group.options, work_timeout_seconds=2.0))
        with group.others_wait("rank 0, which saves"):
            if not worker.is_main:
                time.sleep(3600)
"""


def test_a_rank_that_does_its_own_part_after_rank_0_is_ended_too_where_that_never_ends(tmp_path):
    _, second = playing_body(OWN_PART, tmp_path, (1, 1)).results()
    own = "this rank's own part of the work of rank 0, which saves, (--work-timeout) did not end within 8 s"
    assert second.code == 1 and own in second.output, second.output


LONG = """
        turns.LINGER_SECONDS = 0.0
        group = replace(group, options=replace(group.options, work_timeout_seconds=5.0))
        with group.{turn}("what each does"):
            time.sleep(8)
"""


@pytest.mark.parametrize("turn", TURNS[1:])
def test_work_that_all_do_may_take_longer_than_they_would_wait_for_it(turn, tmp_path):
    for result in playing_body(LONG.format(turn=turn), tmp_path, (1, 1)).results():
        assert result.code == 0, result.output


GONE = """
        with group.run_independently("what each does"):
            if worker.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                group.store.check(["anything"])
                time.sleep(0.01)
"""


def test_a_store_that_ends_under_the_work_of_the_others_is_named_and_not_quoted(tmp_path):
    _, *others = playing_body(GONE, tmp_path).results()
    for other in others:
        assert re.search(r"error: lost rank 0, node 0 \(.*\)", other.output), other.output
        assert "got 0 bytes" not in other.output


PATIENT = "joining.NOTICE_SECONDS = 100.0"  # a busy machine takes its time to notice what is closed


@pytest.mark.parametrize(
    ("leaver", "held"),
    [
        (0, PATIENT),
        (1, PATIENT),
        (1, f"{PATIENT}; joining.others_have_lost_contact = look_once_rank_0_has_gone"),
    ],
    ids=["rank 0", "rank 1", "rank 1, which looks once rank 0 has gone with the store"],
)
def test_a_rank_that_leaves_the_loop_alone_is_named_with_the_cause(leaver, held, tmp_path):
    results = playing_body(LEAVES.format(leaver=leaver, held=held, others="dist.barrier()"), tmp_path).results()
    for rank, result in enumerate(results):
        who = "this rank" if rank == leaver else rf"lost rank {leaver}, node {leaver} \(.*\):"
        assert re.search(rf"error: {who} left the training loop before the others: let the same", result.output)
        assert result.code == 2


def test_a_rank_with_work_of_its_own_after_the_loop_takes_its_time(tmp_path):
    late = """while not group.store.check(["lost/ended/1"]):
                time.sleep(0.02)"""
    for result in playing_body(LEAVES.format(leaver=0, held="", others=late), tmp_path).results():
        assert result.code == 0 and "error" not in result.output, result.output


ASKED_FOR = """
    for turn in (0, 2):
        while worker.is_main and not group.store.check([f"turn/rank 0/{turn}/heartbeat/0"]):
            time.sleep(0.01)  # until the other one has asked for a heartbeat, of which there will be none
        with group.others_wait("rank 0"):
            pass
        with group.first_on_node("both"):
            pass
    dist.barrier()
    assert not group.store.check(["turn/rank 0/0/heartbeat/0"])
"""


def test_a_heartbeat_that_is_asked_for_before_there_is_one_leaves_nothing_in_the_store(tmp_path):
    script = write_trainer(tmp_path, ASKED_FOR, "from common.join import turn\n\nturn.HEARTBEAT_SECONDS = 0.1")
    results = playing(script, nodes_of((2,), tmp_path), tmp_path).results()
    assert [result.code for result in results] == [0], results[0].output


def test_rank_0_stays_for_a_rank_of_which_another_process_has_ended(tmp_path):
    results = playing_body(DOUBLE, tmp_path).results()
    assert [result.code for result in results] == [0, 0, 0], [result.output for result in results]
