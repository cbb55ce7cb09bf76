"""Speeds of the ranks, estimated from noisy times, and the shares with which a step takes the least time: no torch.

Every rank computes the same shares from the same times, so nothing here may round in another way on another processor:
no exponential, no matrix product.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import log, sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

import numpy as np

from common.uneven.plan import fastest, split

MIN_GAIN = 0.98  # of the time of a step, below which a change must bring it
CLEAR_GAINS = (0.9, 0.93)  # the same, where only one window is known, or two
SURE = 3.0  # standard errors that a change of a speed, or a gain, must be larger than
WINDOWS = 20  # windows kept
MOST_SAMPLES = 200  # steps of these that are looked at
GROWTH = 1.25  # of a share at once: the time of a rank may grow faster than its share
ROUNDS = 30  # of the search for the best shares
RARE = 0.02  # of the steps, the slowest, that do not count
# windows in a row -> the factor by which they differ from those before, where the speed has changed
CHANGES = {2: 1.7, 3: 1.2}
Used = Callable[[np.ndarray], np.ndarray]  # the shares that follow these weights
IDLE_WINDOWS = 10  # windows after which a rank without samples is given one, to measure it


class Window(NamedTuple):
    """Some steps with the same shares: float64 (steps, ranks) each."""

    cost: np.ndarray  # milliseconds of forward and backward for a unit of work
    update: np.ndarray  # milliseconds of the optimizer's step


class Speeds:
    """What is known of the ranks' speeds, from the windows that are noted.

    In step s, rank r computes for `cost[s, r] * work[r] + update[s, r]` milliseconds, and the step takes as long as its
    slowest rank. The best shares are those with which the recorded steps would have taken the least time on average.
    So a rank whose speed is high and low in turns, such as one whose processor is taken away in slices, gets less than
    by its mean speed: nobody gains where it is fast, and all wait where it is slow. Where the speed of a rank has
    changed, the windows before are forgotten. New shares have a price, because libraries prepare for each size of a
    batch: a gain must be larger than the noise.
    """

    def __init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.parts: deque[list[float]] = deque(maxlen=WINDOWS)  # each rank's part of the speed of all, in each window
        self.with_these_shares = 0  # windows
        self.known: np.ndarray | None = None  # each rank's last cost
        self.idle: list[int] = []  # windows since a rank had work
        self.step_work = 0.0  # of a step, over all ranks
        # How much a rank's part of the speed differs from one window to the next, as a logarithm: of the noisiest rank.
        self.differences: deque[float] = deque(maxlen=WINDOWS)

    def note(self, work: np.ndarray, passes: np.ndarray, update: np.ndarray) -> None:
        """Note a window: each rank's work, and the milliseconds of its passes and of its update, (steps, ranks)."""
        done = work.sum(axis=0)
        if not done.any():  # nothing is known
            return
        self.step_work = float(done.sum()) / len(work)
        was_idle = np.array(self.idle or [0] * len(done))
        self.idle = np.where(done, 0, was_idle + 1).tolist()
        of_window = passes.sum(axis=0) / np.where(done, done, np.inf)
        if self.known is None:
            self.known = np.full(len(done), of_window.max())
        self.known = np.where(done, of_window, self.known)
        # In a small step, such as an epoch's last one, what each pass costs besides its samples would count as theirs.
        whole = work.sum(axis=1) >= np.median(work.sum(axis=1)) / 2
        cost = np.where(work, passes / np.where(work, work, np.inf), self.known)
        self.windows.append(Window(cost[whole], update[whole]))
        for back in np.flatnonzero(done * was_idle):  # what was known of these ranks is old
            for one in self.windows:
                one.cost[:, back], one.update[:, back] = self.known[back], update[:, back].mean()
            self.parts.clear()
        self.parts.append(parts_of_speed(self.known.tolist()))  # a change that all ranks have changes no share
        self.with_these_shares += 1
        if len(self.parts) > 1:
            self.differences.append(max(abs(log(a / b)) for a, b in zip(*list(self.parts)[-2:], strict=True)))
        # With other shares, the time that a rank takes for its work may be another one, at the same speed.
        for of_rank in zip(*list(self.parts)[-self.with_these_shares :], strict=True):
            if recent := windows_since_change(of_rank, self.noise):
                self._forget(recent)

    def _forget(self, but: int) -> None:
        """Forget all windows but the last ones."""
        for of_windows in (self.windows, self.parts):
            while len(of_windows) > but:
                of_windows.popleft()

    @property
    def noise(self) -> float:
        """The standard deviation of a window's part of the speed, as a logarithm; of many windows, so that a change of
        a speed, which is one difference among them, does not count as noise."""
        return median(self.differences) if self.differences else 0.0

    def better_shares(
        self, global_batch: int, weights: Sequence[float], in_samples: bool = True
    ) -> tuple[float, ...] | None:
        """The best shares of a global batch, or None where those that follow `weights` are about as good. They are
        whole samples, unless parts of batches follow the weights as they are, in tokens."""
        if not self.windows:
            return None

        def used(weights: np.ndarray) -> np.ndarray:
            """The shares that follow these weights."""
            in_use = split(global_batch, weights.tolist()) if in_samples else weights * (global_batch / weights.sum())
            return np.array(in_use, dtype=float)

        now, unit = used(np.array(weights, dtype=float)), self.step_work / global_batch
        best = (self._of_few if len(self.windows) <= len(CLEAR_GAINS) else self._of_many)(now, unit, used).copy()
        if probes := [rank for rank, idle in enumerate(self.idle) if idle and idle % IDLE_WINDOWS == 0]:
            best[probes] = np.maximum(best[probes], 1.0)
        if (best == now).all():
            return None
        self.with_these_shares = 0
        return tuple(best.tolist())

    def _of_few(self, now: np.ndarray, unit: float, used: Used) -> np.ndarray:
        """From the medians, because of few windows noise is not known."""
        cost, update = (np.median(np.concatenate(one), axis=0) for one in zip(*self.windows, strict=True))
        best = used(np.array(fastest(cost.tolist(), update.tolist(), self.step_work)))
        gain = (cost * unit * best + update).max() / (cost * unit * now + update).max()
        return best if gain < CLEAR_GAINS[len(self.windows) - 1] else now

    def _of_many(self, now: np.ndarray, unit: float, used: Used) -> np.ndarray:
        cost, update = (np.concatenate(one) for one in zip(*self.windows, strict=True))
        cost = cost * unit
        number = np.repeat(np.arange(len(self.windows)), [len(one.cost) for one in self.windows])  # of a step's window
        took = (cost * now + update).max(axis=1)
        chosen = np.flatnonzero(took <= np.quantile(took, 1 - RARE))[:: -(-len(took) // MOST_SAMPLES)]
        best = used(least_time(cost[chosen], update[chosen], now))
        before, after = ((cost[chosen] * one + update[chosen]).max(axis=1) for one in (now, best))
        gains = [float((before - after)[number[chosen] == one].mean()) for one in np.unique(number[chosen])]
        is_sure = len(gains) > 1 and mean(gains) > SURE * stdev(gains) / sqrt(len(gains))
        return best if is_sure and after.mean() < MIN_GAIN * before.mean() else now


def least_time(cost: np.ndarray, update: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Shares with the sum of `now` with which steps that cost so much a sample, (steps, ranks), take the least time on
    average: the mean over the steps of the slowest rank's time. None is more than GROWTH times as large as now, or one
    sample larger; but that of a rank which has one sample, to measure it, may be anything.

    That mean is convex in the shares. Its slope for a rank is the mean of its cost in the steps in which it is the
    slowest. Each round takes from the ranks with a steep slope, and gives to the others; the best shares count. The
    search begins with the shares that would be best for the mean costs.
    """
    total = now.sum()
    most = np.where(now > 1, np.maximum(now * GROWTH, now + 1), total)
    by_mean = np.array(fastest(cost.mean(axis=0).tolist(), update.mean(axis=0).tolist(), total))
    found, best, least = capped(by_mean, most), now, (cost * now + update).max(axis=1).mean()
    for round_ in range(ROUNDS):
        took = cost * found + update
        slowest, time = took.argmax(axis=1), took.max(axis=1).mean()
        if time < least:
            best, least = found, time
        slope = np.where(slowest[:, None] == np.arange(len(now)), cost, 0.0).mean(axis=0)
        if not (usual := (slope * found).sum() / total):  # the slowest one has no samples
            break
        change = slope / usual - 1
        found = capped(found * (1 - 0.5 / (1 + round_ / 5) * change / max(1.0, abs(change).max())), most)
    return best


def capped(shares: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Shares with the same sum, none more than `most`: what is too much goes to the others, in proportion to theirs,
    and where these have none, to where there is room."""
    total = shares.sum()
    for _ in range(len(shares)):
        over = np.maximum(shares - most, 0.0)
        if not over.any():
            return shares
        shares = np.minimum(shares, most)
        room = np.where(shares < most, shares, 0.0)
        room = room if room.any() else most - shares
        shares = shares + over.sum() * room / room.sum()
    return np.minimum(shares, most) * (total / np.minimum(shares, most).sum())


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
