"""Starting and ending: no process outlives its node's command, whatever ends it."""

import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.launch.interruption import TWICE_SECONDS
from common.launch.stopped import StoppedWorkers
from tests.harness import MNIST, ROOT, TIMEOUT_SECONDS, Node, nodes_of, play, playing, start, wait_until, write_trainer

LONG = ("--dataset", "digits", "--epochs", "5000", "--device", "cpu", "--precision", "fp64")


@pytest.fixture
def command(tmp_path):
    """A node's command that trains for a long time, with three workers, once it writes metrics."""
    started = playing(MNIST, [Node(["-g", 3, *LONG, "--out-dir", tmp_path])], tmp_path)
    wait_for_metrics(tmp_path, started)
    return started


def ranks(command) -> list[psutil.Process]:
    """All processes that this command has started: the three ranks."""
    found = psutil.Process(command.processes[0].pid).children(recursive=True)
    assert len(found) == 3
    return found


def send(command, number: int) -> None:
    os.kill(command.processes[0].pid, number)


def stop(process: psutil.Process) -> None:
    """Stop it with SIGSTOP, and wait until it stands: on a busy machine it goes on for a while."""
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_ends_its_node_with_its_name(command):
    processes = ranks(command)
    victim = processes[-1]
    victim.send_signal(signal.SIGKILL)
    (result,) = command.results()
    assert result.code != 0
    assert "was ended by SIGKILL" in result.output
    assert re.search(r"lost rank \d, node 0 \(\S+\).*: was ended by SIGKILL", result.output)
    assert "Traceback" not in result.output
    assert all_gone(processes)


def test_a_supervisor_that_sees_all_ends_at_once_names_the_one_that_was_killed(command):
    """As on a busy machine: the others have ended because of that one before the supervisor gets a turn."""
    processes, supervisor = ranks(command), psutil.Process(command.processes[0].pid)
    stop(supervisor)
    processes[-1].send_signal(signal.SIGKILL)
    wait_until(lambda: all(process.status() == psutil.STATUS_ZOMBIE for process in processes))
    supervisor.resume()
    (result,) = command.results()
    assert result.code == 137 and "rank 2 was ended by SIGKILL" in result.output, result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_command_takes_its_workers_along(command, number):
    processes = ranks(command)
    send(command, number)
    (result,) = command.results()
    assert result.code == 75  # after a checkpoint
    assert "Traceback" not in result.output
    assert all_gone(processes)


def test_a_killed_supervisor_leaves_no_worker_behind_and_is_named(command):
    processes, supervisor = ranks(command), command.processes[0].pid
    send(command, signal.SIGKILL)
    assert all_gone(processes)
    said = f"error: the supervisor of this node (pid {supervisor}) has ended: ending this rank"
    assert said in command.logs[0].read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no system continues a process when its parent ends")
def test_a_killed_supervisor_leaves_no_stopped_worker_behind(command):
    processes = ranks(command)
    for process in processes:
        stop(process)
    send(command, signal.SIGKILL)
    assert all_gone(processes)


@pytest.mark.long
def test_a_launcher_that_is_killed_leaves_no_rank_behind_and_is_named(tmp_path):
    flags = ["--nproc-per-node", 2, MNIST, *LONG, "--out-dir", tmp_path]
    launcher = start("python", "-m", "torch.distributed.run", "--standalone", *flags)
    wait_for_metrics(tmp_path, launcher)
    agent = psutil.Process(launcher.process.pid)
    processes = agent.children()
    assert {" ".join(filter(None, process.cmdline())) for process in processes} == {
        f"mnist-distributed.py rank {rank} of 2 (node 0)" for rank in range(2)
    }
    agent.kill()
    said = rf"error: (torchrun \(pid {agent.pid}\) has ended|lost the store of torchrun at \S+: has torchrun ended\?)"
    assert re.search(said, launcher.result().output)
    assert all_gone(processes)


