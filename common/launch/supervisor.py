"""Start one process for each worker of this node, watch them, and end them together.

On Linux the supervisor imports the trainer's module once and forks the workers: eight start in the time of one, and
share the memory of what was imported. It must not use CUDA, threads or torch's thread pool before that. Elsewhere
each worker is a fresh interpreter that imports the module itself.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from common.console import flush, say
from common.errors import ExplainedError, Interrupted
from common.launch import orphans, worker
from common.launch.interruption import INTERRUPTED, Interruption
from common.launch.layout import Worker
from common.launch.replacing import FAILED, FINISHES, STARTS, WAITS, Board, Replacing
from common.launch.stopped import StoppedWorkers
from common.launch.title import name_supervisor

GRACE_SECONDS = 10.0  # after one worker has failed, for the others to end: rank 0 stays four seconds for late nodes
COMPLETE_SECONDS = 20.0  # after one has ended well, for those that wait to be let in: there is no run any more
KILL_SECONDS = 10.0  # for SIGKILL to end a process
TELL_SECONDS = 1.0  # for the store to take the cause of an end
ENDED = "common.join.ended"  # imported by its name, as the trainer: it needs torch, which --help does not load
LOOK_SECONDS = 1.0  # check exit codes too: a process that a worker left behind may keep its sentinel open


def supervise(target: str, workers: list[Worker], args: Namespace) -> int:
    """Run all workers until they end. When one fails, end the others. Returns the first failure's exit code, or 0."""
    try:
        interruption = Interruption()
        name_supervisor(workers[0].layout)
        elastic = getattr(args, "elastic", None)
        if elastic:
            expect_lost_processes()
        context = _context(target)
        board = Board(context, workers)
        board.leader = workers[0].layout.leader
        interruption.tell = board.note_signal
        replacing = Replacing(board) if elastic else None

        def process_of(place: Worker) -> BaseProcess:
            place = replace(place, board=board)
            board.note(place, STARTS)
            board.note_rank(place)
            if replacing:
                replacing.note_start(place)
            return context.Process(  # type: ignore[attr-defined]
                target=worker.run, args=(target, place, args, os.getpid()), name=f"rank {place.rank}"
            )

        code = _run_all(_Workers(workers, process_of, board, replacing), args, interruption)
        if interruption.received and board.leader and all(board.doing(one) in (STARTS, WAITS) for one in workers):
            say("this node was not in the run yet, which goes on")
        if threading.active_count() > 1:  # one that comes back from torch while Python ends would abort the process
            flush()
            os._exit(code)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except ExplainedError as error:
        say(f"error: {error}", error=True)
        return error.exit_code


def expect_lost_processes() -> None:
    """With --elastic, before torch is loaded: it would log attempts to reach processes that have ended as errors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def _context(target: str) -> BaseContext:
    """How to start the workers: by fork, with the module imported already, or as new interpreters that import it."""
    if sys.platform != "linux":  # Windows has no fork, and macOS' frameworks do not survive one
        return multiprocessing.get_context("spawn")
    # A process that has started CUDA's driver cannot be forked. Let torch ask NVML whether there are GPUs instead.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    worker.load(target)
    torch = sys.modules.get("torch")
    started_cuda = torch is not None and torch.cuda.is_initialized()  # by a module that uses a GPU when it is imported
    return multiprocessing.get_context("spawn" if started_cuda else "fork")


class _Workers:
    """The processes of this node's workers."""

    def __init__(
        self,
        workers: list[Worker],
        process_of: Callable[[Worker], BaseProcess],
        board: Board,
        replacing: Replacing | None,
    ):
        self.process_of, self.board, self.replacing = process_of, board, replacing
        self.places = {process_of(one): one for one in workers}
        self.known: set[int] = set()  # this process's children that are no worker's orphans
        self.stopped: dict[BaseProcess, str] = {}  # those that were ended because they were stopped, and why

    def start(self) -> None:
        for process in self.places:
            process.start()
        self.known = orphans.children()

    def replace(self, process: BaseProcess) -> BaseProcess | None:
        """Start another process for a worker that has died, with --elastic; None where it is not to be replaced."""
        if not self.replacing:
            return None
        place = self.replacing.successor(self.places[process], process.exitcode or 0, self.cause(process))
        if place is None:
            return None
        successor = self.process_of(place)
        try:
            successor.start()
        except OSError as error:  # no memory for it, or no more processes: the others go on
            self.replacing.leave_out(place, f"cannot be started again ({error.strerror})")
            return None
        self.places[successor] = place
        self.known.add(successor.pid or 0)
        return successor

    def cause(self, process: BaseProcess) -> str:
        """Why a process has ended, as a part of a sentence."""
        return self.stopped.get(process) or _cause(process.exitcode or 0)

    def forget(self, replaced: list[BaseProcess]) -> None:
        """Close the descriptors of processes that have ended."""
        for process in replaced:
            self.known.discard(process.pid or 0)
            del self.places[process]
            self.stopped.pop(process, None)
            process.close()

    def doing(self, process: BaseProcess) -> int:
        """What this worker says that it does: a value of `Board.note`."""
        return self.board.doing(self.places[process])

    def rank_of(self, process: BaseProcess) -> int | None:
        """Its rank now, among members that may have changed; None for one that is no member yet."""
        is_member = not self.board.leader or self.doing(process) not in (STARTS, WAITS)
        return self.board.rank_of(self.places[process]) if is_member else None

    def is_left_out(self, process: BaseProcess) -> bool:
        """Do the others of this node go on without it?"""
        if not self.replacing:
            return False
        doing, place = self.doing(process), self.places[process]
        gave_up = doing == WAITS and (process.exitcode or 0) > 0
        return doing == FAILED or gave_up or place.rank in self.replacing.left_out


