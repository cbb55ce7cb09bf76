"""How long a run has trained, and how often its ranks exchange what they have noted."""

import contextlib
import time
from collections.abc import Iterator

LEAST_SECONDS, MOST_SECONDS = 1.0, 5.0  # between two exchanges
EXCHANGE_PART = 0.02  # of the time, that exchanges may take within these limits


class Clock:
    """Seconds of training, without evaluation and checkpoints, including those of the run that this one resumes."""

    def __init__(self, earlier_seconds: float = 0.0, saved_at: float | None = None):
        """`saved_at`: when the last checkpoint was written, by `time.perf_counter`; by default now."""
        self.earlier_seconds, self.paused_seconds, self.is_paused = earlier_seconds, 0.0, False
        self.began = self.last_lap = time.perf_counter()
        self.saved_at = self.began if saved_at is None else saved_at

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time that the body takes. Within another pause this does nothing."""
        if self.is_paused:
            yield
            return
        self.is_paused, began = True, time.perf_counter()
        try:
            yield
        finally:
            self.is_paused = False
            spent = time.perf_counter() - began
            self.paused_seconds += spent
            self.last_lap += spent

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Pause while the body writes a checkpoint; `unsaved_seconds` count from its end."""
        with self.pause():
            yield
        self.saved_at = time.perf_counter()

    @property
    def unsaved_seconds(self) -> float:
        """Wall-clock seconds since the last checkpoint, or since the start of this run."""
        return time.perf_counter() - self.saved_at

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self.last_lap = now - self.last_lap, now
        return max(seconds, 1e-9)

    @property
    def seconds(self) -> float:
        """Seconds of training, of this run and the one that it resumes."""
        return self.earlier_seconds + self.seconds_here

    @property
    def seconds_here(self) -> float:
        """Seconds of training of this run alone."""
        return time.perf_counter() - self.began - self.paused_seconds


def seconds_between_exchanges(exchange_seconds: float) -> float:
    """Seconds from one exchange of the ranks' notes to the next, where one takes `exchange_seconds`: more where that
    is long, as on a link with a delay."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, exchange_seconds / EXCHANGE_PART))