def test_the_titles_of_processes_name_the_ranks_and_the_supervisor(command):
    processes = [psutil.Process(command.processes[0].pid), *ranks(command)]
    titles = [process.cmdline()[0] for process in processes]
    roles = ["supervisor of ranks 0 to 2", "rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert titles == [f"mnist-distributed.py {role} (node 0)" for role in roles]


FORKS = """
if not os.fork():  # as a plain DataLoader does
    import setproctitle
    Path(args.out_dir, "title").write_text(setproctitle.getproctitle())
    os._exit(0)
os.wait()
"""


def test_a_process_that_a_rank_has_forked_does_not_pass_for_the_rank(tmp_path):
    play(write_trainer(tmp_path, FORKS, "import os\n"), (1,), tmp_path)
    assert (tmp_path / "title").read_text() == "stranger-distributed.py process of rank 0 of 1 (node 0)"


IDLE = """
import signal
from pathlib import Path

def train(worker, args):  # without joining, for which --timeout is too short on a busy machine
    (Path(__file__).parent / f"rank-{worker.rank}").touch()
    signal.pause()
"""


def test_workers_that_stay_stopped_are_named_and_ended(tmp_path):
    script = write_trainer(tmp_path, "")
    (tmp_path / "stranger.py").write_text(IDLE)
    run = playing(script, [Node(["-g", 2, "--device", "cpu", "--timeout", 3])], tmp_path)
    wait_until(lambda: all((tmp_path / f"rank-{rank}").exists() for rank in range(2)), run)
    supervisor = psutil.Process(run.processes[0].pid)
    processes = supervisor.children()
    stop(supervisor)  # so that it finds both stopped when it looks next
    for process in processes:
        stop(process)
    supervisor.resume()
    (result,) = run.results()
    said = "error: rank 0 and rank 1 stopped for 3 s (--timeout), by SIGSTOP or Ctrl-Z; ending all workers"
    assert result.code == 1 and said in result.output, result.output
    assert all_gone(processes)


def test_a_stopped_worker_has_until_the_timeout_to_continue():
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    process, watch = psutil.Process(worker.pid), StoppedWorkers(look_seconds=1.0, timeout_seconds=2.0)
    try:
        stop(process)
        assert watch.look([worker]) == watch.look([worker]) == []
        process.resume()
        wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
        assert watch.look([worker]) == []
        stop(process)
        assert [watch.look([worker]) for _ in range(3)] == [[], [], [worker]]
    finally:
        worker.kill()
        worker.join()


LOADING = """
    import torch.utils.data
    from common.uneven.options.workers import worker_options

    loader = torch.utils.data.DataLoader(range(10**6), batch_size=2, **worker_options(1, group.device))
    for number, batch in enumerate(loader):
        is_at_end = torch.tensor((FOLDER / "end").exists(), dtype=torch.int)
        dist.all_reduce(is_at_end)  # the ranks look at different moments, and leave together
        if is_at_end:
            break
        time.sleep(0.02)
        if worker.is_main:
            (FOLDER / "metrics.part").write_text(str(number))
            (FOLDER / "metrics.part").replace(FOLDER / "metrics.jsonl")
"""


@pytest.mark.long
@pytest.mark.parametrize("victim, code, said", [
    ("loader", 1, r"error: (a )?DataLoader worker .*(exited unexpectedly|is killed by signal)"),
    ("forkserver", 1, r"error: (a )?DataLoader worker .*(exited unexpectedly|is killed by signal)"),
    ("resource_tracker", 0, ""),
])  # fmt: skip
def test_a_helper_process_that_is_killed_ends_its_node_or_is_not_needed(victim, code, said, tmp_path):
    script = write_trainer(tmp_path, LOADING)
    command = start("python", script, "-g", 2, "--device", "cpu", PYTHONPATH=str(ROOT))
    wait_for_metrics(tmp_path, command)
    rank = psutil.Process(command.process.pid).children()[1]
    helpers = {name: one for one in rank.children() for name in ("forkserver", "resource_tracker") if is_a(one, name)}
    helpers["loader"] = helpers["forkserver"].children()[0]
    everything = psutil.Process(command.process.pid).children(recursive=True)
    helpers[victim].kill()
    if not code:  # nobody needs it, and the training goes on
        seen = int((tmp_path / "metrics.jsonl").read_text())
        wait_until(lambda: int((tmp_path / "metrics.jsonl").read_text()) > seen + 5, command)
        (tmp_path / "end").touch()
    result = command.result()
    assert result.code == code, result.output
    assert re.search(said, result.output)
    assert all_gone(everything)


def is_a(process: psutil.Process, helper: str) -> bool:
    return any(f"multiprocessing.{helper}" in part for part in process.cmdline())


def wait_for_metrics(folder: Path, run: playing | start) -> None:
    wait_until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text(), run)


