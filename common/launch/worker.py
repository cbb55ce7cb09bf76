"""Run the trainer's function in a worker's process, print an error as one line, and exit."""

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from common.console import flush, say
from common.errors import (
    ExplainedError,
    GuardWarning,
    Interrupted,
    MembersChanged,
    RunError,
    UserError,
    in_one_line,
    is_known_to_all,
)
from common.launch import cli, orphans
from common.launch.interruption import INTERRUPTED, handle
from common.launch.layout import Worker
from common.launch.replacing import ENDED, FAILED, FINISHES, STARTS, WAITS, Board
from common.launch.title import name_worker
from common.launch.within import within

LEAVE_SECONDS = 8.0  # a failed rank stays at most, until the others know; its supervisor waits for longer
PARENT_POLL_SECONDS = 1.0
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

LOST_LOADER = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")


def load(target: str) -> Callable[[Worker, Namespace], None]:
    """The function that "module:function" names. Raises RunError where there is no disk space for it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch logs a stack of C++ frames when a rank is lost
    module, _, function = target.partition(":")
    try:
        with _kept_by_collector():
            loaded = getattr(importlib.import_module(module), function)
        importlib.import_module("common.version").code_fingerprint()  # kept: files may be edited while the run goes on
        return loaded
    except OSError as error:
        if error.errno not in FULL_DISK and "temporary directory" not in str(error):
            raise
        raise RunError(f"could not load {module}: {error.strerror or error}: make room in TMPDIR or /tmp") from None


@contextlib.contextmanager
def _kept_by_collector() -> Iterator[None]:
    """What the body imports stays until the process ends, so the garbage collector need not look at it: neither now,
    which takes a tenth of an import or more, nor later, which takes 0.15 seconds each time, and in a forked worker
    copies the pages that it shares with others (docs/benchmarks.md)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def run(target: str, worker: Worker, args: Namespace, supervisor: int | None = None) -> NoReturn:
    """Call the function `target` with this worker and the flags, and end the process.

    After success it exits normally, so that `atexit`, profilers and coverage work on a worker that runs in place. After
    a failure in a job of several ranks it exits at once, because destroying the process group may wait for ranks that
    are gone. `supervisor` is the pid of the process that started this one, None for a worker that runs in place.
    """
    alone = worker.world_size == 1
    name_worker(worker)
    places = [worker]  # this process's place now
    _say_warnings(places)
    # When this process is killed, Python frees the semaphores of its loaders: that needs no warning.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker")))
    if supervisor:  # a forked worker has its supervisor's handlers
        handle(signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end_at_once if alone else signal.SIG_DFL)
    if not supervisor and worker.layout.launched and hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, _interrupted_before_training)
    if supervisor or worker.layout.launched:
        _end_with_parent(worker, supervisor or os.getppid())
    elif not alone:  # nobody could end this process while it waits in a collective, where Python handles no signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _train(target, places, args)
    except (ExplainedError, KeyboardInterrupt) as error:
        _end_after_failure(explain(places[-1], error), error, alone)
    except Exception as error:
        if alone and not _lost_loader(error):
            raise  # Python prints the traceback, and a debugger may look at it
        _end_after_failure(explain(places[-1], error), error, alone)
    flush()
    sys.exit(0)


def _say_warnings(places: list[Worker]) -> None:
    """From now on, what guards warn of is one line, tagged with the rank, and not a line of this project's code."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, GuardWarning):
            say(f"warning: {message}", places[-1].rank)
        else:
            show_others(message, category, *where, **more)

    warnings.showwarning = show


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this process, which has nothing to save. An exception could be lost where Python ignores it, as in a
    destructor, and the run would go on."""
    _end_children()
    flush()
    os._exit(128 + number)


def _interrupted_before_training(number: int, frame: FrameType | None) -> NoReturn:
    """A scheduler's notice, while this rank joins or loads; in training, `common.record.interrupts` handles it."""
    raise Interrupted("SIGUSR1 while nothing was to be saved: start the run again")


