"""What the ranks note about each optimizer step, and exchange every 1 to 5 seconds."""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common.errors import RunError, UserError
from common.uneven.options.timer import StepTimer
from common.uneven.plan import Shares

Number = float | torch.Tensor  # on a GPU a tensor, for which nobody waits before the exchange
SAME_RATE = 1e-9  # of a learning rate: processors of different kinds may round a schedule's cosine differently
COMPARED_CHANGES = 5  # of the shares, in one exchange
OF_STEPS = ("loss", "grad_norm", "count", "rates", "loading", "compute", "exchange")  # times in milliseconds
OTHER_COUNT = (
    "rank {rank} divides the loss of step {step} by {there}, but rank 0 by {here}: divide by the count over all ranks, "
    "batch.global_count, and not by that of one rank. Or do the ranks hold other data?"
)
OTHER_RATE = (
    "rank {rank} has taken step {step} with a learning rate of {there}, but rank 0 with {here} (the sum of those of "
    "all groups of parameters), so their weights are no longer the same: every rank must step the scheduler, or set a "
    "rate, as often and with the same numbers, and not under `if rank == 0`"
)


@dataclass(slots=True)
class LocalStep:
    """One optimizer step as this rank knows it."""

    step: int
    loss: Number  # this rank's part of it: what its backward has had
    global_loss: Number | None  # of all ranks, where that is known already
    count: float  # what each rank's summed loss was divided by
    lr: Number  # of the first group of parameters
    rates: Number  # the sum of those of all groups
    grad_norm: Number

    def as_global(self) -> "GlobalStep | None":
        """This step as all ranks know it; None where this rank does not know the loss of all."""
        if self.global_loss is None:
            return None
        return GlobalStep(self.step, float(self.global_loss), float(self.lr), float(self.grad_norm))


@dataclass(slots=True)
class GlobalStep:
    """One optimizer step as all ranks know it."""

    step: int
    loss: float  # the mean over the global batch
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class ExchangedSteps:
    """What all ranks have noted about the steps since the last exchange."""

    done: list[GlobalStep]
    by_rank: Mapping[str, torch.Tensor]  # each of OF_STEPS (ranks, steps), on the CPU
    now: Mapping[str, list[float]]  # by rank, what `exchange_steps` was given besides
    seconds_here: float  # that the exchange took on this rank

    @property
    def busy_ms(self) -> torch.Tensor:
        """How long each rank took until its gradients were ready."""
        return self.by_rank["loading"] + self.by_rank["compute"]

    @property
    def step_ms(self) -> float:
        """The mean time of a step on the slowest rank."""
        return float((self.busy_ms + self.by_rank["exchange"]).mean(dim=1).max())

    def times(self) -> dict[str, torch.Tensor]:
        """How each step's time divides: milliseconds by name, each (ranks, steps).

        A rank waits until the slowest one has its gradients ready; the rest of its exchange is the transfer.
        """
        wait = (self.busy_ms.max(dim=0).values - self.busy_ms).minimum(self.by_rank["exchange"])
        parts = {name: self.by_rank[name] for name in ("loading", "compute")}
        return {**parts, "communication": self.by_rank["exchange"] - wait, "wait": wait}


def exchange_steps(
    timer: StepTimer, noted: Sequence[LocalStep], changes: Sequence[Shares], **now: float
) -> ExchangedSteps:
    """The steps since the last call on all ranks, and the numbers `now` of each. Every rank must call this.

    Raises UserError on every rank where they have divided a step's loss by different counts, or have taken a step with
    different learning rates, and RunError where they have made other `changes` of the shares.
    """
    took = timer.take()
    recent = changes[-COMPARED_CHANGES:]
    columns: list[Sequence[Number]] = [  # of OF_STEPS
        *([one.loss for one in noted], [one.grad_norm for one in noted]),
        *([one.count for one in noted], [float(one.rates) for one in noted]),
        *([one.loading for one in took], [one.compute for one in took], [one.exchange for one in took]),
        [zlib.crc32(repr(recent).encode())],
        [*now.values()],
    ]
    mine = torch.cat([_vector(numbers, timer.device) for numbers in columns])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    began = time.perf_counter()
    dist.all_gather(everyone, mine)
    rows = torch.stack(everyone).cpu()
    took_here = time.perf_counter() - began
    of_steps, of_shares, of_now = rows.split([len(OF_STEPS) * len(noted), 1, len(now)], dim=1)
    found = dict(zip(OF_STEPS, of_steps.unflatten(1, (len(OF_STEPS), -1)).unbind(dim=1), strict=True))
    if (of_shares != of_shares[0]).any():
        _require_same_shares(recent)
    counts, rates = found["count"], found["rates"]
    _require_none(counts != counts[0], counts, noted, OTHER_COUNT)
    _require_none((rates - rates[0]).abs() > SAME_RATE * rates[0].abs(), rates, noted, OTHER_RATE)
    sums, largest = found["loss"].sum(dim=0).tolist(), found["grad_norm"].max(dim=0).values.tolist()
    done = [
        GlobalStep(one.step, loss if one.global_loss is None else float(one.global_loss), float(one.lr), norm)
        for one, loss, norm in zip(noted, sums, largest, strict=True)
    ]
    return ExchangedSteps(done, found, dict(zip(now, of_now.T.tolist(), strict=True)), took_here)


def _vector(numbers: Sequence[Number], device: torch.device) -> torch.Tensor:
    """float64 on `device`, of numbers that are all tensors or none."""
    if numbers and isinstance(numbers[0], torch.Tensor):
        return torch.stack(list(numbers)).detach().to(device, torch.float64)  # type: ignore[arg-type]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _require_none(differs: torch.Tensor, values: torch.Tensor, noted: Sequence[LocalStep], said: str) -> None:
    """Raise UserError where one of `values` (ranks, steps) differs from that of rank 0."""
    if len(found := differs.nonzero()):
        rank, index = found[found[:, 1].argmin()].tolist()
        there, here = f"{values[rank, index]:.10g}", f"{values[0, index]:.10g}"
        problem = said.format(rank=rank, step=noted[index].step, there=there, here=here)
        raise UserError(problem, same_on_every_rank=True)


def _require_same_shares(mine: Sequence[Shares]) -> None:
    """Raise RunError on every rank unless the changes of the shares are the same on all. Every rank must call this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, changes in enumerate(everyone):
        for step in sorted({one.from_step for one in [*changes, *everyone[0]]}, reverse=True):
            here, there = (_weights_at(of, step) for of in (changes, everyone[0]))
            if here != there:
                here, there = (", ".join(map(str, weights)) for weights in (here, there))
                raise RunError(
                    f"rank {rank} has the shares {here} in step {step + 1}, but rank 0 {there}, so samples would be "
                    "left out or trained twice: has one rank alone changed the plan? Else give --shares in place of "
                    "--balance auto, and report this",
                    same_on_every_rank=True,
                )


def _weights_at(changes: Sequence[Shares], step: int) -> Sequence[object]:
    return next((one for one in reversed(changes) if one.from_step <= step), changes[0]).weights
