"""Start one process for each worker of this node, watch them, and end them together.

On Linux the supervisor imports the trainer's module once and forks the workers: eight start in the time of one, and
share the memory of what was imported. It must not use CUDA or torch's thread pool before that, and no thread may be at
work. Elsewhere each worker is a fresh interpreter that imports the module itself.
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
from common.launch.interruption import Interruption
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
    interruption = Interruption()
    try:
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
        return interruption.exit_code
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
        return _Watch(workers, args, interruption).wait()
    except OSError as error:
        fix = "end other processes, free memory, or see `ulimit -u`"
        many = "s" * (len(workers.places) > 1)
        say(f"error: could not start {len(workers.places)} worker{many}: {error.strerror}: {fix}", error=True)
        return 1
    finally:
        interruption.ignore()  # another Ctrl-C must not keep us from ending a stopped worker
        _end([process for process in workers.places if process.pid], workers.known)


class _Watch:
    """Waits for the workers of this node, and decides what the end of one means for the others."""

    def __init__(self, workers: _Workers, args: Namespace, interruption: Interruption):
        self.workers, self.interruption, self.is_elastic = workers, interruption, workers.replacing is not None
        self.timeout_seconds, self.work_timeout_seconds = args.timeout, args.work_timeout
        self.running = list(workers.places)
        self.stopped = StoppedWorkers(LOOK_SECONDS, args.timeout)
        self.deadline = float("inf")  # for those that are left, once one has failed or the run is complete
        self.first_failure = self.left_out = 0  # exit codes: of the run, and of a worker without which it goes on
        self.may_replace = self.is_elastic
        self.is_complete = False  # with --elastic, one has ended well: there is no run any more
        self.store_answers = True
        self.told: list[str] = []  # of whom it was said that they still write

    def wait(self) -> int:
        """Until all have ended. Returns the first failure's exit code, or 0."""
        while self.running and self._has_time():
            self.interruption.require_in_time()
            ended, replaced = self._ended(), list[BaseProcess]()
            ranks = {process: self.workers.rank_of(process) for process in ended}  # before others take their places
            for process in ended:
                if self.interruption.has_ended(process, or_the_terminal=self.is_elastic):
                    if not self.is_elastic:
                        return self.interruption.exit_code
                    self.left_out = self.left_out or self.interruption.exit_code  # not training yet: the others save
                elif self._replace(process):
                    replaced.append(process)
                else:
                    self._note_end(process)
            self._tell_why(ranks)
            self.workers.forget(replaced)
            if (overdue := self.stopped.look(self.running)) and not self._may_end(overdue):
                return self.first_failure or 1
        if self.first_failure and self.running:
            who = " and ".join(process.name for process in self.running)
            say(f"error: {who} did not end within {GRACE_SECONDS:.0f} s of another worker's end; ending it", error=True)
        return self.first_failure or self.left_out

    def _has_time(self) -> bool:
        """False once the others have had their time to end, but for those that still write what they have."""
        doing = {process: self.workers.doing(process) for process in self.running}
        if self.is_complete and self.deadline == float("inf") and set(doing.values()) == {WAITS}:
            self.deadline = time.monotonic() + COMPLETE_SECONDS
        if (late := time.monotonic() - self.deadline) <= 0:
            return True
        finishing = [process.name for process, what in doing.items() if what == FINISHES]
        if not finishing or late > self.work_timeout_seconds:
            return False
        if finishing != self.told:
            self.told = finishing
            limit = f"at most {self.work_timeout_seconds:.0f} s (--work-timeout)"
            say(f"waiting for {' and '.join(finishing)} to write, {limit}")
        return True

    def _ended(self) -> list[BaseProcess]:
        """The workers that have ended since, after a second at the latest. Those that a signal has ended are first: the
        others may have ended because of them."""
        ready = wait([process.sentinel for process in self.running], timeout=LOOK_SECONDS)
        for process in self.running:
            if process.sentinel in ready:
                process.join(LOOK_SECONDS)  # its files are closed, but its exit code may take a moment
        ended = [process for process in self.running if process.exitcode is not None]
        self.running = [process for process in self.running if process not in ended]
        return sorted(ended, key=lambda process: (process.exitcode or 0) >= 0)

    def _replace(self, process: BaseProcess) -> bool:
        """Start another process for this one, if it is to be replaced. After the first end that is no failure, and
        after a signal, none is: the run ends."""
        self.may_replace = self.may_replace and bool(process.exitcode) and not self.interruption.received
        successor = self.workers.replace(process) if self.may_replace else None
        if successor:
            self.running.append(successor)
            self.interruption.watch(self.running)
        return successor is not None

    def _note_end(self, process: BaseProcess) -> None:
        if self.is_complete and self.workers.doing(process) == WAITS:
            return  # there is no run any more into which it could be let
        if self.workers.is_left_out(process):
            self.left_out = self.left_out or _shell_code(process)
        elif not process.exitcode:
            self.is_complete = self.is_elastic
        elif not self.first_failure:
            self.first_failure = _exit_code(process)
            self.deadline = time.monotonic() + GRACE_SECONDS

    def _tell_why(self, ranks: dict[BaseProcess, int | None]) -> None:
        """Let the other ranks know why these have failed, and end what they have left behind."""
        for process, rank in ranks.items():
            failed = process.exitcode not in (0, Interrupted.exit_code)
            if failed and rank is not None and self.store_answers:
                place = replace(self.workers.places[process], board=self.workers.board)
                self.store_answers = _tell(place, rank, self.workers.cause(process), process.pid)
        if any(process.exitcode for process in ranks):
            orphans.end(self.workers.known)

    def _may_end(self, overdue: list[BaseProcess]) -> bool:
        """End those that have been stopped for too long, where others take their places; else say who they are."""
        who, long = " and ".join(process.name for process in overdue), f"{self.timeout_seconds:.0f} s (--timeout)"
        if not self.may_replace:
            why = f"{who} stopped for {long}, by SIGSTOP or Ctrl-Z"
            say(f"error: {why}; ending all workers of this node", error=True)
            return False
        for process in overdue:
            say(f"{process.name} stopped for {long}: ending it")
            self.workers.stopped[process] = f"was stopped for {long}, and ended"
            process.kill()
        return True


def _exit_code(process: BaseProcess) -> int:
    """The worker's exit code, as in shells. A signal is printed."""
    code = process.exitcode or 0
    if code < 0:
        say(f"{process.name} {_cause(code)}; ending what is left of this node")
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
