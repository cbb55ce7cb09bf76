"""What the ranks note about each optimizer step, and exchange every 1 to 5 seconds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.errors import UserError
from common.uneven.timer import StepTimer

SAME_RATE = 1e-9  # of a learning rate: processors of different kinds may round a schedule's cosine differently


@dataclass(frozen=True)
class LocalStep:
    """One optimizer step as this rank knows it. Tensors stay on the device."""

    step: int
    loss: torch.Tensor  # this rank's part of it: what its backward has had
    global_loss: torch.Tensor | None  # of all ranks, where that is known already
    count: float  # what each rank's summed loss was divided by
    lr: float | torch.Tensor
    grad_norm: torch.Tensor

    def as_global(self) -> "GlobalStep | None":
        """This step as all ranks know it; None where this rank does not know the loss of all."""
        if self.global_loss is None:
            return None
        return GlobalStep(self.step, float(self.global_loss), float(self.lr), float(self.grad_norm))


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step as all ranks know it."""

    step: int
    loss: float  # the mean over the global batch
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class ExchangedSteps:
    """What all ranks have noted about the steps since the last exchange. Tensors are (ranks, steps), on the CPU."""

    done: list[GlobalStep]
    losses: torch.Tensor  # that add up to the loss
    loading_ms: torch.Tensor
    compute_ms: torch.Tensor
    exchange_ms: torch.Tensor
    grad_norms: torch.Tensor  # the same on all ranks, but for those of nodes that train by themselves
    unsaved_seconds: float  # since the last checkpoint, by rank 0's clock
    signals: list[int]  # by rank, that a rank has received; 0 for none
    newcomers_wait: bool  # processes wait to become members, as rank 0 knows
    last_seconds: float  # of the exchange before this one, on the rank that waited least for the others
    seconds_here: float  # of this one, on this rank

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


def exchange_steps(
    timer: StepTimer,
    noted: Sequence[LocalStep],
    unsaved_seconds: float,
    received: int,
    newcomers_wait: bool = False,
    last_seconds: float = 0.0,
) -> ExchangedSteps:
    """The steps since the last call on all ranks; `unsaved_seconds` is by this rank's clock, `received` the number of a
    signal that it has received, or 0, `newcomers_wait` whether it knows of processes that wait to be let in,
    and `last_seconds` what the last call took here. Every rank must call this.

    Raises UserError on every rank where they have divided a step's loss by different counts, or have taken a step with
    different learning rates.
    """
    sums = torch.stack([one.loss for one in noted])
    counts = sums.new_tensor([one.count for one in noted])
    clock, signals = torch.full_like(sums, unsaved_seconds), torch.full_like(sums, received)
    waiting, seconds = torch.full_like(sums, newcomers_wait), torch.full_like(sums, last_seconds)
    rates = sums.new_tensor([float(one.lr) for one in noted])
    times = [(one.loading, one.compute, one.exchange) for one in timer.take()]
    norms = torch.stack([one.grad_norm.detach().to(sums) for one in noted])
    mine = torch.stack([sums, *sums.new_tensor(times).T, norms, clock, counts, rates, signals, waiting, seconds])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    began = time.perf_counter()
    dist.all_gather(everyone, mine)
    rows = torch.stack(everyone).cpu().unbind(dim=1)
    took = time.perf_counter() - began
    losses, loading, compute, exchange, norms, clocks, counted, rates, signals, waiting, seconds = rows
    _require_one_count(noted, counted)
    _require_one_rate(noted, rates)
    received_by = [int(number) for number in signals[:, 0].tolist()]
    unsaved, wait = float(clocks[0, 0]), bool(waiting[0, 0])
    last = float(seconds[:, 0].min())
    done = [
        GlobalStep(step.step, loss if step.global_loss is None else float(step.global_loss), float(step.lr), norm)
        for step, loss, norm in zip(noted, losses.sum(dim=0).tolist(), norms.max(dim=0).values.tolist(), strict=True)
    ]
    return ExchangedSteps(done, losses, loading, compute, exchange, norms, unsaved, received_by, wait, last, took)


def _require_one_count(noted: Sequence[LocalStep], counted: torch.Tensor) -> None:
    """`counted` (ranks, steps) is what each rank's loss was divided by."""
    differs = (counted != counted[0]).nonzero()
    if len(differs):
        rank, index = differs[0].tolist()
        raise UserError(
            f"rank {rank} divides the loss of step {noted[index].step} by {counted[rank, index]:.10g}, but rank 0 by "
            f"{counted[0, index]:.10g}: divide by the count over all ranks, "
            "batch.global_count, and not by that of one rank. Or do the ranks hold other data?",
            same_on_every_rank=True,
        )


def _require_one_rate(noted: Sequence[LocalStep], rates: torch.Tensor) -> None:
    """`rates` (ranks, steps) is the learning rate of each rank's optimizer."""
    differs = ((rates - rates[0]).abs() > SAME_RATE * rates[0].abs()).nonzero()
    if len(differs):
        rank, index = differs[differs[:, 1].argmin()].tolist()
        raise UserError(
            f"rank {rank} has taken step {noted[index].step} with a learning rate of {rates[rank, index]:.10g}, but "
            f"rank 0 with {rates[0, index]:.10g}, so their weights are no longer the same: every rank must step the "
            "scheduler, as often and with the same numbers, and not under `if rank == 0`",
            same_on_every_rank=True,
        )
