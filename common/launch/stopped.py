"""Workers that were stopped (SIGSTOP, Ctrl-Z, a read from the terminal in the background) and are not continued.

The other ranks wait for them in a collective and end at --timeout. A stopped process itself ignores every signal except
SIGKILL, so a node whose workers are all stopped would never end.
"""

from collections.abc import Iterable
from multiprocessing.process import BaseProcess


class StoppedWorkers:
    """Counts for how long each worker has been stopped. `look` every `look_seconds`.

    Looks are counted, and not the time between them: while the supervisor itself is stopped with its workers, as by
    Ctrl-Z, the time does not count.
    """

    def __init__(self, look_seconds: float, timeout_seconds: float):
        self.most_looks = timeout_seconds / look_seconds
        self.looks: dict[int, int] = {}  # pid -> looks in a row that have found it stopped

    def look(self, processes: Iterable[BaseProcess]) -> list[BaseProcess]:
        """Those of these processes that have been stopped for longer than the timeout."""
        for process in processes:
            pid = process.pid or 0
            self.looks[pid] = self.looks.get(pid, 0) + 1 if _is_stopped(pid) else 0
        return [process for process in processes if self.looks[process.pid or 0] > self.most_looks]


def _is_stopped(pid: int) -> bool:
    """True for a process that a signal has stopped, and not for one that a debugger holds."""
    import psutil  # here, because --help does not need it

    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:  # it has ended
        return False
