"""What may hang, for a limited time, also where memory is short."""

import _thread
import contextlib
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def within(seconds: float, action: Callable[[], Found]) -> Found | None:
    """What `action` returns; None where it raises RuntimeError or OSError, or takes longer. A thread runs it, because a
    store may not answer. threading.Thread is not used: its start() waits, forever where no memory is left for its first
    step."""
    found: list[Found] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def run() -> None:
        try:
            with contextlib.suppress(RuntimeError, OSError):
                found.append(action())
        finally:
            ended.release()

    with contextlib.suppress(RuntimeError, MemoryError):  # no thread can be started
        _thread.start_new_thread(run, ())
        ended.acquire(timeout=seconds)
    return found[0] if found else None
