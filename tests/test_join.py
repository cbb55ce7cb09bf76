"""Joining: whatever does not fit is named on every node, within seconds, by node, field and both values."""

import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import types

import psutil
import pytest

from common import version
from common.elastic.standby import reach, reach_unless_dead
from common.join.store import connect
from common.launch.addresses import free_port
from tests.harness import (
    MNIST,
    ROOT,
    TIMEOUT_SECONDS,
    Node,
    Result,
    freeze,
    nodes_of,
    play,
    playing,
    run,
    start,
    wait_until,
    write_trainer,
)
from tests.test_hello import HELLO
from tests.trainers import Patient

FLAGS = ("--dataset", "digits", "--max-steps", 2)


def node(number: int, gpus: str, port: int, *flags: object) -> Node:
    layout = ["-n", len(gpus.split(",")), "-g", gpus, "-i", number, "--master-addr", "127.0.0.1", "--master-port", port]
    return Node([*layout, "--device", "cpu", *FLAGS, *flags])


def refused(tmp_path, *nodes: Node, code: int = 2) -> list[Result]:
    """Play nodes that must all end with `code`, in one line and without a traceback."""
    results = playing(MNIST, list(nodes), tmp_path).results()
    for result in results:
        assert result.code == code, result.output
        assert "Traceback" not in result.output
    return results


def errors(results: list[Result]) -> list[str]:
    return [line for result in results for line in result.output.splitlines() if "error:" in line]


def test_another_g_on_one_node_is_named_on_both(tmp_path):
    port = free_port()
    results = refused(tmp_path, node(0, "2,1", port), node(1, "2,2", port))
    for result in results:
        said = errors([result])
        assert len(said) == 1
        assert re.search(r"node 1 \(\S+, rank \d\) has -g/--gpus 2,2, but node 0 \(\S+, rank 0\) has 2,1", said[0])


def test_the_same_i_twice_is_named_on_every_node(tmp_path):
    port = free_port()
    results = refused(tmp_path, node(0, "1,1,1", port), node(1, "1,1,1", port), node(1, "1,1,1", port))
    for result in results:
        assert re.search(r"rank 1 is claimed twice, by .*pid \d+.* and .*pid \d+.*--node-rank", errors([result])[0])


def test_rank_0_need_not_be_the_first_of_its_node(tmp_path):
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--device", "cpu", *FLAGS, "--out-dir", tmp_path / "run"]
    nodes = [Node(flags, {**environ, "RANK": str(rank), "LOCAL_RANK": str(1 - rank)}) for rank in range(2)]
    for result in playing(MNIST, nodes, tmp_path).results():
        assert result.code == 0, result.output


def test_another_flag_on_one_node_is_named_on_both(tmp_path):
    port = free_port()
    results = refused(tmp_path, node(0, "1,1", port), node(1, "1,1", port, "--global-batch", 128))
    for result in results:
        assert "has --global-batch 128, but node 0" in errors([result])[0]
        assert "has 256: make them the same" in errors([result])[0]


def test_a_file_beside_the_script_counts_though_it_has_the_name_of_a_module_of_pythons(tmp_path, monkeypatch):
    module = types.ModuleType("calendar")
    module.__file__ = str(tmp_path / "calendar.py")
    (tmp_path / "calendar.py").write_text("")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "trainer.py")])
    monkeypatch.setitem(sys.modules, "calendar", module)
    assert version._loaded_sources()["calendar.py"] == str(tmp_path / "calendar.py")


