"""Starting and ending: no process outlives its node's command, whatever ends it."""

import os
import re
import signal
import sys
import time

import psutil
import pytest

from tests.harness import MNIST, Node, kill, nodes_of, playing, start

LONG = ("--dataset", "digits", "--epochs", "5000", "--device", "cpu", "--precision", "fp64")


@pytest.fixture
def command(tmp_path):
    """A node's command that trains for a long time, with three workers, once it writes metrics."""
    started = playing(MNIST, [Node(["-g", 3, *LONG, "--out-dir", tmp_path])], tmp_path)
    (command,) = started.processes
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert command.is_alive() and time.monotonic() < deadline, started.logs[0].read_text()
        time.sleep(0.05)
    yield started
    if command.is_alive():
        kill(command.pid)


def ranks(command) -> list[psutil.Process]:
    """All processes that this command has started: the three ranks."""
    found = psutil.Process(command.processes[0].pid).children(recursive=True)
    assert len(found) == 3
    return found


def send(command, number: int) -> None:
    os.kill(command.processes[0].pid, number)


def all_gone(processes: list[psutil.Process], seconds: float = 15) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_ends_its_node_with_its_name(command):
    processes = ranks(command)
    victim = processes[-1]
    victim.send_signal(signal.SIGKILL)
    (result,) = command.results(timeout=30)
    assert result.code != 0
    assert "was ended by SIGKILL" in result.output
    assert re.search(r"lost rank \d, node 0 \(\S+\).*: its process has ended", result.output)
    assert "Traceback" not in result.output
    assert all_gone(processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_command_takes_its_workers_along(command, number):
    processes = ranks(command)
    send(command, number)
    (result,) = command.results(timeout=30)
    assert result.code == 130
    assert "Traceback" not in result.output
    assert all_gone(processes)


def test_a_killed_command_leaves_no_worker_behind(command):
    processes = ranks(command)
    send(command, signal.SIGKILL)
    assert all_gone(processes)


def test_a_command_runs_from_any_folder_and_from_its_own(tmp_path):
    for place, name in ((tmp_path, MNIST), (MNIST.parent, MNIST.name)):
        flags = ("--dataset", "digits", "--max-steps", "1", "--device", "cpu", "--out-dir", tmp_path / place.name)
        result = start("python", name, *flags, cwd=place).result()
        assert result.code == 0, result.output
    assert (tmp_path / MNIST.parent.name / "curves.png").exists()


def test_a_second_interrupt_does_not_leave_a_stopped_worker_behind(command):
    processes = ranks(command)
    stopped = processes[-1]
    stopped.send_signal(signal.SIGSTOP)
    while stopped.status() != psutil.STATUS_STOPPED:  # a SIGTERM that comes at the same moment would end it
        time.sleep(0.01)
    try:
        send(command, signal.SIGINT)
        time.sleep(1.0)  # the command now waits for the stopped worker
        send(command, signal.SIGINT)
        command.results(timeout=30)
        assert all_gone(processes, seconds=3)
    finally:
        if stopped.is_running():
            stopped.kill()


@pytest.mark.parametrize(
    "kilobytes, message",
    [(0, "could not load mnist_ddp.train: No usable temporary directory"), (1, "could not write into")],
)
def test_a_disk_without_room_is_named_in_one_line(kilobytes, message, tmp_path):
    limited = (
        "bash",
        "-c",
        f'ulimit -f {kilobytes}; exec "$@"',
        "bash",
        "python",
        MNIST,
    )  # the most that a file may hold
    flags = ("--dataset", "digits", "--max-steps", "1", "--device", "cpu", "--out-dir", tmp_path / "run")
    result = start(*limited, *flags).result()
    assert result.code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_node_of_one_rank_that_waits_for_a_frozen_one_can_be_interrupted(number, tmp_path):
    nodes = nodes_of((1, 1), tmp_path, *LONG)
    run = playing(MNIST, nodes, tmp_path)
    frozen, waiting = run.processes
    try:
        while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
            assert frozen.is_alive(), run.logs[0].read_text()
            time.sleep(0.05)
        os.kill(frozen.pid, signal.SIGSTOP)
        time.sleep(1.0)  # the other one now waits in a collective
        os.kill(waiting.pid, number)
        waiting.join(10)
        assert waiting.exitcode == -number
    finally:
        for process in run.processes:
            process.kill()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_that_goes_away_does_not_make_a_finished_run_fail(ranks, tmp_path):
    flags = f"-g {ranks} --device cpu --dataset digits --max-steps 2 --out-dir {tmp_path}"
    command = f"{sys.executable} {MNIST} {flags} | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = start("bash", "-c", command, PYTHONUNBUFFERED=None).result()
    assert result.code == 0, result.output
    assert len(result.output.splitlines()) == 1, result.output