def _train(target: str, places: list[Worker], args: Namespace) -> None:
    """Call the function; again, with this process's next place, whenever the members of the job have changed;
    `places` has this one alone."""
    function, flags, started = load(target), args, places[0].run_size
    while True:
        try:
            return function(places[-1], flags)
        except MembersChanged as change:
            places[:] = [change.worker]
            clear_frames(change)
        gc.collect()  # what the last call still holds, in circles
        flags = cli.after_change(args, places[-1].originals, started)
        name_worker(places[-1])


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of the last call hold, loaders among them. If the garbage collector did it, each of
    their processes would take five seconds to end: it closes their queues before torch tells them to."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def explain(worker: Worker, error: BaseException) -> int:
    """Print the error that ended this worker, once per node if it is the same on every rank. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ExplainedError):
        if worker.board:
            _note_end(worker.board, worker, error)
        if worker.local_rank == 0 or not error.same_on_every_rank:
            say(in_one_line(error), worker.rank, error=True)
        return error.exit_code
    if reason := _lost_loader(error):
        cause = "a crash, no memory, or a `kill` of it or of its fork server: see `dmesg`"
        say(f"error: {reason} ({cause})", worker.rank, error=True)
    else:
        say("".join(traceback.format_exception(error)).rstrip(), worker.rank, error=True)
    return 1


def _note_end(board: Board, worker: Worker, error: ExplainedError) -> None:
    """Let the supervisor know whether the run ends with this error, or this worker alone: also one that was to be let
    into a run under way, and does not fit it, or has found something wrong with its data."""
    doing = board.doing(worker)
    prepares = doing == STARTS and bool(board.leader)
    own = (UserError, RunError) if prepares else UserError if doing == WAITS else ()
    is_alone = not is_known_to_all(error) or isinstance(error, own)
    if not (is_alone and doing == WAITS):  # it gives up waiting, which is no failure once the run is complete
        board.note(worker, FAILED if is_alone and (doing == FINISHES or prepares) else ENDED)


def _lost_loader(error: BaseException) -> str:
    """What a DataLoader says of a process of its that was killed; empty for any other error."""
    reason = str(error).strip().partition("\n")[0].rstrip(" .")
    if isinstance(error, RuntimeError) and LOST_LOADER.match(reason):
        return reason
    # The loader asks which of its processes have ended, and does not see one that has ended only just now.
    was_receiving = any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))
    lost_contact = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    return "a DataLoader worker exited unexpectedly" if was_receiving and lost_contact else ""


def _end_after_failure(code: int, error: BaseException, alone: bool) -> NoReturn:
    """Run the error's `before_exit` action, for at most LEAVE_SECONDS, and end this process."""
    _end_children()

    if hasattr(error, "before_exit"):
        within(LEAVE_SECONDS, error.before_exit)  # the other ranks, or the store, may be gone
    if alone:
        sys.exit(code)
    flush()
    os._exit(code)


def _end_with_parent(worker: Worker, parent: int) -> None:
    """End this process when its parent, the supervisor or a torchrun agent, is gone. `parent` is its pid."""
    orphans.wake_with_parent()
    windows = multiprocessing.parent_process() if os.name == "nt" else None  # whose parent pid never changes

    def watch() -> None:
        while windows.is_alive() if windows else os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        who = worker.layout.source if worker.layout.launched else "the supervisor of this node"
        say(f"error: {who} (pid {parent}) has ended: ending this rank", worker.rank, error=True)
        _end_children()
        os._exit(RunError.exit_code)

    threading.Thread(target=watch, name="watch the parent", daemon=True).start()


def _end_children() -> None:
    """End what `multiprocessing` has started here, such as a DataLoader's processes: `os._exit` would leave it."""
    for child in multiprocessing.active_children():
        child.terminate()
