"""How all code of the join waits: always with a limit."""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from common.console import say
from common.errors import RunError

Found = TypeVar("Found")
FIRST_PAUSE_SECONDS = 0.01
PAUSE = 0.15  # of the time waited so far: the longer the wait, the less often it polls
LAST_SECONDS = 10.0  # for a body that `instead` has cut short
CAUSES = "is a node frozen or cut off, or does a disk hang?"
LONGEST_SECONDS = 3600.0  # of a wait for the next limit: a lock takes no longer timeout than some weeks


def _nothing(elapsed_seconds: float) -> None:
    pass


def poll(
    ready: Callable[[], Found],
    seconds: float,
    meanwhile: Callable[[float], None] = _nothing,
    longest_pause_seconds: float = 0.5,
) -> Found | None:
    """Call `ready()` until it returns something true, for at most `seconds`. Returns that, or None.

    `meanwhile(elapsed_seconds)` runs before each pause. It may print whom we wait for, or raise.
    """
    began = time.monotonic()
    while not (found := ready()):
        elapsed = time.monotonic() - began
        if elapsed > seconds:
            return None
        meanwhile(elapsed)
        pause = min(max(PAUSE * elapsed, FIRST_PAUSE_SECONDS), longest_pause_seconds)
        time.sleep(min(pause, max(seconds - elapsed, 0.001)))
    return found


class Every:
    """True at most once in `seconds` seconds: for lines that must not be printed too often."""

    def __init__(self, seconds: float):
        self.seconds, self.last = seconds, time.monotonic()

    def __call__(self) -> bool:
        if time.monotonic() - self.last < self.seconds:
            return False
        self.last = time.monotonic()
        return True


class _Limit:
    """One call of `limit` that has not ended."""

    def __init__(self, seconds: float, give_up: Callable[[], None], instead: Callable[[], None] | None):
        self.until = time.monotonic() + seconds
        self.give_up, self.instead = give_up, instead


class _Clock:
    """Ends the process when a limit has passed. One thread looks after all limits, and starts with the first one: where
    memory is short, Thread.start() may wait forever for its new thread, and a limit must hold there too.

    A signal's handler may raise at any point, so nothing here takes a lock that it could leave locked.
    """

    def __init__(self) -> None:
        self.limits: set[_Limit] = set()
        self.added = queue.SimpleQueue[None]()
        self.thread: threading.Thread | None = None

    def add(self, limit: _Limit) -> None:
        self.limits.add(limit)
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="limits", daemon=True)
            thread.start()
            self.thread = thread
        self.added.put(None)

    def _run(self) -> None:
        while True:
            try:
                self._wait_for_next()
            except Exception:  # such as a MemoryError: the limits hold all the same
                time.sleep(FIRST_PAUSE_SECONDS)

    def _wait_for_next(self) -> None:
        """Wait until a limit is added or passes, and act where one has passed."""
        first = min(list(self.limits), key=lambda limit: limit.until, default=None)
        seconds = first.until - time.monotonic() if first else math.inf
        if seconds > 0:
            with contextlib.suppress(queue.Empty):
                self.added.get(timeout=min(seconds, LONGEST_SECONDS))
        elif first in self.limits:  # and has not ended meanwhile
            first.until, instead, first.instead = time.monotonic() + LAST_SECONDS, first.instead, None
            (instead or first.give_up)()


_clock = _Clock()
if hasattr(os, "register_at_fork"):  # a new process has none of its parent's threads, nor limits
    os.register_at_fork(after_in_child=lambda: globals().update(_clock=_Clock()))


@contextlib.contextmanager
def limit(
    seconds: float,
    rank: int | None,  # that says so
    what: str,
    before_exit: Callable[[], int | None] = lambda: None,
    instead: Callable[[], None] | None = None,
) -> Iterator[None]:
    """End this process, with one line, if the body takes too long: for calls into torch that may never return.

    A store on a frozen host answers no call, and NCCL connects without a timeout: a deadline that Python checks would
    never be reached. `before_exit` runs in another thread while the body hangs. It may print what is known so far, and
    return an exit code. `instead` runs there too, and makes the body fail: the process ends only where that does not
    help.
    """

    def give_up() -> None:
        code = None
        with contextlib.suppress(Exception):
            code = before_exit()
        with contextlib.suppress(Exception):
            say(f"error: {what} did not end within {seconds:.0f} s: {CAUSES}", rank, error=True)
        os._exit(code or RunError.exit_code)

    clock, mine = _clock, _Limit(seconds, give_up, instead)
    try:
        clock.add(mine)
        yield
    finally:
        clock.limits.discard(mine)
