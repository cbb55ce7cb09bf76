"""How long a run has trained, and how each rank's time divides into loading, compute, communication and waiting."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Gathered:
    """What all ranks have noted about the steps since the last exchange. Each is (ranks, steps), on the CPU."""

    loss_sums: torch.Tensor
    loading_ms: torch.Tensor
    compute_ms: torch.Tensor
    exchange_ms: torch.Tensor

    @property
    def busy_ms(self) -> torch.Tensor:
        """How long each rank took until its gradients were ready."""
        return self.loading_ms + self.compute_ms

    @property
    def step_ms(self) -> float:
        """The mean time of a step on the slowest rank."""
        return float((self.busy_ms + self.exchange_ms).mean(dim=1).max())

    def times(self) -> dict[str, torch.Tensor]:
        """How each step's time divides: milliseconds by name, each (ranks, steps).

        A rank waits until the slowest one has its gradients ready; the rest of its exchange is the transfer.
        """
        waiting = (self.busy_ms.max(dim=0).values - self.busy_ms).minimum(self.exchange_ms)
        transfer = self.exchange_ms - waiting
        return {"loading": self.loading_ms, "compute": self.compute_ms, "communication": transfer, "wait": waiting}


def gather_steps(timer: StepTimer, loss_sums: list[torch.Tensor]) -> Gathered:
    """The steps since the last call on all ranks. `loss_sums` has one scalar a step, of this rank. Every rank must
    call this."""
    sums = torch.stack([loss_sum.detach().double() for loss_sum in loss_sums])
    mine = torch.stack([sums, *(sums.new_tensor(times) for times in timer.take())])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return Gathered(*torch.stack(everyone).cpu().unbind(dim=1))
