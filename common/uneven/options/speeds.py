"""Speeds of the ranks, estimated from noisy times, and the shares that let all ranks end at the same time: no torch."""

from collections import deque
from collections.abc import Sequence
from math import log, sqrt
from statistics import mean, median

from common.uneven.plan import split

MIN_GAIN = 0.98  # of the time of a step, below which a change must bring it
CLEAR_GAIN = 0.9  # of it, below which the first windows are enough
FEW_WINDOWS = 4  # of which noise is not known
SURE = 3.0  # standard errors that a change of a speed, or a gain, must be larger than
WINDOWS = 20  # windows kept
# windows in a row -> the factor by which they differ from those before, where the speed has changed
CHANGES = {2: 1.7, 3: 1.2}
IDLE_WINDOWS = 10  # windows after which a rank without samples is given one, to measure it


class Speeds:
    """An estimate of the ranks' speeds, from the windows that are noted. Lists have one number a rank.

    A step takes rank r `cost[r] * work[r] + update[r]` milliseconds. A window's numbers are noisy, most of all where a
    processor is shared or taken away in slices. So the mean of many windows counts, without the extreme ones; where
    the speed of a rank has changed, those before are forgotten. New shares have a price, because libraries prepare for
    each size of a batch: a gain must be larger than the noise.
    """

    def __init__(self) -> None:
        self.windows: deque[tuple[list[float], list[float]]] = deque(maxlen=WINDOWS)  # (cost, update) of each
        self.cost: list[float] = []  # ms of forward and backward for a unit of work
        self.update: list[float] = []  # ms of the optimizer's step
        self.idle: list[int] = []  # windows since a rank had work
        self.step_work = 0.0  # of a step, over all ranks
        # How much a rank's part of the speed differs from one window to the next, as a logarithm: of the noisiest rank.
        self.differences: deque[float] = deque(maxlen=WINDOWS)

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
        parts = [parts_of_speed(one) for one, _ in self.windows]  # a change that all ranks have changes no share
        if len(parts) > 1:
            self.differences.append(max(abs(log(a / b)) for a, b in zip(*parts[-2:], strict=True)))
        for of_rank in zip(*parts, strict=True):
            if recent := windows_since_change(of_rank, self.noise):
                self.windows = deque(list(self.windows)[-recent:], maxlen=WINDOWS)
        costs, updates = zip(*self.windows, strict=True)
        self.cost = [middle(column) for column in zip(*costs, strict=True)]
        self.update = [middle(column) for column in zip(*updates, strict=True)]
        self.step_work = step_work

    @property
    def noise(self) -> float:
        """The standard deviation of a window's part of the speed, as a logarithm; of many windows, so that a change of
        a speed, which is one difference among them, does not count as noise."""
        return median(self.differences) if self.differences else 0.0

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

        gain = time_left(self.cost, self.update)
        least = MIN_GAIN if len(self.windows) >= FEW_WINDOWS else CLEAR_GAIN
        return log(gain) < min(log(least), -SURE * self.noise / sqrt(len(self.windows)))


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


def parts_of_speed(costs: Sequence[float]) -> list[float]:
    """Each rank's part of the speed of all."""
    speeds = [1 / max(cost, 1e-12) for cost in costs]
    return [speed / sum(speeds) for speed in speeds]


def windows_since_change(parts: Sequence[float], noise: float) -> int:
    """The number of windows since a rank's part of the speed has changed, if it has: the last ones are all higher, or
    all lower, than all before, by a factor that is more than their noise. Else 0."""
    for recent, factor in CHANGES.items():
        before, now = parts[:-recent], parts[-recent:]
        is_outside = bool(before) and (min(now) > max(before) or max(now) < min(before))
        least = max(log(factor), SURE * noise * sqrt(1 / recent + 1 / max(1, len(before))))
        if is_outside and abs(log(mean(now) / mean(before))) > least:
            return recent
    return 0


def middle(numbers: Sequence[float]) -> float:
    """The mean without the fifth that is lowest and the fifth that is highest; of few numbers, the median."""
    if len(numbers) < 5:
        return median(numbers)
    cut = len(numbers) // 5
    return mean(sorted(numbers)[cut:-cut])
