"""How tests start trainers: as real commands, or as the same commands without the seconds of importing torch.

`run` starts a command as a person would. `play` runs the same scripts, as `python SCRIPT FLAGS` would, in processes
forked from one server that has imported torch and the trainers' modules: real supervisors, workers, sockets and files,
ten ranks in a second.

A test waits for events with `wait_until`: a line, a row, a file, the state of a process. Limits in seconds only end
what hangs. What a test has started ends with it, and with pytest, whatever happens (`end_all`, `die_with_parent`).
"""

import contextlib
import ctypes
import functools
import inspect
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import psutil

from common.launch.addresses import free_port
from common.record.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
MNIST = ROOT / "mnist_ddp" / "mnist-distributed.py"
FINETUNE = ROOT / "bert_ddp" / "bert-finetune.py"
PREDICT = ROOT / "bert_ddp" / "bert-predict.py"
BERT = ROOT / "bert_ddp" / "bert-distributed.py"
TIMEOUT_SECONDS = 600  # ends what hangs; a slow machine must not reach it
TAIL_LINES = 60  # of each log that a failed test shows
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# torch asks the name server for the name of each connection: one that is silent for 10 s would outlast short timeouts
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@dataclass
class Result:
    """What a command or a played node has printed, and how it ended."""

    code: int
    output: str  # standard output and standard error together
    seconds: float

    @property
    def lines(self) -> list[str]:
        """What it has printed, but for what a node says while it waits for others to join: more on a slow machine."""
        waits = re.compile(r"\[\d+.*\] (on node \d+ run:|waiting for )")
        return [line for line in self.output.splitlines() if line.strip() and not waits.match(line)]


# --- waiting, and ending ------------------------------------------------------------------------------------------

_under_way: list["start | playing"] = []  # what the current test has started


def wait_until(
    condition: Callable[[], object], run: "start | playing | None" = None, seconds: float = TIMEOUT_SECONDS
) -> object:
    """Wait until `condition()` is true and return its value. Fails, with what `run` has printed, once all of `run` has
    ended without it, or at the limit, which only ends a hang."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if run is not None and not run.goes_on():
            if value := condition():  # it came just before the end
                return value
            raise AssertionError(f"the run has ended without what the test waits for:\n{run.said()}")
        if time.monotonic() > deadline:
            waited_for = inspect.getsource(condition).strip() if inspect.isfunction(condition) else condition
            raise AssertionError(f"not within {seconds} s: {waited_for}\n{run.said() if run else ''}")
        time.sleep(0.02)
    return value


def end_all() -> list[tuple[str, str]]:
    """Kill what the current test has started and not marked as lasting. Returns (title, output) of each."""
    outputs = []
    while _under_way:
        one = _under_way.pop()
        one.end()
        outputs.append((one.title(), "\n".join(one.said().splitlines()[-TAIL_LINES:])))
    return outputs[::-1]


def die_with_parent() -> None:
    """From now on this process is killed when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(*command: object, timeout: float = TIMEOUT_SECONDS, cwd: Path | None = None, **environ: str) -> Result:
    """Run one command to its end; `environ` adds variables, and None as a value takes one away."""
    return start(*command, cwd=cwd, **environ).result(timeout)


