"""How long a run has trained, and how each rank's time divides into compute, communication and waiting."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """Seconds of training: without evaluation and checkpoints, with those of the run before a resume."""

    def __init__(self, earlier_seconds: float = 0.0):
        self.earlier_seconds, self.paused_seconds = earlier_seconds, 0.0
        self.began = self.last_lap = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The time that the body takes does not count."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.paused_seconds += spent
        self.last_lap += spent

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


def split_times(compute: torch.Tensor, exchange: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute, communication and waiting in milliseconds, each (ranks, steps), from what the ranks have measured.

    A rank waits until the slowest one has its gradients ready; the rest of its exchange is the transfer.
    """
    waiting = (compute.max(dim=0).values - compute).minimum(exchange)
    return {"compute": compute, "communication": exchange - waiting, "wait": waiting}
