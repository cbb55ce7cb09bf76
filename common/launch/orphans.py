"""The processes that a worker leaves behind when it dies, such as those of a DataLoader, and the workers themselves.

Some end by themselves after seconds, those of a fork server never. Until then they hold the sockets of the dead
worker, so that the other ranks wait for it.

psutil and ctypes are imported where they are used, because --help imports this module.
"""

import contextlib
import os
import signal
import sys
import time
from typing import Any

PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 1  # linux/prctl.h
END_SECONDS = 5.0


def adopt() -> None:
    """Make this process the parent of whatever its workers leave behind, so that `end` finds it. Linux only."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def wake_with_parent() -> None:
    """Let the system continue this process when its parent ends: one that is stopped would not notice that, and keep
    its ports for ever. Linux only."""
    if sys.platform == "linux":  # Windows has no SIGCONT
        _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children() -> set[int]:
    """The pids of this process's children."""
    import psutil

    return {child.pid for child in psutil.Process().children()}


def end(known: set[int]) -> None:
    """Kill the children of this process that are not `known`, then what those leave behind, and so on.

    Only processes of this Python and this session are killed. Other programs may go on, such as an upload, and so may
    what somebody has detached from the terminal.
    """
    import psutil

    mine, deadline = psutil.Process(), time.monotonic() + END_SECONDS
    while left := [child for child in mine.children() if child.pid not in known and _is_alike(child, mine)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
        if time.monotonic() > deadline:
            return


def _is_alike(process: Any, mine: Any) -> bool:
    """Does `process` run the same Python in the same session? False for one that has ended."""
    import psutil

    try:
        return os.getsid(process.pid) == os.getsid(mine.pid) and process.exe() == mine.exe()
    except (OSError, psutil.Error):
        return False
