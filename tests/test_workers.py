"""A loader's processes: as quick as they can be, one thread each, and at an end with their rank, however that ends."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from tests.harness import ROOT, TIMEOUT_SECONDS, Node, playing, run, start, wait_until, write_trainer

LOADERS = {
    "stock": "dict(num_workers=2, persistent_workers=True)",
    "stock forkserver": "dict(num_workers=2, persistent_workers=True, multiprocessing_context='forkserver')",
    "ours": "worker_options(2, group.device)",
    "ours on one rank": "worker_options(2, group.device) if worker.rank == worker.world_size - 1 else {}",
    "ours, ended late": "worker_options(2, group.device) | {'worker_init_fn': late}",
}
IMPORTS = """
import ctypes
import json
import multiprocessing
import psutil
from torch.utils.data import DataLoader, Dataset
from common.uneven.options import workers
from common.uneven.options.workers import worker_options

multiprocessing.set_forkserver_preload(["torch", "psutil"])  # what a stranger may forget, and then waits longer

def late(worker_id):  # as if the system were late to end this process with its fork server
    workers.end_with_rank(worker_id)
    ctypes.CDLL(None).prctl(workers.PR_SET_PDEATHSIG, 0, 0, 0, 0)

class Numbers(Dataset):
    def __init__(self, count=64, bad=None):
        self.count, self.bad = count, bad
    def __len__(self):
        return self.count
    def __getitem__(self, number):
        if number == self.bad:
            raise ValueError(f"sample {number} cannot be read")
        return number

class Settings(Numbers):
    def __getitem__(self, number):
        return torch.get_num_threads(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
RUN = """
    loader = DataLoader({data}, batch_size=4, collate_fn=list, **{options})
    batches = iter(loader)
    first = next(batches)
    mine = psutil.Process()
    pids = [process.pid for process in [mine, *mine.children(), *mine.children(recursive=True)]]
    file = FOLDER / f"processes-{{worker.rank}}.json"
    file.with_suffix(".part").write_text(json.dumps(pids))
    file.with_suffix(".part").rename(file)
    {rest}
"""
GO_ON = "for numbers in batches: dist.all_reduce(torch.tensor(sum(numbers)))"
ENDLESS = "Numbers(10**9)"


def trainer(folder, loader, rest, data="Numbers()"):
    """A trainer that writes down what it has started, once its loader has given a batch, and then does the `rest`."""
    return write_trainer(folder, RUN.format(data=data, options=LOADERS[loader], rest=rest), IMPORTS)


def started(folder, ranks, node=None):
    """The pids of each rank's processes, once all ranks have read a batch: itself, then a fork server if any, ..."""
    files = [folder / f"processes-{rank}.json" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files), node)
    return [json.loads(file.read_text()) for file in files]


def left(folder, ranks):
    """The processes of all ranks that do not end; they are killed now."""
    every = {pid for processes in started(folder, ranks) for pid in processes}
    found = [psutil.Process(pid) for pid in every if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(found, timeout=TIMEOUT_SECONDS)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    return alive


def play(folder, ranks, *trainer_of):
    """A node under way that runs `trainer`."""
    return playing(trainer(folder, *trainer_of), [Node(["-g", ranks, "--device", "cpu"])], folder)


@pytest.fixture
def endless(request, tmp_path):
    """A node of two ranks that read for ever, what each has started, and its folder. Parameter: which loader."""
    node = play(tmp_path, 2, request.param, GO_ON, ENDLESS)
    return node, started(tmp_path, 2, node), tmp_path


LONG = pytest.mark.long
every_loader = pytest.mark.parametrize(
    "endless", ["stock", pytest.param("stock forkserver", marks=LONG), "ours on one rank"], indirect=True
)
our_loader = pytest.mark.parametrize("endless", ["ours on one rank"], indirect=True)


@LONG
@pytest.mark.parametrize("loader, launcher", [("stock", "own"), ("ours", "own"), ("stock", "torchrun")])
def test_a_run_that_is_done_returns_though_its_loader_lives(loader, launcher, tmp_path):
    script = trainer(tmp_path, loader, "globals()['BATCHES'] = batches")
    command = [script, "-g", 2]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script]
    result = run("python", *command, "--device", "cpu", PYTHONPATH=str(ROOT))
    assert result.code == 0, result.output
    assert result.output.count("Warning") == result.output.count("Traceback") == 0, result.output
    assert not left(tmp_path, 2)


@pytest.mark.parametrize(
    "loader", ["stock", *(pytest.param(kind, marks=LONG) for kind in ("stock forkserver", "ours on one rank"))]
)
def test_an_error_in_the_data_set_leaves_no_process(loader, tmp_path):
    node = play(tmp_path, 2, loader, GO_ON, "Numbers(bad=40 if worker.rank else None)")
    (result,) = node.results()
    assert result.code == 1
    assert "sample 40 cannot be read" in result.output
    assert "Warning" not in result.output, result.output
    assert not left(tmp_path, 2)


@every_loader
def test_a_rank_that_is_killed_leaves_no_process(endless):
    node, processes, folder = endless
    os.kill(processes[1][0], signal.SIGKILL)
    (result,) = node.results()
    assert "rank 1 was ended by SIGKILL" in result.output
    assert "Warning" not in result.output, result.output
    assert not left(folder, 2)


