"""How long a run has trained, and how each rank's time divides into compute, communication and waiting."""

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from common.uneven.timer import StepTimer


class Clock:
    """Seconds of training, without evaluation and checkpoints, including those of the run that this one resumes."""

    def __init__(self, earlier_seconds: float = 0.0):
        self.earlier_seconds, self.paused_seconds = earlier_seconds, 0.0
        self.began = self.last_lap = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time that the body takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
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


def gather_steps(timer: StepTimer, loss_sums: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss sums, compute ms, exchange ms) of all ranks for the steps since the last call, each (ranks, steps) on the
    CPU. `loss_sums` has one scalar a step, of this rank. Every rank must call this."""
    compute, exchange = timer.take()
    sums = torch.stack([loss_sum.detach().double() for loss_sum in loss_sums])
    mine = torch.stack([sums, sums.new_tensor(compute), sums.new_tensor(exchange)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    sums, compute_ms, exchange_ms = torch.stack(everyone).cpu().unbind(dim=1)
    return sums, compute_ms, exchange_ms


def split_times(compute: torch.Tensor, exchange: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute, communication and waiting in milliseconds, each (ranks, steps), from what the ranks have measured.

    A rank waits until the slowest one has its gradients ready; the rest of its exchange is the transfer.
    """
    waiting = (compute.max(dim=0).values - compute).minimum(exchange)
    return {"compute": compute, "communication": exchange - waiting, "wait": waiting}