@pytest.mark.parametrize(
    "file", ["common/uneven/plan.py", pytest.param("bert_ddp/model/optimizer.py", marks=pytest.mark.long)]
)
def test_another_version_of_any_code_that_is_loaded_is_named_on_both(file, tmp_path):
    commands, port = [], free_port()
    for number in range(2):
        copy = tmp_path / str(number)
        for package in ("common", "mnist_ddp", "bert_ddp"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        with (copy / "mnist_ddp" / "train.py").open("a") as source:
            source.write("import bert_ddp.model.optimizer\n")  # as a trainer of one's own may
        with (copy / file).open("a") as source:
            source.write("# an edit on one node\n" * number)
        commands.append(start("python", copy / "mnist_ddp" / MNIST.name, *node(number, "1,1", port).flags))
    for command in commands:
        result = command.result()
        assert result.code == 2, result.output
        assert re.search(r"node 1 \(.*\) has code \w{12}, but node 0 \(.*\) has \w{12}", errors([result])[0])


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """The results of nodes that wait for others in vain, three runs at once: for two nodes, for the master, and for one
    where another program holds the master's port. That has the ports as well."""
    ports = {"master": free_port()}
    with socket.create_server(("0.0.0.0", 0)) as other:
        ports["other program"] = other.getsockname()[1]
        nodes = {
            "nodes": [node(0, "1,2,1", free_port(), "--join-timeout", 12)],
            "master": [node(1, "1,1", ports["master"], "--join-timeout", 12)],
            "other program": [node(number, "1,1", ports["other program"]) for number in range(2)],
        }
        runs = {name: playing(MNIST, those, tmp_path_factory.mktemp("late")) for name, those in nodes.items()}
        return {name: run.results() for name, run in runs.items()}, ports


def test_a_missing_node_is_named_while_others_wait_and_ended_at_the_timeout(late):
    (result,) = late[0]["nodes"]
    before, _, _ = result.output.partition("error:")
    assert "waiting for node 1 (ranks 1 to 2) and node 2 (rank 3); giving up in" in before, result.output
    assert result.code == 1
    assert "node 1 (ranks 1 to 2) and node 2 (rank 3) did not join within 12 s (--join-timeout)" in errors([result])[0]


@pytest.mark.parametrize("side", ["nodes", "master"])
def test_a_node_that_waits_at_its_own_address_is_told_that_others_cannot_reach_it(late, side):
    (result,) = late[0][side]
    hint = "127.0.0.1 is each machine itself: for nodes on several machines, --master-addr is an address of node 0"
    assert errors([result])[0].endswith(hint)


def test_a_missing_master_is_named_while_others_wait_and_ended_at_the_timeout(late):
    results, ports = late
    (result,) = results["master"]
    line = rf"\[1 \S+\] waiting for node 0 at tcp://127.0.0.1:{ports['master']}; giving up in \d s"
    assert re.fullmatch(line, result.output.splitlines()[0]), result.output
    assert result.code == 1
    assert "for 12 s (--join-timeout): is node 0 started" in errors([result])[0]


def test_a_master_whose_name_is_unknown_is_refused_at_once(tmp_path):
    wrong = Node(["-n", 2, "-g", "1,1", "-i", 1, "--master-addr", "no-such-host.invalid", "--device", "cpu", *FLAGS])
    (result,) = refused(tmp_path, wrong)
    assert "--master-addr is no-such-host.invalid, which" in errors([result])[0]


def test_a_port_held_by_another_program_is_named(late):
    results, ports = late
    master, second = results["other program"]
    assert master.code == second.code == 2 and "Traceback" not in master.output + second.output
    port = ports["other program"]
    assert f"--master-port {port} on {socket.gethostname()} is held by another program" in errors([master])[0]
    assert f"tcp://127.0.0.1:{port} answers, but not as node 0 of a run would" in errors([second])[0]


def test_a_port_held_by_another_run_of_ours_is_named_on_both_nodes_and_that_run_goes_on(tmp_path):
    nodes = nodes_of((1, 1), tmp_path / "long", *Patient.FLAGS)
    port = nodes[0].flags[nodes[0].flags.index("--master-port") + 1]
    (tmp_path / "long").mkdir()
    long_run = playing(Patient(tmp_path).script, nodes, tmp_path / "long")
    wait_until((tmp_path / "long" / "metrics.jsonl").exists, long_run)
    master, second = refused(tmp_path, node(0, "1,1", port), node(1, "1,1", port))
    assert f"--master-port {port}" in errors([master])[0]
    assert "is held by another run of ours" in errors([master])[0]
    assert "rank 1 of node 1" in errors([second])[0]
    assert "tried to join a run that is complete: the rank is held by" in errors([second])[0]
    long_run.kill()  # fails where it has ended


def test_node_0_prints_the_command_of_each_other_node(tmp_path):
    nodes = play(MNIST, (1, 1), tmp_path, *FLAGS)
    command = next(line for line in nodes[0].output.splitlines() if "on node 1 run:" in line)
    assert "-i 1 --master-addr 127.0.0.1 --master-port" in command
    assert "--out-dir" not in command


@pytest.mark.parametrize("program", [
    pytest.param((HELLO.relative_to(ROOT),), id="by path", marks=pytest.mark.long),
    pytest.param(("-m", "common.hello"), id="-m"),
])  # fmt: skip
def test_the_command_that_node_0_prints_starts_node_1_as_it_stands(program):
    layout = ["-n", 2, "-g", "1,1", "--device", "cpu", "--join-timeout", 300]
    first = start("python", *program, *layout, "-i", 0, "--interface", "lo", "--master-port", free_port(), cwd=ROOT)
    line = first.process.stdout.readline()
    second = run(*shlex.split(line.partition("run: ")[2]), cwd=ROOT)
    assert second.code == 0, line + second.output
    assert first.result().code == 0


@pytest.mark.parametrize("backend, message", [
    ("mpi", "--backend is mpi, but torch"),
    ("nccl", "--backend is nccl, which needs a GPU for each rank, but this node's workers run on the CPU"),
])  # fmt: skip
def test_a_backend_that_cannot_be_is_refused(backend, message, tmp_path):
    (result,) = refused(tmp_path, Node(["-g", 1, "--device", "cpu", *FLAGS, "--backend", backend]))
    assert message in errors([result])[0]
    assert "use --backend gloo" in errors([result])[0]


def test_an_interface_that_does_not_exist_is_refused_with_the_names_of_those_that_do(tmp_path):
    (result,) = refused(tmp_path, Node(["-g", 1, "--device", "cpu", *FLAGS, "--interface", "eth99"]))
    assert "--interface is eth99, but" in errors([result])[0]
    assert "lo" in errors([result])[0]


TWO_LEADERS = """
    from common.join.handshake import Handshake
    from common.join.view import view_of

    if worker.rank == 0:  # once more, as a process that reached this store with the rank 0 of another host
        view = view_of(worker, group.options, group.device, group.backend, {"own": "", "master": "x"}, "")
        view["host"] = "elsewhere"
    else:
        view = dict(group.views[worker.rank])
    store = dist.PrefixStore("again", group.store)
    threads = []

    def join(own_view, leads):
        try:
            Handshake(worker, store, own_view, 200.0, leads).run()
        except UserError as error:
            print(error, flush=True)

    import threading

    if worker.rank < 2:  # rank 2 stays away, so that the run is not complete before all three have joined
        threads.append(threading.Thread(target=join, args=(view, False)))
    if worker.rank == 0:
        threads.append(threading.Thread(target=join, args=(dict(group.views[0]), True)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_second_rank_0_that_reaches_the_first_ones_store_is_named_on_every_rank(tmp_path):
    nodes = nodes_of((1, 1, 1), tmp_path)
    for given in nodes:
        given.flags = given.flags[: given.flags.index("--out-dir")]
    first, second, _ = playing(write_trainer(tmp_path, TWO_LEADERS), nodes, tmp_path).results()
    assert first.output.count("rank 0 is claimed twice") == 2, first.output
    assert second.output.count("rank 0 is claimed twice") == 1, second.output


STORE = """
import signal
from common.join.store import serve_at
store, port = serve_at("127.0.0.1")
print(port, flush=True)
signal.pause()
"""


def threads() -> set[int]:
    """The numbers of this process's threads."""
    return {one.id for one in psutil.Process().threads()}


def test_one_attempt_is_made_to_reach_a_process_that_is_stopped_and_it_ends_with_it():
    serving = start("python", "-u", "-c", STORE, PYTHONPATH=str(ROOT))
    port = int(serving.process.stdout.readline())
    assert connect("127.0.0.1", port, TIMEOUT_SECONDS) is not None
    before = threads()  # those of earlier tests may end meanwhile
    freeze(serving.process.pid)
    assert [connect("127.0.0.1", port, 0.2, gives_up=True) for _ in range(3)] == [None] * 3
    attempts = threads() - before
    assert len(attempts) == 1
    serving.process.kill()
    serving.process.wait()
    wait_until(lambda: not threads() & attempts)


def test_a_process_that_is_too_busy_to_answer_at_once_is_not_taken_for_dead():
    serving = start("python", "-u", "-c", STORE, PYTHONPATH=str(ROOT))
    address = f"127.0.0.1 {int(serving.process.stdout.readline())}"
    freeze(serving.process.pid)
    assert reach(address) is None
    goes_on = threading.Timer(0.5, serving.process.send_signal, [signal.SIGCONT])
    goes_on.start()
    try:
        assert reach_unless_dead(address, time.monotonic() + TIMEOUT_SECONDS) is not None
    finally:
        goes_on.join()
        serving.process.kill()
        serving.process.wait()
    began = time.monotonic()
    assert reach_unless_dead(address, began + TIMEOUT_SECONDS) is None
    assert time.monotonic() < began + TIMEOUT_SECONDS  # because it is dead, and not for want of time