def stands_still(pid: int) -> bool:
    """Has this process computed nothing for a moment, because it waits? Where it only had no turn on a busy machine,
    the signal meets it a step earlier, and it waits after that."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(0.3)
    return process.cpu_times() == before


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.long), True], ids=["any", "its own"])
def test_a_command_runs_from_any_folder_and_from_its_own(own, tmp_path):
    place, name = (MNIST.parent, MNIST.name) if own else (tmp_path, MNIST)
    flags = ("--dataset", "digits", "--max-steps", "1", "--device", "cpu", "--out-dir", tmp_path / "run")
    result = start("python", name, *flags, cwd=place).result()
    assert result.code == 0, result.output
    assert (tmp_path / "run" / "curves.png").exists()


def test_a_second_interrupt_does_not_leave_a_stopped_worker_behind(command):
    processes = ranks(command)
    stop(processes[-1])  # a SIGTERM that came before it stands would end it
    send(command, signal.SIGINT)
    command.wait_for("once more ends at once")
    time.sleep(TWICE_SECONDS + 0.5)  # at least: what comes sooner counts as the same signal
    send(command, signal.SIGINT)
    command.results()
    assert all_gone(processes)


@pytest.mark.parametrize(
    "kilobytes, message",
    [
        (0, "could not load mnist_ddp.train: No usable temporary directory"),
        pytest.param(1, "could not write into", marks=pytest.mark.long),
    ],
)
def test_a_disk_without_room_is_named_in_one_line(kilobytes, message, tmp_path):
    # the most that a file may hold
    limited = ("bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", "python", MNIST)
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
    wait_for_metrics(tmp_path, run)
    for process in psutil.Process(frozen.pid).children():
        stop(process)
    (rank,) = psutil.Process(waiting.pid).children()
    wait_until(lambda: stands_still(rank.pid), run)  # in a collective
    os.kill(waiting.pid, number)  # asks for a checkpoint, which the frozen rank prevents
    run.wait_for("once more ends at once", node=1)
    time.sleep(TWICE_SECONDS + 0.5)  # at least: what comes sooner counts as the same signal
    os.kill(waiting.pid, number)
    wait_until(lambda: waiting.exitcode is not None)
    assert waiting.exitcode == 128 + number


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_reader_that_goes_away_does_not_make_a_finished_run_fail(ranks, tmp_path):
    flags = f"-g {ranks} --device cpu --dataset digits --max-steps 2 --out-dir {tmp_path}"
    command = f"{sys.executable} {MNIST} {flags} | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = start("bash", "-c", command, PYTHONUNBUFFERED=None).result()
    assert result.code == 0, result.output
    assert len(result.output.splitlines()) == 1, result.output


WRITES = """
def write():  # for longer than the supervisor gives the other ranks
    (FOLDER / "writes").touch()
    while "waiting for rank 0 to write" not in (FOLDER / "node-0-0.log").read_text():
        time.sleep(0.05)
    (FOLDER / "written").touch()

if worker.is_main:
    group.at_end.callback(write)
else:
    while not (FOLDER / "writes").exists():
        time.sleep(0.05)
raise RunError("the loss of step 1 is nan", same_on_every_rank=True)
"""
SHORT_GRACE = "from common.launch import supervisor\n\nsupervisor.GRACE_SECONDS = 0.5"


def test_a_rank_that_still_writes_when_the_run_ends_is_waited_for_and_says_why_it_ended(tmp_path):
    script = write_trainer(tmp_path, WRITES, SHORT_GRACE)
    (result,) = playing(script, [Node(["-g", 2, "--device", "cpu"])], tmp_path).results()
    assert result.code == 1 and (tmp_path / "written").exists(), result.output
    assert "waiting for rank 0 to write" in result.output
    assert "error: the loss of step 1 is nan" in result.output