def test_another_program_that_a_dead_rank_has_started_goes_on(tmp_path):
    body = """
        import subprocess
        if not worker.is_main:
            (FOLDER / "pid").write_text(str(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    """
    (result,) = playing(write_trainer(tmp_path, body), [Node(["-g", 2, "--device", "cpu"])], tmp_path).results()
    assert "rank 1 was ended by SIGKILL" in result.output
    upload = psutil.Process(int((tmp_path / "pid").read_text()))
    assert upload.status() != psutil.STATUS_ZOMBIE
    upload.kill()


@pytest.mark.parametrize(
    "endless",
    ["stock", *(pytest.param(kind, marks=LONG) for kind in ("stock forkserver", "ours on one rank"))],
    indirect=True,
)
def test_a_supervisor_that_is_killed_leaves_no_process(endless):
    node, _, folder = endless
    node.processes[0].kill()
    assert not left(folder, 2)


@our_loader
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=LONG), signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_no_process(endless, number):
    node, _, folder = endless
    os.kill(node.processes[0].pid, number)
    (result,) = node.results()
    assert "Traceback" not in result.output and "Warning" not in result.output, result.output
    assert not left(folder, 2)


def test_ctrl_c_in_the_terminal_ends_a_run_of_one_rank_without_a_word_of_its_loader(tmp_path):
    node = play(tmp_path, 1, "ours", GO_ON, ENDLESS)
    (processes,) = started(tmp_path, 1, node)
    for pid in set(processes):  # the terminal sends it to all
        with contextlib.suppress(ProcessLookupError):  # it has ended with one that got it before
            os.kill(pid, signal.SIGINT)
    (result,) = node.results()
    assert "Traceback" not in result.output and "Error" not in result.output, result.output
    assert not left(tmp_path, 1)


@LONG
def test_python_does_not_warn_of_what_a_killed_rank_has_left(tmp_path):
    script = trainer(tmp_path, "ours", GO_ON, ENDLESS)
    node = start("python", script, "-g", 2, "--device", "cpu", PYTHONPATH=str(ROOT))
    os.kill(started(tmp_path, 2, node)[1][0], signal.SIGKILL)
    result = node.result()  # the output ends when no process of the run holds it
    assert "Warning" not in result.output and "rank 1 was ended by SIGKILL" in result.output, result.output
    assert not left(tmp_path, 2)


@LONG
def test_a_rank_without_supervisor_that_is_killed_leaves_no_process(tmp_path):
    node = play(tmp_path, 1, "ours", GO_ON, ENDLESS)
    started(tmp_path, 1, node)
    node.processes[0].kill()
    assert not left(tmp_path, 1)


@pytest.mark.parametrize("endless", ["stock", pytest.param("ours on one rank", marks=LONG)], indirect=True)
def test_a_process_of_the_loader_that_is_killed_is_named_in_one_line(endless):
    node, processes, folder = endless
    victim = processes[1][-1]
    os.kill(victim, signal.SIGKILL)
    (result,) = node.results()
    said = [line for line in result.output.splitlines() if line.startswith("[1 ")]
    assert len(said) == 1 and f"pid {victim}" in said[0].replace("(s)", ""), result.output
    assert "Traceback" not in result.output and "Warning" not in result.output, result.output
    assert not left(folder, 2)


@LONG
def test_a_run_of_one_rank_whose_loader_is_killed_ends_with_one_line(tmp_path):
    node = play(tmp_path, 1, "stock", GO_ON, ENDLESS)
    victim = started(tmp_path, 1, node)[0][-1]
    os.kill(victim, signal.SIGKILL)
    (result,) = node.results()
    assert result.code == 1
    assert result.output.replace("(s)", "").startswith(f"[0] error: DataLoader worker (pid {victim}) ")
    assert len(result.output.splitlines()) == 1, result.output
    assert not left(tmp_path, 1)


@LONG
@our_loader
def test_a_fork_server_that_is_killed_is_named_in_one_line(endless):
    node, processes, folder = endless
    _, victim, *_ = processes[1]
    os.kill(victim, signal.SIGKILL)
    (result,) = node.results()
    said = [line for line in result.output.splitlines() if line.startswith("[1 ")]
    assert len(said) == 1 and "fork server" in said[0], result.output
    assert "Traceback" not in result.output and "Warning" not in result.output, result.output
    assert not left(folder, 2)


@LONG
def test_a_process_of_the_loader_that_ends_after_its_fork_server_prints_no_traceback(tmp_path):
    rest = f"""
    try:
        {GO_ON}
    except RuntimeError:
        time.sleep(2)  # a moment in which the loader has told its processes to stop
        raise
    """
    node = play(tmp_path, 1, "ours, ended late", rest, ENDLESS)
    os.kill(started(tmp_path, 1, node)[0][1], signal.SIGKILL)
    (result,) = node.results()
    assert result.code == 1 and len(result.output.splitlines()) == 1, result.output
    assert not left(tmp_path, 1)


def test_a_process_of_the_loader_has_one_thread_and_leaves_ctrl_c_to_the_rank(tmp_path):
    node = play(tmp_path, 1, "ours", "assert set(first) == {(1, True)}, first", "Settings()")
    (result,) = node.results()
    assert result.code == 0, result.output
