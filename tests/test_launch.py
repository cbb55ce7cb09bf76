"""Starting and ending: no process outlives its node's command, whatever ends it."""

import signal
import time

import psutil
import pytest

from tests.harness import MNIST, start

LONG = ("--dataset", "digits", "--epochs", "5000", "--device", "cpu", "--precision", "fp64")


@pytest.fixture
def command(tmp_path):
    """A node's command that trains for a long time, with three workers, once it writes metrics."""
    started = start("python", MNIST, "-g", "3", *LONG, "--out-dir", tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert started.process.poll() is None and time.monotonic() < deadline, started.result(1).output
        time.sleep(0.05)
    yield started
    started.process.kill()


def family(command) -> list[psutil.Process]:
    """All processes that this command has started, workers and the fork server."""
    return psutil.Process(command.process.pid).children(recursive=True)


def workers_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The three with connections of their own: the ranks."""
    return [process for process in processes if process.num_threads() > 1 and process.net_connections()]


def all_gone(processes: list[psutil.Process], seconds: float = 15) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_ends_its_node_with_its_name(command):
    processes = family(command)
    victim = workers_of(processes)[-1]
    victim.send_signal(signal.SIGKILL)
    result = command.result(timeout=30)
    assert result.code == 128 + signal.SIGKILL or "lost contact" in result.output
    assert result.code != 0
    assert "was ended by SIGKILL" in result.output
    assert "lost contact with another rank" in result.output
    assert "Traceback" not in result.output
    assert all_gone(processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_command_takes_its_workers_along(command, number):
    processes = family(command)
    command.process.send_signal(number)
    result = command.result(timeout=30)
    assert result.code == 130
    assert "Traceback" not in result.output
    assert all_gone(processes)


def test_a_killed_command_leaves_no_worker_behind(command):
    processes = family(command)
    command.process.kill()
    command.process.wait()
    assert all_gone(processes)


def test_a_command_runs_from_any_folder_and_from_its_own(tmp_path):
    for place, name in ((tmp_path, MNIST), (MNIST.parent, MNIST.name)):
        flags = ("--dataset", "digits", "--max-steps", "1", "--device", "cpu", "--out-dir", tmp_path / place.name)
        result = start("python", name, *flags, cwd=place).result()
        assert result.code == 0, result.output
    assert (tmp_path / MNIST.parent.name / "curves.png").exists()


def test_a_second_interrupt_does_not_leave_a_stopped_worker_behind(command):
    processes = family(command)
    stopped = workers_of(processes)[-1]
    stopped.send_signal(signal.SIGSTOP)
    try:
        command.process.send_signal(signal.SIGINT)
        time.sleep(1.0)  # the command now waits for the stopped worker
        command.process.send_signal(signal.SIGINT)
        command.result(timeout=30)
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
