"""SIGTERM, SIGINT and SIGUSR1 in training: noted here; the ranks then agree, save a checkpoint and end together.

Schedulers send one of these some time before they end a job: Slurm with --signal=USR1@60, spot machines with SIGTERM.
"""

import contextlib
import os
import signal
import threading
import time

from common.console import say

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
SIGTERM_SECONDS = 25.0  # schedulers and torchrun send SIGKILL 30 s after SIGTERM


class Interrupts:
    """While one is open, the first signal is noted, and a second SIGTERM or SIGINT ends this process at once.

    A thread reads the signals, because Python's handlers do not run while the main thread waits in a collective.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.received = 0  # the number of the first signal
        self.previous = {}
        if threading.current_thread() is not threading.main_thread():  # only there signals can be handled
            return
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        self.previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self.writer)
        os.register_at_fork(after_in_child=self._reset_in_child)

    def ignore(self) -> None:
        """Heed no signal any more: this process is about to end, and a launcher may ask it to."""
        if self.previous:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Handle signals as before."""
        if self.previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self.previous.items():
                signal.signal(number, handler)
            self.previous = {}
            os.close(self.writer)

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 1):
            number = numbers[0]
            if not self.received:
                self.received = number
                if number == signal.SIGTERM:
                    threading.Thread(target=self._end_in_time, daemon=True).start()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._end(f"{signal.Signals(number).name} again: ending at once", number)
        os.close(reader)

    def _end_in_time(self) -> None:
        time.sleep(SIGTERM_SECONDS)
        if self.previous:
            so_long = f"no checkpoint within {SIGTERM_SECONDS:.0f} s of SIGTERM"
            self._end(f"{so_long}: ending without one", signal.SIGTERM)

    def _end(self, why: str, number: int) -> None:
        say(why, self.rank, error=True)
        os._exit(128 + number)

    def _reset_in_child(self) -> None:
        """A loader's process, forked from this one, must not write into our pipe, and ends at SIGTERM."""
        if self.previous:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(-1)
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