class start:
    """A command under way: `result()` waits for it, `process` is its Popen."""

    def __init__(self, *command: object, cwd: Path | None = None, **environ: str):
        command = [sys.executable if part == "python" else str(part) for part in command]
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **environ}
        variables = {name: value for name, value in variables.items() if value is not None}
        self.began = time.monotonic()
        self.output = ""  # once it has ended
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=variables,
            preexec_fn=_prepare,
        )
        _under_way.append(self)

    def result(self, timeout: float = TIMEOUT_SECONDS) -> Result:
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"{self.process.args} did not end within {timeout} s:\n{self.output}") from None
        self.output = self.output or output
        return Result(self.process.returncode, self.output, time.monotonic() - self.began)

    def lasts(self) -> "start":
        """It goes on when the test ends: whoever has started it ends it."""
        _under_way.remove(self)
        return self

    def end(self) -> None:
        """Kill it and what it has started."""
        if self.process.poll() is None:  # else its pid may be another program's by now
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(self.process.pid)
        with contextlib.suppress(ValueError, subprocess.TimeoutExpired):  # read already; or somebody holds the pipe
            self.output += self.process.communicate(timeout=10)[0] or ""

    def goes_on(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """What it has printed, once it has ended."""
        return self.output

    def title(self) -> str:
        return f"{' '.join(map(str, self.process.args))} -> {self.process.returncode}"


def _prepare() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and these tests may run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


# --- workers without the import ----------------------------------------------------------------------------------

_context = multiprocessing.get_context(
    "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
)
_context.set_forkserver_preload(["tests.preload"])
SERVER = "UNEVEN_TESTS_SERVER"  # the socket of the fork server that the processes of one `pytest -n` share


def share_server() -> None:
    """Start the fork server, whose imports take seconds, for this process and for those that it starts from now on."""
    if hasattr(forkserver._forkserver, "_forkserver_authkey"):  # Python 3.14: each process starts one of its own
        return
    forkserver.ensure_running()
    os.environ[SERVER] = forkserver._forkserver._forkserver_address


def use_shared_server() -> None:
    """From now on, `playing` asks the server of `share_server` for its processes, if there is one."""
    server = forkserver._forkserver
    if SERVER not in os.environ or server._forkserver_address:
        return
    server._forkserver_address, server._forkserver_alive_fd = os.environ[SERVER], os.pipe()[1]
    server.ensure_running = forkserver.ensure_running = lambda: None  # whoever has started it keeps it running


def _be(script: Path, flags: list[str], environ: dict[str, str], log: str, cwd: Path | None) -> None:
    """What `python SCRIPT FLAGS` does in the folder `cwd`, with its output in a file."""
    die_with_parent()
    if cwd:
        os.chdir(cwd)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    import torch

    torch.set_num_threads(1)
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@dataclass
class Node:
    """Flags of one node, and what its environment adds."""

    flags: list[object]
    environ: dict[str, str] | None = None


class playing:
    """Nodes under way: `processes` has the command of each node; `results()` waits for them."""

    def __init__(self, script: Path, nodes: list[Node], folder: Path, cwd: Path | None = None):
        self.began = time.monotonic()
        self.logs, self.processes = [], []
        _under_way.append(self)
        for number, node in enumerate(nodes):
            environ = {"OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
            log = folder / f"node-{number}-{len(list(folder.glob('node-*')))}.log"
            log.touch()
            self.logs.append(log)
            environ |= node.environ or {}
            process = _context.Process(target=_be, args=(script, list(map(str, node.flags)), environ, str(log), cwd))
            process.start()
            self.processes.append(process)

    def results(self, timeout: float = TIMEOUT_SECONDS) -> list[Result]:
        """One Result a node. A command that a signal has ended counts as 1."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        self.end()
        outputs = [log.read_text() for log in self.logs]
        assert not late, f"{len(late)} nodes did not end within {timeout} s:\n" + "\n".join(outputs)
        codes = [1 if process.exitcode < 0 else process.exitcode for process in self.processes]
        seconds = time.monotonic() - self.began
        return [Result(code, output, seconds) for code, output in zip(codes, outputs, strict=True)]

    def kill(self) -> None:
        """End every process of every node with SIGKILL. Fails where a node has ended by itself."""
        kill(*(process.pid for process in self.processes))
        for process in self.processes:
            process.join()
            assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed"

    def end(self) -> None:
        """Kill what goes on."""
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    kill(process.pid)
                process.join()

    def goes_on(self) -> bool:
        """Is there a node that has not ended?"""
        return any(process.exitcode is None for process in self.processes)

    def wait_for(self, text: str, node: int = 0) -> str:
        """Wait until this node has printed `text`. Returns all that it has printed."""
        wait_until(lambda: text in self.logs[node].read_text(), self)
        return self.logs[node].read_text()

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

    def title(self) -> str:
        return f"{len(self.logs)} nodes -> {[process.exitcode for process in self.processes]}"


def kill(*pids: int) -> None:
    """End processes and all that they have started with SIGKILL, at once: all are stopped first, because one that still
    runs could start another meanwhile, or say something about the end of the first, and end by itself."""
    roots = [psutil.Process(pid) for pid in pids]
    family: list[psutil.Process] = []
    while new := [one for root in roots for one in [root, *_children(root)] if one not in family]:
        family += new
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    time.sleep(0.001)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def freeze(pid: int) -> None:
    """Stop a child with SIGSTOP and wait until it stands: on a busy machine, its threads go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def write_trainer(folder: Path, body: str, imports: str = "") -> Path:
    """Write a user's own trainer: its script in `folder`, and beside it a module whose `train(worker, args)` has this
    body, with `group` its process group. Returns the script."""
    module = f"""
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
{imports}
from common.errors import RunError, UserError
from common.join.process_group import process_group
from common.launch import cli

FOLDER = Path(__file__).parent


def train(worker, args):
    with process_group(worker, cli.join_options(args)) as group:
{textwrap.indent(textwrap.dedent(body), " " * 8)}
"""
    (folder / "stranger.py").write_text(module)
    script = folder / "stranger-distributed.py"
    script.write_text(
        "from common.launch import cli, start\n\n"
        'if __name__ == "__main__":\n    parser = cli.parser("A stranger\'s trainer")\n'
        '    cli.add_output_flags(parser)\n    start.main(parser, "stranger:train")\n'
    )
    return script


def play(
    trainer: Path, gpus: tuple[int, ...], folder: Path, *flags: object, timeout: float = TIMEOUT_SECONDS
) -> list[Result]:
    """Train on the layout `gpus`, such as (3, 1), all nodes on this machine, with its files in `folder`.

    Fails with the output when a node ends with another code than 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = playing(trainer, nodes_of(gpus, folder, *flags), folder).results(timeout)
    assert not any(result.code for result in results), "\n\n".join(result.output for result in results if result.code)
    return results


def nodes_of(gpus: tuple[int, ...], folder: Path, *flags: object) -> list[Node]:
    """The command of each node of the layout `gpus` on loopback, on a free port. It draws no curves.png, which
    takes 0.3 s of processor time."""
    layout = ["-n", len(gpus), "-g", ",".join(map(str, gpus)), "--device", "cpu", "--master-port", free_port()]
    return [
        Node([*layout, "-i", number, "--master-addr", "127.0.0.1", "--out-dir", folder, "--no-plot", *flags])
        for number in range(len(gpus))
    ]


def play_torchrun(trainer: Path, gpus: tuple[int, ...], folder: Path, *flags: object) -> list[Result]:
    """Train as torchrun would start it: one process a rank with torchrun's variables."""
    folder.mkdir(parents=True, exist_ok=True)
    results = playing(
        trainer, torchrun_nodes(gpus, "--device", "cpu", "--out-dir", folder, "--no-plot", *flags), folder
    ).results()
    for result in results:
        assert result.code == 0, result.output
    return results


def torchrun_nodes(gpus: tuple[int, ...], *flags: object) -> list[Node]:
    """The command of each rank, with the variables that torchrun gives it."""
    port, nodes = str(free_port()), []
    for number, size in enumerate(gpus):
        for local_rank in range(size):
            environ = {
                "RANK": str(sum(gpus[:number]) + local_rank),
                "WORLD_SIZE": str(sum(gpus)),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(gpus)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            nodes.append(Node(list(flags), environ))
    return nodes


@functools.cache
def flags_of(script: Path) -> set[str]:
    """All flags that a program takes, as its --help shows them."""
    shown = run("python", script, "--help")
    assert shown.code == 0, shown.output
    return set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", shown.output))


# --- what a run has left -----------------------------------------------------------------------------------------


def rows(folder: Path, kind: str) -> list[dict]:
    """The rows of one kind in a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def rows_so_far(folder: Path, kind: str) -> list[dict]:
    """The rows that a run under way has written, none before its first; a read may see half of the last line."""
    path = folder / "metrics.jsonl"
    return [row for row in read_metrics(path) if row["kind"] == kind] if path.exists() else []


def losses(folder: Path) -> list[float]:
    """The training loss of every step; the steps are checked to be 1, 2, 3, ..."""
    train = rows(folder, "train")
    assert [row["step"] for row in train] == list(range(1, len(train) + 1))
    return [row["loss"] for row in train]


def weights(folder: Path):
    """The weights of a run's latest checkpoint, by name."""
    from safetensors.torch import load_file

    return load_file(folder / "checkpoints" / "latest" / "model.safetensors")


def largest_difference(first: dict, second: dict) -> float:
    """The largest absolute difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
