"""Fractions of a core for processes, through Linux's control groups: what makes a rank slow here. Needs root."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REMOVE_SECONDS = 10.0  # in which the last processes of a group end
PERIOD_MICROSECONDS = 5000  # short beside a step, so that a rank is slow and not stopped now and then
ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def fractions(speeds: Sequence[float], period: int = PERIOD_MICROSECONDS) -> Iterator[list["Cores"]]:
    """A control group for each of `speeds`, in cores; removed afterwards, with all processes that are still in it. In
    each `period`, in microseconds, a group has its fraction of the time in one piece."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the groups would stay
    with contextlib.ExitStack() as stack:
        groups = []
        for number, speed in enumerate(speeds):
            groups.append(Cores(f"uneven-{os.getpid()}-{number}", speed, period))
            stack.callback(groups[-1].remove)
        yield groups


class Cores:
    """A control group named `name`, in which all processes together get `cores` of a core."""

    def __init__(self, name: str, cores: float, period: int = PERIOD_MICROSECONDS):
        self.period = period
        self.is_v1 = (ROOT / "cpu").is_dir()
        self.folder = (ROOT / "cpu" if self.is_v1 else ROOT) / name
        try:
            if not self.is_v1:
                (ROOT / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir(exist_ok=True)
            self.set(cores)
        except OSError as error:
            sys.exit(
                f"{self.folder}: {error.strerror}: run this as root, on a Linux whose control groups may be written"
            )

    def set(self, cores: float) -> None:
        """From now on, `cores` of a core."""
        quota = round(self.period * cores)
        if self.is_v1:
            (self.folder / "cpu.cfs_period_us").write_text(str(self.period))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.folder / "cpu.max").write_text(f"{quota} {self.period}")

    def enter(self) -> None:
        """Put this process, and all that it starts, into the group: for Popen's preexec_fn."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """End what is still in the group, and remove it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        until = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                return self.folder.rmdir()
            except OSError:  # a process takes a moment to end
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
