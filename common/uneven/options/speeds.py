"""Speeds of the ranks, estimated from noisy times, and the shares with which a step takes the least time: no torch.

Every rank computes the same shares from the same times, so nothing here may round in another way on another processor:
no exponential, no matrix product.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

import numpy as np

from common.uneven.plan import fastest, split

MIN_GAIN = 0.98  # of the time of a step, below which a change must bring it
CLEAR_GAINS = (0.9, 0.93)  # the same, where only one window is known, or two
SURE = 3.0  # standard errors that a change of a speed, or another finding, must be larger than
SURE_GAIN = 2.0  # the same, for a gain or a loss of time
LEAST_NOISE = 0.01  # of a window, as a part of its mean time
WINDOWS = 20  # windows kept
FEWEST = 3  # windows that count, also such with other shares
MOST_SAMPLES = 200  # steps of these that are looked at
GROWTH = 1.5  # of a share at once: the time of a rank may grow faster than its share
GROWTH_IF_FASTER = 2.0  # the same, right after a rank seems to have become faster
LEAST_STALL = 0.1  # of the longest pass, by which an exchange in which a rank stalls takes longer than usual
CLEARLY = 3.0  # times as long as all others together stall, above which it is sure which rank that was
MEDIAN_ERROR = 1.86  # the standard error of a median, in median absolute deviations over the root of the count
ARRIVALS = 5  # steps in which a rank was the last to come, from which on they tell how long its exchange takes
ROUNDS = 30  # of the search for the best shares
RARE = 0.02  # of the steps, the slowest, that do not count
# windows in a row -> the factor by which they differ from those before, where the speed has changed
CHANGES = {2: 1.7, 3: 1.2}
Used = Callable[[np.ndarray], np.ndarray]  # the shares that follow these weights
WORSE = 1.15  # of the time of a step before a change, above which the change is taken back, once that is sure
JUDGED = 3  # windows after a change, within which that must become sure
PATIENCE = 20  # windows after a change was taken back, without another one in its direction
IDLE_WINDOWS = 10  # windows after which a rank without samples is given one, to measure it


class Window(NamedTuple):
    """Some steps with the same shares: float64 (steps, ranks) each, milliseconds but for `work`."""

    work: np.ndarray
    passes: np.ndarray  # forward and backward
    update: np.ndarray  # the optimizer's step
    exchange: np.ndarray  # from the end of a rank's passes until the gradients of all are summed


class Took(NamedTuple):
    """How long a step took on average. The slowest fifth of each window does not count: one slow step says nothing."""

    ms: float
    error: float  # the standard error of that

    @classmethod
    def of(cls, windows: Iterable[Window]) -> "Took":
        took = [np.sort((one.passes + one.update).max(axis=1) + one.exchange.min(axis=1)) for one in windows]
        of_steps = np.concatenate([one[: -(-4 * len(one) // 5)] for one in took])
        return cls(float(of_steps.mean()), float(of_steps.std() / sqrt(max(1, len(of_steps) - 1))))

    def is_longer_than(self, before: "Took") -> bool:
        return self.ms > WORSE * before.ms

    def is_surely_longer_than(self, before: "Took") -> bool:
        error = sqrt(self.error * self.error + before.error * before.error)
        return self.is_longer_than(before) and self.ms - before.ms > SURE_GAIN * error


class Before(NamedTuple):
    """What a change of the shares has changed."""

    weights: tuple[float, ...]
    shares: np.ndarray  # (ranks,)
    took: Took

    def is_better(self, now: np.ndarray, took: Took, best: np.ndarray) -> bool:
        """Whether steps were faster with these shares than they are now, and the best ones are much nearer to these."""
        return took.ms > self.took.ms and bool(abs(best - self.shares).sum() < abs(now - self.shares).sum() / 2)


@dataclass
class Undone:
    """A change that was taken back, or from which the search itself came back, because steps had become slower."""

    change: Before
    worse: np.ndarray  # the shares after it: (ranks,)
    wait: int = PATIENCE  # windows until another one in its direction may be tried

    def forbids(self, shares: np.ndarray) -> bool:
        return bool(self.wait) and is_alike(shares - self.change.shares, self.worse - self.change.shares)


class Speeds:
    """What is known of the ranks' speeds, from the windows that are noted.

    In step s, rank r takes `cost[s, r] * (work[r] + overhead[r]) + exchange[r] + update[s, r]` milliseconds, and the
    step as long as its slowest rank. The best shares are those with which the recorded steps would have taken the least
    time on average. So a rank whose speed is high and low in turns, such as one whose processor is taken away in
    slices, gets less than by its mean speed: nobody gains where it is fast, and all wait where it is slow. Where the
    speed of a rank has changed, all that was found before is forgotten.

    No share makes the exchange itself shorter, but who is slow in computing may be slow in it too. What it takes after
    the last rank has come is that rank's, and what it takes when somebody stalls, that one's.

    New shares have a price, because libraries prepare for each size of a batch: a gain must be larger than the noise.
    Those with which steps take longer are taken back: a rank may seem fast because what it has to do fits into one
    slice.
    """

    def __init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.with_these_shares = 0  # windows
        # Each rank's mean work, passes and update when it last had work: (1, ranks) each.
        self.last: Sequence[np.ndarray]
        self.idle: list[int] = []  # windows since a rank had work
        self.overhead = np.zeros(0)  # what each rank's pass costs besides its work, in units of work
        self.exchange = np.zeros(0)  # milliseconds that it takes once this rank has come as the last one
        self.stalls: deque[np.ndarray] = deque(maxlen=FEWEST)  # of each window: milliseconds a step, of each rank
        self.step_work = 0.0  # of a step, over all ranks
        # How much each rank's cost differs from one window to the next, as a logarithm.
        self.differences: deque[list[float]] = deque(maxlen=WINDOWS)
        self.before: Before | None = None  # the last change
        self.is_new = False  # whether that was good is not known yet
        self.undone: Undone | None = None  # the last one of these
        # Whether steps have become slower by the last change of a speed; else a rank has become faster, or seems so.
        self.is_slower = True

    def note(self, work: np.ndarray, passes: np.ndarray, update: np.ndarray, exchange: np.ndarray) -> None:
        """Note a window: each rank's work, and the milliseconds of its passes, of its update, and of its exchange from
        the end of its passes on: (steps, ranks) each."""
        done = work.sum(axis=0)
        if not done.any():  # nothing is known
            return
        passes, exchange = self._with_stalls(work, passes, exchange)
        self.step_work = float(done.sum()) / len(work)
        means = [one.mean(axis=0, keepdims=True) for one in (work, passes, update)]
        if not self.idle:  # the first window: who has no work in it is taken to be as slow as the slowest
            slowest = (passes.sum(axis=0) / np.where(done, done, np.inf)).max()
            self.last = np.broadcast_arrays(1.0, slowest, means[2])
            self.overhead = self.exchange = np.zeros(len(done))
        was_idle = np.array(self.idle or [0] * len(done))
        self.idle = np.where(done, 0, was_idle + 1).tolist()
        self.last = [np.where(done, now, then) for now, then in zip(means, self.last, strict=True)]
        # In a small step, such as an epoch's last one, what each pass costs besides its samples would count as theirs.
        whole = work.sum(axis=1) >= np.median(work.sum(axis=1)) / 2
        self.windows.append(Window(work[whole], passes[whole], update[whole], exchange[whole]))
        for back in np.flatnonzero(done * was_idle):  # what was known of these ranks is old
            for one in self.windows:
                for values, now in zip(one[:3], self.last, strict=True):
                    values[:, back] = now[0, back]
        self.with_these_shares += 1
        costs = [np.maximum(self._costs(one)[0].mean(axis=0), 1e-12).tolist() for one in self.windows]
        if len(costs) > 1:
            self.differences.append([abs(log(a / b)) for a, b in zip(*costs[-2:], strict=True)])
        # With other shares, the time that a rank takes for its work may be another one, at the same speed.
        of_ranks = zip(*costs[-self.with_these_shares :], strict=True)
        if recent := max(map(windows_since_change, of_ranks, self.noise)):
            self._forget(recent)
        self._find_overhead()
        self._find_exchange()

    def _with_stalls(self, work: np.ndarray, passes: np.ndarray, exchange: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(passes, exchange), in which a stall in an exchange counts as the passes of the rank that stalls: a processor
        that is taken away stops it in both. Which one that is, only their passes tell, because all wait for it."""
        self.stalls.append(np.maximum(passes - np.median(passes, axis=0), 0.0).mean(axis=0))
        after, longest = exchange.min(axis=1), passes.max(axis=1)  # the last one has come
        usual = np.median(after)
        stall = np.where(after - usual > np.maximum(usual, LEAST_STALL * longest), after - usual, 0.0)
        of_ranks = np.sum(self.stalls, axis=0)
        stalls = int(of_ranks.argmax())
        is_clear = of_ranks[stalls] > CLEARLY * (of_ranks.sum() - of_ranks[stalls])
        if not is_clear or np.count_nonzero(work.sum(axis=0)) == 1:
            return passes, exchange
        passes = passes.copy()
        passes[:, stalls] = np.where(stall, longest + stall, passes[:, stalls])
        return passes, exchange - stall[:, None]

    def _costs(self, steps: Window) -> tuple[np.ndarray, np.ndarray]:
        """(milliseconds for a unit of work, milliseconds besides) of each step: that of a rank without work is what it
        was when it had some."""
        work, passes = (np.where(steps.work, *of) for of in zip(steps[:2], self.last[:2], strict=True))
        cost = passes / (work + self.overhead)
        return cost, steps.update + cost * self.overhead + self.exchange

    def _recent(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_costs`, and the number of the window, of the steps that count: those with these shares, and with others
        as long as few are known with these."""
        windows = list(self.windows)[-max(self.with_these_shares, FEWEST) :]
        cost, besides = map(np.concatenate, zip(*map(self._costs, windows), strict=True))
        return cost, besides, np.repeat(np.arange(len(windows)), [len(one.work) for one in windows])

    def _find_overhead(self) -> None:
        """Fit each rank's passes by a line over its work, where shares have differed by more than the noise. A window
        counts by its noise, so that one in which a speed has changed counts little."""
        work, passes = (np.array([one[which].mean(axis=0) for one in self.windows]) for which in (0, 1))
        noise = (
            np.array([one.passes.var(axis=0) / len(one.passes) for one in self.windows]) + (LEAST_NOISE * passes) ** 2
        )
        weight = 1 / np.maximum(noise, 1e-12)
        weight /= weight.sum(axis=0)
        typical, time = (weight * work).sum(axis=0), (weight * passes).sum(axis=0)
        off = weight * (work - typical)
        spread = (off * (work - typical)).sum(axis=0)
        can_tell = (spread * len(work) > (0.1 * typical) ** 2) & (work.min(axis=0) > 0)
        slope, error = (off * passes).sum(axis=0), np.sqrt((off**2 * noise).sum(axis=0))  # both times the spread
        is_sure = can_tell & (slope > SURE * error)
        found = np.where(is_sure, time * spread / np.where(is_sure, slope, 1.0) - typical, 0.0)
        self.overhead = np.clip(np.where(can_tell, found, self.overhead), 0.0, work[-1])

    def _find_exchange(self) -> None:
        """As long as it is not sure that a rank's exchange takes longer than others', or less long, it counts as the
        usual one. Steps of a window are compared with each other: an exchange may become slower for all."""
        exchange, last = zip(
            *((one.exchange.min(axis=1), one.exchange.argmin(axis=1)) for one in self.windows), strict=True
        )
        off = np.concatenate([of_window - of_window.mean() for of_window in exchange])
        tells = np.concatenate([np.full(len(of_window), np.ptp(of_window) > 0) for of_window in last])  # two came last
        self.exchange = np.full(len(self.idle), np.median(np.concatenate(exchange)))
        for rank in range(len(self.idle)):
            own = off[tells & (np.concatenate(last) == rank)]
            if len(own) >= ARRIVALS:
                longer = np.median(own) - np.median(off[tells])
                error = MEDIAN_ERROR * np.median(abs(own - np.median(own))) / sqrt(len(own))
                self.exchange[rank] += longer if abs(longer) > SURE * error else 0.0

    def _forget(self, but: int) -> None:
        """Forget all windows but the last ones."""
        if before := [self.windows.popleft() for _ in range(len(self.windows) - but)]:
            self.overhead, self.before = np.zeros(len(self.idle)), None
            self.with_these_shares = min(self.with_these_shares, but)
            self.is_slower = Took.of(self.windows).is_longer_than(Took.of(before))
            if self.is_slower:
                self.undone = None

    @property
    def noise(self) -> list[float]:
        """The standard deviation of each rank's cost in a window, as a logarithm; of many windows, so that a change of
        a speed, which is one difference among them, does not count as noise."""
        return [median(of_rank) for of_rank in zip(*self.differences, strict=True)] or [0.0] * len(self.idle)

    def better_shares(
        self, global_batch: int, weights: Sequence[float], in_samples: bool = True
    ) -> tuple[float, ...] | None:
        """The best shares of a global batch, or the weights before where a change is taken back. None where those that
        follow `weights` are about as good, or too little is known yet. New shares are whole samples, unless parts of
        batches follow the weights as they are, in tokens."""
        if not self.windows or not self.with_these_shares:
            return None

        def used(weights: np.ndarray) -> np.ndarray:
            """The shares that follow these weights."""
            in_use = split(global_batch, weights.tolist()) if in_samples else weights * (global_batch / weights.sum())
            return np.array(in_use, dtype=float)

        now, unit = used(np.array(weights, dtype=float)), self.step_work / global_batch
        took = Took.of(list(self.windows)[-self.with_these_shares :])
        if self.is_new and self.before and took.is_longer_than(self.before.took):
            if took.is_surely_longer_than(self.before.took):
                self.undone = Undone(self.before, now)
                self.with_these_shares, self.is_new = 0, False
                return self.before.weights
            if self.with_these_shares < JUDGED:  # the next window tells
                return None
        self.is_new = False
        self._wait()
        search = self._of_few if len(self.windows) <= len(CLEAR_GAINS) else self._of_many
        best = search(now, unit, used)
        if self.undone and self.undone.forbids(best):
            best = now
        if (best != now).any():
            if self.before and self.before.is_better(now, took, best):
                self.undone = Undone(self.before, now)
            self.before, self.is_new = Before(tuple(weights), now, took), True
        if probes := [rank for rank, idle in enumerate(self.idle) if idle and idle % IDLE_WINDOWS == 0]:
            best = best.copy()
            best[probes] = np.maximum(best[probes], 1.0)
            self.is_new = False  # the step will take as long as that rank
        if (best == now).all():
            return None
        self.with_these_shares = 0
        return tuple(best.tolist())

    def _wait(self) -> None:
        """Count a window of the wait. Where its steps are as slow without the change that was taken back, it was not
        the shares but a speed that has changed."""
        if not self.undone or not self.undone.wait:
            return
        self.undone.wait -= 1
        if Took.of([self.windows[-1]]).is_longer_than(self.undone.change.took):
            self._forget(self.with_these_shares)

    def _of_few(self, now: np.ndarray, unit: float, used: Used) -> np.ndarray:
        """From the medians, because of few windows noise is not known."""
        cost, besides = (np.median(of_steps, axis=0) for of_steps in self._recent()[:2])
        best = np.array(fastest((cost * unit).tolist(), besides.tolist(), now.sum()))
        if not self.is_slower:
            best = capped(best, most_at_once(now, GROWTH_IF_FASTER))
        best = used(best)
        gain = (cost * unit * best + besides).max() / (cost * unit * now + besides).max()
        return best if gain < CLEAR_GAINS[len(self.windows) - 1] else now

    def _of_many(self, now: np.ndarray, unit: float, used: Used) -> np.ndarray:
        cost, besides, window = self._recent()
        cost = cost * unit
        took = (cost * now + besides).max(axis=1)
        chosen = np.flatnonzero(took <= np.quantile(took, 1 - RARE))[:: -(-len(took) // MOST_SAMPLES)]
        best = used(least_time(cost[chosen], besides[chosen], now))
        before, after = ((cost[chosen] * one + besides[chosen]).max(axis=1) for one in (now, best))
        gains = [float((before - after)[window[chosen] == one].mean()) for one in np.unique(window[chosen])]
        is_sure = len(gains) > 1 and mean(gains) > SURE_GAIN * stdev(gains) / sqrt(len(gains))
        return best if is_sure and after.mean() < MIN_GAIN * before.mean() else now


def is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two changes of the shares have about the same direction: an angle of at most 60 degrees."""
    return bool((one * other).sum() > 0.5 * sqrt((one**2).sum() * (other**2).sum()))


def least_time(cost: np.ndarray, update: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Shares with the sum of `now` with which steps that cost so much a sample, (steps, ranks), take the least time on
    average: the mean over the steps of the slowest rank's time. None is more than GROWTH times as large as now, or one
    sample larger; but that of a rank which has one sample, to measure it, may be anything.

    That mean is convex in the shares. Its slope for a rank is the mean of its cost in the steps in which it is the
    slowest. Each round takes from the ranks with a steep slope, and gives to the others; the best shares count. The
    search begins with the shares that would be best for the mean costs.
    """
    total = now.sum()
    most = most_at_once(now, GROWTH)
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


def most_at_once(now: np.ndarray, growth: float) -> np.ndarray:
    """The largest shares that follow these: `growth` times as large, or one sample larger. That of a rank which has one
    sample, to measure it, may be anything."""
    return np.where(now > 1, np.maximum(now * growth, now + 1), now.sum())


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


def windows_since_change(costs: Sequence[float], noise: float) -> int:
    """The number of windows since a rank's speed has changed, if it has: the last ones are all higher, or
    all lower, than all before, by a factor that is more than their noise. Else 0."""
    for recent, factor in CHANGES.items():
        before, now = costs[:-recent], costs[-recent:]
        is_outside = bool(before) and (min(now) > max(before) or max(now) < min(before))
        least = max(log(factor), SURE * noise * sqrt(1 / recent + 1 / max(1, len(before))))
        if is_outside and abs(log(mean(now) / mean(before))) > least:
            return recent
    return 0
