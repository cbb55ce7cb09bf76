"""Shares that follow the ranks' speeds, so that a slow rank computes less and none waits for it.

With equal shares the slowest rank sets the pace. Its share can be made smaller at any step boundary, and the result
stays the same, because the optimisation does not depend on the shares:

    rank                                     0     1     2     3
    samples a second                       100   100   100    25      a step of 128 samples takes
    equal shares                            32    32    32    32      1.28 s, as long as rank 3 needs
    shares by speed                         40    39    39    10      0.40 s
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.uneven.batching import BatchPlan, split
from common.uneven.ddp import UnevenDistributedDataParallel
from common.uneven.sampling import UnevenDistributedSampler
from common.uneven.timer import StepTimer

WINDOW_STEPS, MOST_STEPS = 5, 50  # between two exchanges of the ranks' times
WINDOW_MS = 200.0  # that the slowest rank computes in between, where 50 steps are enough: an exchange delays a step
UNTIMED_STEPS = 2  # the first ones, which allocate memory and start libraries
WORTHWHILE = 0.98  # a change must bring the time of a step below this part of what it is
CLEAR = 0.9  # and unless it brings it below this, all of the last windows must say so
WINDOWS = 6  # that are remembered
JUMP = 0.25  # a speed that has changed by more is believed at once, once it is seen in two windows
IDLE_WINDOWS = 10  # after so many a rank without samples gets one, to see whether it is faster now


class Balancer:
    """Times the ranks and changes the plan's shares. Every rank makes one, with its own timer.

    Only forward and backward count as a rank's speed, without loading, waiting and transfer. The first shares come
    from the first eight steps, which train as all others.
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
        self.untimed, self.window_steps = UNTIMED_STEPS, WINDOW_STEPS
        self.work: list[float] = []  # of the steps of this window
        self.exchange: Exchange | None = None  # of the last window, under way

    def end_step(self, work: float) -> bool:
        """Call after each optimizer step, in which this rank has computed `work` samples, or tokens where lengths
        differ. Every fifth call, or a later one where steps are short, starts to exchange a few numbers, and the next
        one uses them: every rank must call this. True when the shares change.
        """
        if not self.on:
            return False
        with self.timer.span("shares"):
            changed = self._use_exchange()
        if self.untimed:
            self.untimed -= 1
            return False
        self.work.append(work)
        if len(self.work) == self.window_steps:
            times = self.timer.latest(self.window_steps)
            mine = [sum(self.work), sum(one.passes for one in times), sum(one.update for one in times)]
            self.exchange = Exchange([*mine, self.sampler.next_step], self.timer.device, self.sampler.epoch)
            self.work = []
        return changed

    def _use_exchange(self) -> bool:
        """Note the times of the last window, if it has just been exchanged, and change the shares if that pays."""
        if not self.exchange:
            return False
        exchange, self.exchange = self.exchange, None
        done, passes, update, next_steps = exchange.numbers()
        steps, self.window_steps = self.window_steps, next_window(self.window_steps, passes, update)
        if not any(done):  # nobody had work, so nothing is known
            return False
        self.speeds.note(done, passes, [one / steps for one in update], sum(done) / steps)
        from_step = int(max(next_steps)) + 1  # the first that no rank's loader has been given: one more step was taken
        if exchange.epoch != self.sampler.epoch:  # loaders have fetched unknown steps of the new epoch meanwhile
            from_step = (self.sampler.epoch + 1) * self.plan.steps_per_epoch
        weights = self.speeds.better_shares(self.plan.global_batch, self.plan.weights_at(from_step))
        if weights:
            self.plan.change_shares(weights, from_step)
        return bool(weights)


def next_window(steps: int, passes: Sequence[float], update: Sequence[float]) -> int:
    """How many steps the next window takes, given the milliseconds that each rank has computed in the last `steps`."""
    step_ms = max(map(sum, zip(passes, update, strict=True))) / steps
    return min(MOST_STEPS, max(WINDOW_STEPS, math.ceil(WINDOW_MS / max(step_ms, 0.001))))


class Exchange:
    """An all-gather of a few numbers, during the next step, so that nobody waits for it."""

    def __init__(self, numbers: Sequence[float], device: torch.device, epoch: int):
        self.epoch = epoch
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self.work: Any = dist.all_gather(self.everyone, mine, async_op=True)

    def numbers(self) -> list[list[float]]:
        """For each number, the values of all ranks."""
        self.work.wait()
        return torch.stack(self.everyone).T.tolist()


