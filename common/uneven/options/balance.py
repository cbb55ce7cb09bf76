"""Shares that follow the ranks' speeds, so that a slow rank computes less and none waits for it.

With equal shares the slowest rank sets the pace. Its share can be made smaller at any step boundary, and the result
stays the same, because the optimisation does not depend on the shares:

    rank                                     0     1     2     3
    samples a second                       100   100   100    25      a step of 128 samples takes
    equal shares                            32    32    32    32      1.28 s, as long as rank 3 needs
    shares by speed                         40    39    39    10      0.40 s
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UserError
from common.uneven.ddp import UnevenDistributedDataParallel
from common.uneven.options.speeds import Speeds
from common.uneven.options.timer import StepTimer
from common.uneven.plan import BatchPlan
from common.uneven.sampling import UnevenDistributedSampler

WINDOW_STEPS, MOST_STEPS = 5, 50  # between two exchanges of the ranks' times
WINDOW_MS = 200.0  # that the slowest rank computes in between, where 50 steps are enough: an exchange delays a step
UNTIMED_STEPS = 2  # the first ones, which allocate memory and start libraries
UNUSUAL_STEPS = 1  # with new shares, for whose sizes libraries prepare


class Balancer:
    """Times the ranks and changes the plan's shares. Every rank makes one, with its own timer.

    What counts of a rank's step are its forward, its backward, its update, and of the exchange what all wait for;
    loading does not. The first shares come from the first eight steps, which train as all others.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sampler: UnevenDistributedSampler,
        timer: StepTimer,
        model: UnevenDistributedDataParallel,
        on: bool = True,
    ):
        """With `on=False`, shares stay as they are. Raises UserError for a model whose forward waits for other ranks,
        because its times would be the same on all."""
        if on and model.guard.needs_whole_parts:
            raise UserError(
                "--balance auto times each rank's forward, which waits for the other ranks where statistics or a loss "
                "are over the global batch: leave it out, and give --shares",
                same_on_every_rank=True,
            )
        self.plan, self.sampler, self.timer, self.on = plan, sampler, timer, on and dist.get_world_size() > 1
        self.speeds = Speeds()
        self.timed_from = 0  # the first step, counted from 1, that is timed
        self.window_steps = WINDOW_STEPS
        self.work: list[float] = []  # of the steps of this window
        self.exchange: Exchange | None = None  # of the last window, under way

    def end_step(self, step: int, work: float) -> bool:
        """Call after each optimizer step, of which `step` are done, and in which this rank has computed `work` samples,
        or tokens where lengths differ. Every fifth call, or a later one where steps are short, starts to exchange a few
        numbers, and the next one uses them: every rank must call this. True when the shares change.
        """
        if not self.on:
            return False
        self.timed_from = self.timed_from or step + UNTIMED_STEPS
        with self.timer.span("shares"):
            changed = self._use_exchange()
        if step >= self.timed_from:
            self.work.append(work)
        if len(self.work) == self.window_steps:
            times = self.timer.latest(self.window_steps)
            of_steps = zip(*((one.passes, one.update, one.exchange - one.further) for one in times), strict=True)
            mine = [self.sampler.next_step, *itertools.chain(self.work, *of_steps)]
            self.exchange = Exchange(mine, self.timer.device, self.sampler.epoch)
            self.work = []
        return changed

    def _use_exchange(self) -> bool:
        """Note the times of the last window, if it has just been exchanged, and change the shares if that pays."""
        if not self.exchange:
            return False
        exchange, self.exchange = self.exchange, None
        next_steps, of_steps = np.split(exchange.numbers(), [1])
        work, passes, update, exchanged = of_steps.reshape(4, -1, len(self.plan.shares))
        self.window_steps = next_window(passes + update)
        self.speeds.note(work, passes, update, exchanged)
        is_other_epoch = exchange.epoch != self.sampler.epoch
        if is_other_epoch and self.window_steps % self.plan.steps_per_epoch:  # a later window decides
            return False
        from_step = int(next_steps.max()) + 1  # the first that no rank's loader has been given: one more step was taken
        if is_other_epoch:  # loaders have fetched unknown steps of the new epoch meanwhile
            from_step = (self.sampler.epoch + 1) * self.plan.steps_per_epoch
        in_use = self.plan.weights_at(from_step)
        weights = self.speeds.better_shares(self.plan.global_batch, in_use, not self.plan.balances_tokens)
        if weights:
            self.plan.change_shares(weights, from_step)
            self.timed_from = from_step + 1 + UNUSUAL_STEPS
            self.timer.begin_checks()
        return bool(weights)


def next_window(took: np.ndarray) -> int:
    """How many steps the next window takes, given the milliseconds that the ranks have computed in each step of the
    last one, (steps, ranks)."""
    step_ms = took.mean(axis=0).max()
    return min(MOST_STEPS, max(WINDOW_STEPS, math.ceil(WINDOW_MS / max(step_ms, 0.001))))


class Exchange:
    """An all-gather of a few numbers, during the next step, so that nobody waits for it."""

    def __init__(self, numbers: Sequence[float], device: torch.device, epoch: int):
        self.epoch = epoch
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self.work: Any = dist.all_gather(self.everyone, mine, async_op=True)

    def numbers(self) -> np.ndarray:
        """Those of all ranks, (numbers, ranks)."""
        self.work.wait()
        return torch.stack(self.everyone, dim=1).cpu().numpy()
