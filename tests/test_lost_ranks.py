"""A rank that is lost: every survivor names it in one line of our own, within seconds."""

import re
import socket

import psutil
import pytest

from common.launch.addresses import free_port
from tests.harness import ROOT, Node, Result, nodes_of, playing, run, wait_until, write_trainer

HERE = re.escape(socket.gethostname())

# On a slow machine, too, survivors find each other's posts, and a supervisor tells them the cause: what the program
# waits for at most is more than any machine needs. It goes on as soon as it has it.
UNHURRIED = """
from common.join import ended, lost, process_group as joining
from common.launch import supervisor

for module, names in (
    (supervisor, ("GRACE_SECONDS", "TELL_SECONDS")),
    (ended, ("CONNECT_SECONDS",)),
    (lost, ("ANSWER_SECONDS", "LINGER_SECONDS")),
):
    for name in names:
        assert hasattr(module, name)
        setattr(module, name, 200.0)
"""
# also where the survivors are told or see themselves who has ended, and need not conclude it from a silence
PATIENT = UNHURRIED + "lost.SEARCH_SECONDS = 200.0\n"
WITHOUT_POSTS = UNHURRIED + "supervisor._tell = lambda *given: True\n"  # of a node that is lost with its supervisor
TOLD = PATIENT + "lost.CAUSE_SECONDS = 200.0\n"  # and wait for the cause

# All ranks sum up again and again until one of them does what `body` says.
STEPS = """
        for view in group.views:
            view["pid_space"] += {machine}
        dist.barrier()
        step = 0
        while True:
            step += 1
            (FOLDER / f"step-{{worker.rank}}").write_text(str(step))
            if step == 3:
{body}
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
"""
ONE_MACHINE, TWO_MACHINES = '""', 'str(view["node_rank"])'


SLOW_TO_END = """
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(12)  # while Python ends


slow = Slow()
"""


def test_a_supervisor_that_reached_no_store_keeps_its_exit_code(tmp_path):
    """A thread that still tries to reach it must not come back while Python ends, which would abort the process."""
    body = """
        if worker.is_main:
            os.kill(os.getpid(), 9)
        while Path(f"/proc/{group.views[0]['pid']}").exists():  # until the supervisor has seen that end
            time.sleep(0.01)
        os._exit(1)
    """
    script = write_trainer(tmp_path, body, SLOW_TO_END)
    result = run("python", script, "-g", 2, "--device", "cpu", PYTHONPATH=str(ROOT))
    assert result.code == 128 + 9, result.output


def dies(rank: int) -> str:
    return f"""
                if worker.rank == {rank}:
                    os.kill(os.getpid(), signal.SIGKILL)
"""


def playing_steps(tmp_path, gpus, body, machine=ONE_MACHINE, limits=UNHURRIED) -> playing:
    script = write_trainer(tmp_path, STEPS.format(machine=machine, body=body), limits)
    nodes = nodes_of(gpus, tmp_path)
    for node in nodes:
        node.flags = node.flags[: node.flags.index("--out-dir")]
    return playing(script, nodes, tmp_path)


def errors(result: Result) -> dict[int, str]:
    """What each rank has said as an error, which must be one line. Nothing else may be printed but our own lines."""
    found = re.findall(r"^\[(\d+)(?: \S+)?\] error: (.*)$", result.output, re.MULTILINE)
    ours = re.compile(r"\[\d+.*\] error: |rank \d+ was ended by SIGKILL|error: ")
    assert all(ours.match(line) for line in result.lines), result.output
    assert len(found) == len(dict(found)), result.output
    assert not re.search(r"/pytorch/|gloo|Traceback|[^\x00-\x7f]", result.output), result.output
    return {int(rank): text for rank, text in found}


@pytest.mark.parametrize("gpus, lost, node, machine", [
    pytest.param((3,), 1, 0, ONE_MACHINE, id="one node"),
    pytest.param((2, 2), 3, 1, ONE_MACHINE, id="two nodes-one machine"),
    pytest.param((2, 2), 3, 1, TWO_MACHINES, id="two nodes-two machines"),
])  # fmt: skip
def test_a_worker_that_is_killed_is_named_by_every_survivor(gpus, lost, node, machine, tmp_path):
    results = playing_steps(tmp_path, gpus, dies(lost), machine, TOLD).results()
    said = {rank: text for result in results for rank, text in errors(result).items()}
    killed = re.escape("was ended by SIGKILL (out of memory? see `dmesg`)")
    line = rf"lost rank {lost}, node {node} \({HERE}\): {killed}; see the log of that node"
    assert set(said) == set(range(sum(gpus))) - {lost}
    assert all(re.fullmatch(line, text) for text in said.values()), said
    assert all(result.code for result in results)


def test_rank_0_is_named_when_its_process_has_ended_with_the_store(tmp_path):
    results = playing_steps(tmp_path, (2, 2), dies(0), TWO_MACHINES).results()
    said = {rank: text for result in results for rank, text in errors(result).items()}
    assert set(said) == {1, 2, 3}
    line = rf"lost rank 0, node 0 \({HERE}\), which served the store: its process has ended; see the log of that node"
    assert all(re.fullmatch(line, text) for text in said.values()), said