class Speeds:
    """An estimate of the ranks' speeds, from the windows that are noted. Lists have one number a rank.

    A step takes rank r `cost[r] * work[r] + update[r]` milliseconds. A window's numbers are noisy: of the last three
    windows the median counts, so that one slow step changes nothing, and small changes count half. New shares have a
    price, because libraries prepare for each size of a batch: for a small gain, six windows must agree.
    """

    def __init__(self) -> None:
        self.windows: deque[tuple[list[float], list[float]]] = deque(maxlen=WINDOWS)  # (cost, update) of each
        self.cost: list[float] = []  # ms of forward and backward for a unit of work
        self.update: list[float] = []  # ms of the optimizer's step
        self.idle: list[int] = []  # windows since a rank had work
        self.step_work = 0.0  # of a step, over all ranks

    def note(self, work: Sequence[float], passes: Sequence[float], update: Sequence[float], step_work: float) -> None:
        """Note a window: each rank's work and the milliseconds of its passes, summed, and of an update, on average.
        `step_work` is the work of one step, over all ranks."""
        was_idle = self.idle or [0] * len(work)
        self.idle = [0 if done else idle + 1 for done, idle in zip(work, was_idle, strict=True)]
        known = self.cost or [max(passes) / max(work)] * len(work)
        cost = [ms / done if done else old for ms, done, old in zip(passes, work, known, strict=True)]
        for rank, done in enumerate(work):
            if done and was_idle[rank]:  # what was known of it is old
                for earlier, _ in self.windows:
                    earlier[rank] = cost[rank]
        self.windows.append((cost, list(update)))
        costs, updates = zip(*list(self.windows)[-3:], strict=True)
        self.cost = _damped(self.cost, [median(column) for column in zip(*costs, strict=True)])
        self.update = _damped(self.update, [median(column) for column in zip(*updates, strict=True)])
        self.step_work = step_work

    def better_shares(self, global_batch: int, weights: Sequence[float]) -> tuple[float, ...] | None:
        """The best weights, in samples of a global batch, or None where those in use, `weights`, are about as good."""
        unit = self.step_work / global_batch
        best = [work / unit for work in fastest(self.cost, self.update, self.step_work)]
        probes = [rank for rank, idle in enumerate(self.idle) if idle and idle % IDLE_WINDOWS == 0]
        for rank in probes:
            best[rank] = max(best[rank], 1.0)
        now, then = (split(global_batch, which) for which in (weights, best))
        if probes or self._is_worthwhile(now, then, unit):
            return tuple(best)
        return None

    def _is_worthwhile(self, now: Sequence[int], then: Sequence[int], unit: float) -> bool:
        """Whether shares `then` are better than `now` by so much that a change pays."""

        def time_left(cost: Sequence[float], update: Sequence[float]) -> float:
            return _step_ms(then, unit, cost, update) / _step_ms(now, unit, cost, update)

        if time_left(self.cost, self.update) < CLEAR:
            return True
        return len(self.windows) == WINDOWS and all(time_left(*window) < WORTHWHILE for window in self.windows)


def _step_ms(shares: Sequence[int], unit: float, cost: Sequence[float], update: Sequence[float]) -> float:
    """How long the slowest rank computes in a step."""
    return max(share * unit * one + more for share, one, more in zip(shares, cost, update, strict=True))


def fastest(cost: Sequence[float], update: Sequence[float], work: float) -> list[float]:
    """`work` divided between the ranks so that the last one is done as early as possible.

    Rank r takes cost[r] for a unit and update[r] besides. All ranks that get work end at the same time T, and
    sum((T - update[r]) / cost[r]) = work; a rank whose update alone takes longer than T gets none.
    """
    busy = set(range(len(cost)))
    while True:
        end = (work + sum(update[rank] / cost[rank] for rank in busy)) / sum(1 / cost[rank] for rank in busy)
        late = {rank for rank in busy if update[rank] >= end}
        if not late:
            return [(end - update[rank]) / cost[rank] if rank in busy else 0.0 for rank in range(len(cost))]
        busy -= late


def _damped(old: list[float], new: list[float]) -> list[float]:
    if not old:
        return new
    return [b if abs(b - a) > JUMP * a else (a + b) / 2 for a, b in zip(old, new, strict=True)]
