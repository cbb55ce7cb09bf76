"""Signals in training: noted here; the ranks then agree, save a checkpoint and end together.

Schedulers send one some time before they end a job: Slurm with --signal=USR1@60, spot machines with SIGTERM. A closed
terminal sends SIGHUP.
"""

import contextlib
import os
import signal
import threading
import time
from typing import Any

from common.console import say
from common.launch.interruption import ASK, ENDS, SIGNALS, TWICE_SECONDS, handle
from common.launch.replacing import Board

SIGTERM_SECONDS = 25.0  # schedulers and torchrun send SIGKILL 30 s after SIGTERM


class Interrupts:
    """While one is open, the first signal is noted, and a second SIGTERM or SIGINT ends this process at once.

    A thread reads the signals, because Python's handlers do not run while the main thread waits in a collective.
    """

    def __init__(self, rank: int, speaks: bool):
        self.rank, self.speaks = rank, speaks
        self.board: Board | None = None  # of a supervisor, which asks in another signal's name
        self.received = 0  # the number of the first signal
        self.first_end = 0.0  # when the first SIGTERM or SIGINT came
        # All ranks know of it, and are about to save: SIGTERM, which a launcher sends to the ranks that are left when
        # the first one has ended, is ignored.
        self.all_know = False
        self.previous: dict[int, Any] = {}
        if os.name == "nt" or threading.current_thread() is not threading.main_thread():
            return  # only in the main thread signals can be handled
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        self.previous = handle(lambda *_: None)
        signal.set_wakeup_fd(self.writer)
        os.register_at_fork(after_in_child=self._reset_in_child)

    def close(self) -> None:
        """Handle signals as before; but where the run ends by one, SIGTERM is ignored from now on too: it would change
        the exit code of a rank that is about to end, by which a job is requeued."""
        if self.previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self.previous.items():
                signal.signal(number, signal.SIG_IGN if self.all_know and number == signal.SIGTERM else handler)
            self.previous = {}
            os.close(self.writer)

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 1):
            if numbers[0] in self.previous:  # Python writes the number of every signal that has a handler
                self._note(numbers[0])
        os.close(reader)

    def _note(self, number: int) -> None:
        asked_by = (self.board.signal if self.board and number == ASK else 0) or number
        name, now = signal.Signals(asked_by).name, time.monotonic()
        if not self.received:
            self.received = asked_by
            if self.speaks:
                again = "; once more ends at once" * (number in ENDS)
                say(f"{name}: saving a checkpoint{again}", self.rank)
        if number not in ENDS or (self.all_know and number == signal.SIGTERM):
            return
        if not self.first_end:
            self.first_end = now
            if number == signal.SIGTERM:
                threading.Thread(target=self._end_in_time, daemon=True).start()
        elif now - self.first_end > TWICE_SECONDS:
            self._end(f"{name} again: ending at once", number)

    def _end_in_time(self) -> None:
        time.sleep(SIGTERM_SECONDS)
        if self.previous and not self.all_know:
            so_long = f"no checkpoint within {SIGTERM_SECONDS:.0f} s of SIGTERM"
            self._end(f"{so_long}: ending without one", signal.SIGTERM)

    def _end(self, why: str, number: int) -> None:
        say(why, self.rank, error=True)
        os._exit(128 + number)

    def _reset_in_child(self) -> None:
        """A loader's process, forked from this one, must not write into our pipe, and ends at SIGTERM. Signals
        of a terminal are left to the rank."""
        if self.previous:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(-1)
                for number in SIGNALS:
                    of_terminal = signal.Signals(number).name in ("SIGINT", "SIGHUP")
                    signal.signal(number, signal.SIG_IGN if of_terminal else signal.SIG_DFL)
