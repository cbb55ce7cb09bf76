"""A process group that is up: ranks that need different times, fail or die, and how the others learn of it."""

import re

import pytest

from tests.harness import TIMEOUT_SECONDS, nodes_of, playing, write_trainer

SILENCE = 9  # seconds of --timeout; on a busy machine connecting takes its time too

IMPORTS = """
from bert_ddp.predict.lines import open_lines
from bert_ddp.predict.parts import Parts
"""

SLOW = """
        def slow(lines):
            time.sleep(10)
            return [{"text": line} for line in lines]

        parts = Parts(group, FOLDER / "parts", 1)
        parts.compute(open_lines(FOLDER / "lines", 9), slow)
        parts.join(FOLDER / "answers")
"""

FAILING = """
        with group.each_at_its_own_pace("the others") as raise_failure:
            if worker.rank == 1:
                raise UserError("rank 1 is at its wits' end")
            while worker.rank == 2:
                time.sleep(0.01)
                raise_failure()
"""


DYING = """
        dist.barrier()  # all are connected
        with group.{turn}("what each does"):
            if worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""

FROZEN = """
        dist.barrier()
        with group.{turn}("what rank 0 does"):
            if worker.is_main:
                os.kill(os.getpid(), signal.SIGSTOP)
"""


def play_body(body, folder, *flags):
    """Three nodes of one rank with `body` as their training, to the end."""
    return playing_body(body, folder, *flags).results()


def playing_body(body, folder, *flags):
    script = write_trainer(folder, body, IMPORTS)
    given = nodes_of((1, 1, 1), folder)
    for node in given:
        node.flags = [*node.flags[: node.flags.index("--out-dir")], *flags]
    return playing(script, given, folder)


def test_a_chunk_may_take_longer_than_a_collective(tmp_path):
    (tmp_path / "lines").write_text("one\ntwo\n")
    for result in play_body(SLOW, tmp_path, "--timeout", 8):
        assert result.code == 0, result.output
    assert (tmp_path / "answers").read_text() == '{"line": 1, "text": "one"}\n{"line": 2, "text": "two"}\n'


def test_a_rank_that_fails_among_others_at_work_or_waiting_is_heard_by_all(tmp_path):
    for result in play_body(FAILING, tmp_path):
        assert result.code == 2 and result.output.count("rank 1 is at its wits' end") == 1


@pytest.mark.parametrize("turn", ["first_on_node", "each_at_its_own_pace"])
def test_a_rank_that_dies_at_work_is_named_by_those_that_wait(turn, tmp_path):
    for number, result in enumerate(play_body(DYING.format(turn=turn), tmp_path, "--timeout", SILENCE)):
        said = re.search(rf"node 1 \(\S+, rank 1\) has had no heartbeat for {SILENCE} s \(--timeout\)", result.output)
        assert result.code == 1 and bool(said) == (number != 1), result.output


@pytest.mark.parametrize("turn", ["others_wait", "first_on_node", "each_at_its_own_pace"])
def test_a_rank_0_that_freezes_with_the_store_does_not_hold_the_others(turn, tmp_path):
    nodes = playing_body(FROZEN.format(turn=turn), tmp_path, "--timeout", SILENCE)
    frozen, *others = nodes.processes
    try:
        for process in others:
            process.join(TIMEOUT_SECONDS)
            assert process.exitcode == 1
    finally:
        frozen.kill()
    for log in nodes.logs[1:]:
        said = rf"a request \(--timeout\) to the store on rank 0, node 0 \(\S+\) did not end within {SILENCE} s"
        assert re.search(said, log.read_text()), log.read_text()


SAME_ERROR = """
        if worker.rank:  # still on its way out of a wait, when rank 0, which holds the store, is done
            time.sleep(1)
            group.store.check(["anything"])
        raise UserError("what all ranks find wrong", same_on_every_rank=True)
"""


def test_rank_0_stays_until_all_ranks_have_raised_the_same(tmp_path):
    for result in play_body(SAME_ERROR, tmp_path):
        errors = [line for line in result.output.splitlines() if "on node" not in line]
        assert result.code == 2 and len(errors) == 1 and errors[0].endswith("error: what all ranks find wrong")


SAID_FIRST = """
        import common.join.process_group as joining

        joining.LINGER_SECONDS = 3600.0  # if rank 0 waited for the others before it speaks, it would wait so long
        while worker.rank and "find wrong" not in (FOLDER / "node-0-0.log").read_text():
            time.sleep(0.05)
        raise UserError("what all ranks find wrong", same_on_every_rank=True)
"""


def test_rank_0_says_what_is_wrong_before_it_waits_for_the_others(tmp_path):
    for result in play_body(SAID_FIRST, tmp_path):
        assert result.code == 2, result.output
