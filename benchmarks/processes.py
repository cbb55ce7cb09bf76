"""Processes that a benchmark starts end with it, also where it fails or somebody presses Ctrl-C."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

SECONDS = 60.0  # in which a run that is told to end has saved


@contextlib.contextmanager
def ended(processes: Sequence[subprocess.Popen]) -> Iterator[Sequence[subprocess.Popen]]:
    """Afterwards, none of them runs. Each gets SIGTERM if the body has not waited for it, and SIGKILL if that does not
    end it in time."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
