"""Start this node's workers, watch them, and end them together; or run in place under an outer launcher.

A trainer file calls `main(parser)` before it imports torch. What follows depends on the layout:

    -n/-g/-i, or nothing    this process starts one process for each worker and watches over them
    torchrun                this process is a worker already, and becomes one

A worker loads the trainer's file (now with torch and all that it imports) and calls its `train(worker, args)`.
Where the platform can, a fork server loads the file once for a node and forks its workers: eight of them start
in the time of one.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

from common.errors import UserError
from common.layout import Layout, Worker, layout_from
from common.report import say

GRACE_SECONDS = 5.0  # after one worker has failed, for the others to say their last line
KILL_SECONDS = 5.0  # after that, from SIGTERM to SIGKILL
LEAVE_SECONDS = 5.0  # for a rank that has failed, to stay until the others have heard of it
PARENT_POLL_SECONDS = 1.0
INTERRUPTED = 130

LOST_CONTACT = (
    "closed by peer",
    "Connection was likely closed",
    "recvValue failed",
    "remote process exited",
    "ncclRemoteError",
    "communicator was aborted",
    "reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "connectFullMesh",
    "Socket closed",
)


def main(parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace, Layout], None] | None = None) -> None:
    """Parse the flags, find the layout and run the calling file's `train(worker, args)` on each worker.

    `check(args, layout)` may refuse further combinations of flags with UserError. Never returns: exits with 0
    when every worker ended well, with 2 for a user's mistake, and with another number for any other failure.
    """
    args = parser.parse_args()
    try:
        layout = layout_from(args)
        if check:
            check(args, layout)
        if importlib.util.find_spec("torch") is None:
            raise UserError(f"{sys.executable} has no torch: use .venv/bin/python, which `make .venv` makes")
    except UserError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")
    if layout.spawn:
        sys.exit(_supervise(layout.workers(), args))
    trainer = load(sys.argv[0] if sys.argv[0].endswith(".py") else sys.modules["__main__"].__file__)
    if layout.launched:
        _watch_outer_launcher()
    _be_worker(trainer.train, layout.workers()[0], args)


# --- the watching side ------------------------------------------------------------------------------------------


def _supervise(workers: list[Worker], args: argparse.Namespace) -> int:
    """Run one process for each worker. The first that fails ends the others; returns its exit code, or 0."""
    methods = multiprocessing.get_all_start_methods()
    forks = "forkserver" in methods and sys.platform != "darwin"  # macOS' frameworks do not survive a fork
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["__main__"])
    processes = [context.Process(target=_enter, args=(worker, args), name=f"rank {worker.rank}") for worker in workers]
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        for process in processes:
            process.start()
        return _wait_for_all(processes)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # the fork server keeps its socket in a temporary directory
        say(None, f"error: could not start the workers: {error.strerror}: make room in TMPDIR or /tmp", error=True)
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second Ctrl-C must not stop us from ending a stopped worker
            signal.signal(number, signal.SIG_IGN)
        _end(processes)


def _wait_for_all(processes: list) -> int:
    running = {process.sentinel: process for process in processes}
    failed: int | None = None
    deadline = None
    while running and (deadline is None or time.monotonic() < deadline):
        for sentinel in wait(list(running), timeout=None if deadline is None else deadline - time.monotonic()):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and failed is None:
                failed = _exit_code(process)
                deadline = time.monotonic() + GRACE_SECONDS
    return failed or 0


def _exit_code(process) -> int:
    """The worker's exit code; a signal is reported as shells do, 128 + its number, and is worth a line."""
    if process.exitcode >= 0:
        return process.exitcode
    number = -process.exitcode
    name = signal.Signals(number).name
    hint = " (out of memory? see `dmesg`)" if name == "SIGKILL" else ""
    say(None, f"{process.name} was ended by {name}{hint}; ending the other workers of this node")
    return 128 + number


def _end(processes: list) -> None:
    """No worker outlives its supervisor: SIGTERM, and SIGKILL for those that do not heed it."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + KILL_SECONDS
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# --- the worker's side ------------------------------------------------------------------------------------------


def _enter(worker: Worker, args: argparse.Namespace) -> None:
    """Where a started process begins. multiprocessing has loaded the trainer's file as its main module."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_with, args=(lambda: wait([parent.sentinel]),), daemon=True).start()
    _be_worker(sys.modules["__main__"].train, worker, args)


def _be_worker(train: Callable[[Worker, argparse.Namespace], None], worker: Worker, args: argparse.Namespace) -> None:
    """Train, turn what went wrong into one line where a line is enough, and exit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        train(worker, args)
        code = 0
    except BaseException as error:
        code = _say(worker, error)
        _take_leave(error)
    # Not sys.exit: after a failure the teardown of a process group may wait for ranks that are gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _say(worker: Worker, error: BaseException) -> int:
    """Say what ended a worker, once a node where all have met the same; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, UserError):
        if worker.local_rank == 0 or not error.same_on_every_rank:
            say(worker, f"error: {error}", error=True)
        return error.exit_code
    say(worker, _last_words(error), error=True)
    return 1


def _take_leave(error: BaseException) -> None:
    """Do what the error wants done before the process ends; not for long, since the other ranks may be gone."""

    def leave() -> None:
        with contextlib.suppress(RuntimeError):
            error.before_exit()

    if hasattr(error, "before_exit"):
        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)


def _last_words(error: BaseException) -> str:
    """A failure of another rank in one line; one of our own with its traceback."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_CONTACT):
        return f"error: lost contact with another rank: {reason}. See what the other ranks and nodes say."
    return "".join(traceback.format_exception(error)).rstrip()


def load(path: str) -> ModuleType:
    """A trainer's file as a module that is not __main__, so that it goes on past its call of `main`."""
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module


def flags_of(trainer: Path) -> argparse.ArgumentParser:
    """A trainer's parser, without what the trainer imports: its file up to the call of `main`."""
    source = trainer.read_text().partition('\nif __name__ == "__main__":')[0]
    namespace = {"__name__": "flags", "__file__": str(trainer)}
    exec(compile(source, str(trainer), "exec"), namespace)
    return namespace["flags"]()


def _watch_outer_launcher() -> None:
    """End when the launcher that started this process is gone: torchrun's agent, killed, leaves its workers."""
    parent = os.getppid()

    def until_parent_changes() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)

    threading.Thread(target=_end_with, args=(until_parent_changes,), daemon=True).start()


def _end_with(wait_for_end: Callable[[], object]) -> None:
    wait_for_end()
    os._exit(1)
