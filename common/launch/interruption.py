"""A signal to the supervisor of a node's workers: passed on to them, so that they can save a checkpoint and end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from common.console import say
from common.errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
ENDS = (signal.SIGTERM, signal.SIGINT)  # of these a second one ends at once; a closed terminal may send SIGHUP twice
ASK = getattr(signal, "SIGUSR1", signal.SIGTERM)  # workers that do not train end at it, as by any signal
SIGTERM_SECONDS = 27.0  # schedulers send SIGKILL 30 s after SIGTERM; the workers have 25 s
INTERRUPTED = 130  # the exit code of a process that SIGINT has ended, as shells report it
TWICE_SECONDS = 1.0  # what comes within these is the same signal: some senders reach a process in two ways


def handle(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> dict[int, Any]:
    """Handle SIGNALS so, and return the handlers before. A SIGHUP that is ignored, as under nohup, stays ignored."""
    is_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in SIGNALS if not (is_ignored and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in wanted}


class Interruption:
    """Handles SIGNALS. The first one asks the workers to end; a second SIGTERM or SIGINT, or no end within 27 s of
    SIGTERM, raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received = 0  # the number of the first signal, or of the one that ends at once
        self.first_end = 0.0  # when the first SIGTERM or SIGINT came
        self.deadline = float("inf")
        self.workers: list[BaseProcess] = []
        self.tell: Callable[[int], None] = lambda number: None  # the workers, which signal it was
        handle(self._handle)

    def ignore(self) -> None:
        """From now on, ignore signals."""
        handle(signal.SIG_IGN)

    def watch(self, workers: Iterable[BaseProcess]) -> None:
        """From now on, pass a signal on to these, which run; also one that has come before."""
        self.workers = list(workers)
        if self.received:
            self._ask()

    def require_in_time(self) -> None:
        """Raise KeyboardInterrupt when the workers take too long to end."""
        if time.monotonic() > self.deadline:
            self.received = signal.SIGTERM
            raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        """As shells report the signal."""
        return 128 + (self.received or signal.SIGINT)

    def has_ended(self, worker: BaseProcess, or_the_terminal: bool = False) -> bool:
        """True for a worker that was not training, and that our signal has ended; or that of a terminal, which reaches
        the workers by itself."""
        return bool(self.received) and (worker.exitcode == -ASK or (or_the_terminal and worker.exitcode == INTERRUPTED))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received = number
            if number != ASK:
                again = "; once more ends at once" * (number in ENDS)
                say(f"{signal.Signals(number).name}: asking the workers of this node to end{again}")
            self._ask()
        if number in ENDS:
            if not self.first_end:
                self.first_end = now
                self.deadline = now + SIGTERM_SECONDS if number == signal.SIGTERM else self.deadline
            elif now - self.first_end > TWICE_SECONDS and not self._is_saved():
                self.received = number
                raise KeyboardInterrupt

    def _is_saved(self) -> bool:
        """True once a worker has ended after a checkpoint, as the others are about to do."""
        return any(worker.exitcode == Interrupted.exit_code for worker in self.workers)

    def _ask(self) -> None:
        self.tell(self.received)
        for worker in self.workers:
            if worker.pid and worker.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, ASK)