def _run_all(workers: _Workers, args: Namespace, interruption: Interruption) -> int:
    orphans.adopt()
    try:
        workers.start()
        interruption.watch(workers.places)
        return _wait_for_all(workers, args.timeout, args.work_timeout, interruption)
    except OSError as error:
        fix = "end other processes, free memory, or see `ulimit -u`"
        say(f"error: could not start {len(workers.places)} workers: {error.strerror}: {fix}", error=True)
        return 1
    finally:
        interruption.ignore()  # another Ctrl-C must not keep us from ending a stopped worker
        _end([process for process in workers.places if process.pid], workers.known)


def _wait_for_all(
    workers: _Workers, timeout_seconds: float, work_timeout_seconds: float, interruption: Interruption
) -> int:
    """Returns the first failure's exit code, or 0."""
    running, stopped = list(workers.places), StoppedWorkers(LOOK_SECONDS, timeout_seconds)
    first_failure, left_out, deadline, store_answers = 0, 0, float("inf"), True
    may_replace, is_complete, told = workers.replacing is not None, False, list[str]()
    while running:
        if is_complete and deadline == float("inf") and all(workers.doing(one) == WAITS for one in running):
            deadline = time.monotonic() + COMPLETE_SECONDS
        if time.monotonic() > deadline:
            finishing = [one.name for one in running if workers.doing(one) == FINISHES]
            if not finishing or time.monotonic() > deadline + work_timeout_seconds:
                break
            if finishing != told:
                told = finishing
                say(f"waiting for {' and '.join(told)} to write, at most {work_timeout_seconds:.0f} s (--work-timeout)")
        interruption.require_in_time()
        ready = wait([process.sentinel for process in running], timeout=LOOK_SECONDS)
        for process in running:
            if process.sentinel in ready:
                process.join(LOOK_SECONDS)  # its files are closed, but its exit code may take a moment
        ended = [process for process in running if process.exitcode is not None]
        running = [process for process in running if process not in ended]
        replaced: list[BaseProcess] = []
        ranks = {process: workers.rank_of(process) for process in ended}  # before others take their places
        for process in ended:
            if interruption.has_ended(process, or_the_terminal=workers.replacing is not None):
                if not workers.replacing:
                    return interruption.exit_code
                left_out = left_out or interruption.exit_code  # it was not training yet: the others save now
                continue
            may_replace = may_replace and bool(process.exitcode) and not interruption.received  # else the run ends
            if may_replace and (successor := workers.replace(process)):
                running.append(successor)
                replaced.append(process)
                interruption.watch(running)
            elif is_complete and workers.doing(process) == WAITS:
                pass  # there is no run any more into which it could be let
            elif workers.is_left_out(process):
                left_out = left_out or _shell_code(process)
            elif not process.exitcode:
                is_complete = workers.replacing is not None
            elif not first_failure:
                first_failure = _exit_code(process)
                deadline = time.monotonic() + GRACE_SECONDS
        for process in ended:
            rank = ranks[process]
            if process.exitcode and process.exitcode != Interrupted.exit_code and store_answers and rank is not None:
                place = replace(workers.places[process], board=workers.board)
                store_answers = _tell(place, rank, workers.cause(process), process.pid)
        if any(process.exitcode for process in ended):
            orphans.end(workers.known)
        workers.forget(replaced)
        if overdue := stopped.look(running):
            if may_replace:
                for process in overdue:
                    say(f"{process.name} stopped for {timeout_seconds:.0f} s (--timeout): ending it")
                    workers.stopped[process] = f"was stopped for {timeout_seconds:.0f} s (--timeout), and ended"
                    process.kill()
                continue
            who = " and ".join(process.name for process in overdue)
            so_long = f"{timeout_seconds:.0f} s (--timeout), by SIGSTOP or Ctrl-Z"
            say(f"error: {who} stopped for {so_long}; ending all workers of this node", error=True)
            return first_failure or 1
    if first_failure and running:
        who = " and ".join(process.name for process in running)
        say(f"error: {who} did not end within {GRACE_SECONDS:.0f} s of another worker's end; ending it", error=True)
    return first_failure or left_out


def _exit_code(process: BaseProcess) -> int:
    """The worker's exit code, as in shells. A signal is printed."""
    code = process.exitcode or 0
    if code < 0:
        say(f"{process.name} {_cause(code)}; ending the other workers of this node")
    return _shell_code(process)


def _shell_code(process: BaseProcess) -> int:
    """The worker's exit code. A signal becomes 128 + its number."""
    code = process.exitcode or 0
    return code if code >= 0 else 128 - code


def _cause(code: int) -> str:
    """Why a process with this exit code has ended, as a part of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + " (out of memory? see `dmesg`)" * (name == "SIGKILL")


def _tell(place: Worker, rank: int, cause: str, pid: int | None) -> bool:
    """Let the other ranks know why this worker has ended, if torch is loaded here. False where the store did not answer
    in time."""
    if "torch" not in sys.modules:
        return False

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended meanwhile
            importlib.import_module(ENDED).tell(place, rank, cause, pid)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(TELL_SECONDS)
    return not thread.is_alive()


def _end(processes: list[BaseProcess], known: set[int]) -> None:
    """No worker outlives its supervisor, nor does what it leaves. By SIGKILL: in training, SIGTERM asks for a
    checkpoint, which these workers cannot write any more."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join(KILL_SECONDS)
        if process.is_alive():
            who = f"{process.name} (pid {process.pid})"
            say(f"error: {who} has not ended {KILL_SECONDS:.0f} s after SIGKILL: does it wait for a disk?", error=True)
    if alive:
        orphans.end(known)