def test_a_node_that_is_gone_is_named_with_its_ranks(tmp_path):
    run = playing_steps(tmp_path, (2, 2), "                pass", TWO_MACHINES)
    wait_until(lambda: (tmp_path / "step-3").exists() and int((tmp_path / "step-3").read_text() or 0) >= 20, run)
    supervisor = psutil.Process(run.processes[1].pid)
    node = [*supervisor.children(), supervisor]
    assert len(node) == 3
    for process in node:  # so that none of them can say anything while the others are killed
        process.suspend()
        wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED)
    for process in node:
        process.kill()
    first, _ = run.results()
    line = rf"lost contact with one of ranks 2 to 3, node 1 \({HERE}\), which do not answer: see the log of that node"
    assert first.code == 1
    assert all(re.fullmatch(line, text) for text in errors(first).values()) and len(errors(first)) == 2, first.output


def test_a_rank_that_is_only_busy_is_not_called_lost(tmp_path):
    busy = """
                while worker.rank == 2 and "lost contact" not in (FOLDER / "node-0-0.log").read_text():
                    time.sleep(0.05)
"""
    first, _, _ = playing_steps(tmp_path, (1, 1, 1), dies(1) + busy, TWO_MACHINES, WITHOUT_POSTS).results()
    said = rf"lost contact with one of rank 1, node 1 \({HERE}\) or rank 2, node 2 \({HERE}\), which do not answer"
    assert re.match(said, errors(first)[0]), first.output


# after --timeout a survivor waits a second for the posts of the others: here also for that of the other survivor
BOTH_HAVE_POSTED = """
has_waited = lost._Search._has_waited
lost._Search._has_waited = property(lambda self: has_waited.fget(self) and len(self._read_survivors()) == 2)
"""


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The nodes' results of two runs at once, by the rank that is frozen in it: both wait most of the time."""
    runs = {}
    for rank in (0, 1):
        stop = f"""
                joining.set_timeout(8.0)  # --timeout, now that all are connected
                if worker.rank == {rank}:
                    os.kill(os.getpid(), signal.SIGSTOP)
"""
        # a rank 0 that is frozen does not answer
        no_answer = "lost.ANSWER_SECONDS = supervisor.TELL_SECONDS = 1.0\n"
        limits = PATIENT + BOTH_HAVE_POSTED if rank else UNHURRIED + no_answer
        runs[rank] = playing_steps(tmp_path_factory.mktemp(f"frozen-{rank}"), (1, 1, 1), stop, TWO_MACHINES, limits)
    for rank, nodes in runs.items():
        others = [process for number, process in enumerate(nodes.processes) if number != rank]
        wait_until(lambda others=others: all(process.exitcode is not None for process in others))
        nodes.processes[rank].kill()
    return {rank: nodes.results() for rank, nodes in runs.items()}


@pytest.mark.parametrize("lost, said", [
    (1, "rank 1, node 1 (HERE) did not answer within --timeout: frozen, busy or cut off? See the log of that node"),
    (0, "lost contact: rank 0, node 0 (HERE), which serves the store, does not answer: frozen or cut off? See the log"),
])  # fmt: skip
def test_a_rank_that_is_frozen_is_named_by_the_others_and_not_called_lost(lost, said, frozen):
    for rank, result in enumerate(frozen[lost]):
        if rank != lost:
            assert result.code == 1, result.output
            assert errors(result)[rank].startswith(said.replace("HERE", socket.gethostname())), result.output


def test_a_rank_that_fails_by_itself_is_named_by_the_others(tmp_path):
    fails = "                assert worker.rank != 1, 'what it is about'"
    first, second = playing_steps(tmp_path, (1, 1), fails, limits=PATIENT).results()
    assert re.fullmatch(
        r"lost rank 1, node 1 \(.*\): failed: AssertionError: what it is about; see .*", errors(first)[0]
    )
    assert "AssertionError: what it is about" in second.output


def test_a_rank_is_named_by_its_host_where_the_launcher_does_not_number_the_nodes(tmp_path):
    script = write_trainer(tmp_path, STEPS.format(machine=ONE_MACHINE, body=dies(1)), PATIENT)
    port = str(free_port())
    nodes = []
    for rank in range(3):
        environ = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        nodes.append(Node(["--device", "cpu"], {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
    results = playing(script, nodes, tmp_path).results()
    for rank in (0, 2):
        line = rf"lost rank 1 on {HERE}: its process has ended; see the log of that node"
        assert re.match(line, errors(results[rank])[rank]), results[rank].output


def test_rank_0_is_named_when_it_ends_while_the_others_join(tmp_path):
    script = write_trainer(tmp_path, "pass")
    nodes = nodes_of((1, 1, 1), tmp_path)[:2]
    for node in nodes:
        node.flags = node.flags[: node.flags.index("--out-dir")]
    started = playing(script, nodes, tmp_path)
    started.wait_for("waiting for node 2", node=1)
    started.processes[0].kill()
    _, second = started.results()
    line = "[1 HERE] error: lost rank 0 on 127.0.0.1, which served the store: its process has ended; see its log"
    assert second.output.splitlines()[-1] == line.replace("HERE", socket.gethostname())


def test_torch_prints_nothing_of_its_own_when_the_store_is_gone(tmp_path):
    script = write_trainer(tmp_path, STEPS.format(machine=ONE_MACHINE, body=dies(0)))
    flags = ["-g", 2, "--device", "cpu"]
    errors(run("python", script, *flags, PYTHONPATH=str(ROOT), TORCH_CPP_LOG_LEVEL=None))
