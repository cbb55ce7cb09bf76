"""Shares by speed: what the balancer computes from the ranks' times (test_balanced_runs.py has real runs)."""

import random
import statistics
from itertools import pairwise

import numpy as np
import pytest

from common.uneven.options.balance import WINDOW_STEPS, next_window
from common.uneven.options.speeds import GROWTH, IDLE_WINDOWS, Speeds, least_time
from common.uneven.plan import fastest, plan_batches, split

GLOBAL_BATCH = 256
CHANGE_STEP = 45  # at which speeds change


def note(speeds, work, passes, update, exchange_ms=1.0):
    """Note a window, in which the exchange takes so long once the last rank has come."""
    speeds.note(work, passes, update, passes.max(axis=1, keepdims=True) - passes + exchange_ms)


class Cluster:
    """Ranks of known speeds, in samples per millisecond, that train under a balancer's shares."""

    def __init__(self, speeds, update_ms=2.0, noise=0.0, seed=0):
        self.ranks, self.update_ms, self.noise = list(speeds), update_ms, noise
        self.random = random.Random(seed)
        self.plan = plan_batches(60_000, GLOBAL_BATCH, len(self.ranks))
        self.speeds = Speeds()
        self.changes = 0

    def window(self, slow=None):
        """Train five steps; rank `slow` takes ten times as long. Returns the shares afterwards."""
        work = np.array([self.plan.shares] * WINDOW_STEPS, dtype=float)
        noise = 1 + np.array([self.random.uniform(-self.noise, self.noise) for _ in self.ranks])
        passes, update = work / self.ranks * noise, self.update_ms / np.array([self.ranks] * WINDOW_STEPS) * noise
        if slow is not None:
            passes[:, slow] *= 10
        note(self.speeds, work, passes, update)
        last = self.plan.changes[-1]
        if weights := self.speeds.better_shares(GLOBAL_BATCH, last.weights):
            self.plan.change_shares(weights, last.from_step + 1)
            self.changes += 1
        return self.plan.shares

    def step_ms(self, shares):
        return max(share / speed + self.update_ms / speed for share, speed in zip(shares, self.ranks, strict=True))


@pytest.mark.parametrize("cost, update", [
    ([1.0, 1.0, 4.0], [0.0, 0.0, 0.0]),
    ([1.0, 2.0, 3.0, 0.5], [5.0, 1.0, 0.0, 2.0]),
    ([0.01], [7.0]),
])  # fmt: skip
def test_all_ranks_that_have_work_end_at_the_same_time(cost, update):
    work = fastest(cost, update, 100.0)
    assert sum(work) == pytest.approx(100.0)
    ends = [done * one + more for done, one, more in zip(work, cost, update, strict=True)]
    assert ends == pytest.approx([ends[0]] * len(ends))


def test_a_rank_whose_update_alone_takes_longer_than_the_step_gets_nothing():
    work = fastest([1.0, 1.0, 1.0], [0.0, 0.0, 80.0], 100.0)
    assert work == [50.0, 50.0, 0.0]


@pytest.mark.parametrize("step_ms, steps", [(1000.0, 5), (40.0, 5), (20.0, 10), (6.0, 34), (1.0, 50), (0.0, 50)])
def test_a_window_takes_as_many_steps_as_the_slowest_rank_computes_in_a_fifth_of_a_second(step_ms, steps):
    assert next_window(np.array([[step_ms * 1.5, step_ms], [step_ms * 0.5, 0.0]])) == steps


def test_the_first_window_already_gives_shares_by_speed():
    cluster = Cluster([1.0, 0.25], update_ms=0.0)
    assert cluster.window() == (205, 51)


def test_the_shares_add_up_to_the_global_batch_whatever_the_speeds():
    chance = random.Random(1)
    for _ in range(200):
        cluster = Cluster([chance.uniform(0.01, 5) for _ in range(chance.randint(2, 12))], noise=0.3)
        found = [cluster.window() for _ in range(8)]
        assert all(sum(shares) == GLOBAL_BATCH and min(shares) >= 0 for shares in found)


def test_a_rank_that_is_slow_in_the_exchange_gets_less():
    chance, speeds, shares = np.random.default_rng(0), Speeds(), (205, 51)  # as fast as each other in their passes
    for _ in range(20):
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        passes = work * [1.0, 4.0] * chance.lognormal(0, 0.05, work.shape)
        note(speeds, work, passes, np.zeros_like(work), np.where(passes.argmax(axis=1, keepdims=True), 60.0, 4.0))
        if weights := speeds.better_shares(256, shares):
            shares = split(256, weights)
    assert shares[1] == pytest.approx(fastest([1.0, 4.0], [4.0, 60.0], 256)[1], abs=3)


@pytest.mark.parametrize("stalls", [0, 1])
def test_a_stall_in_the_exchange_counts_for_the_rank_whose_passes_stall_too(stalls):
    """In three of five steps it stops for twice as long as it computes, in one of these in its passes. If that one
    alone were seen, to take samples from it would not pay."""
    chance, speeds, shares = np.random.default_rng(0), Speeds(), (128, 128)
    for _ in range(20):
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        passes, exchange = work * chance.lognormal(0, 0.01, work.shape), np.ones((WINDOW_STEPS, 1))
        stopped = 2 * passes[2, stalls]
        passes[2, stalls] += stopped
        exchange[3:] += stopped
        note(speeds, work, passes, np.zeros_like(work), exchange)
        if weights := speeds.better_shares(256, shares):
            shares = split(256, weights)
    assert shares[stalls] < 100


def test_an_exchange_that_is_slow_from_now_on_is_no_stall():
    chance, speeds, work = np.random.default_rng(0), Speeds(), np.array([(128,) * 2] * WINDOW_STEPS, dtype=float)
    for window in range(30):
        passes = work * chance.lognormal(0, 0.01, work.shape) * chance.lognormal(0, [0.05, 0.0], work.shape)
        note(speeds, work, passes, np.zeros_like(work), 4.0 if window < 10 else 60.0)
        assert speeds.better_shares(256, (128, 128)) is None


def test_a_rank_that_is_fast_now_and_then_is_followed_each_time():
    speeds, shares, found = Speeds(), (128, 128), []
    for window in range(25):
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        is_fast = window // 5 % 2 == 1 or window >= 20
        note(speeds, work, work * [1.0, 0.25 if is_fast else 1.0], np.zeros_like(work))
        if weights := speeds.better_shares(256, shares):
            shares = split(256, weights)
        found.append(shares[1])
    assert all(one == pytest.approx(205 if window in (9, 19, 24) else 128, abs=12) for window, one in enumerate(found)
               if window % 5 == 4), found  # fmt: skip


def test_an_exchange_that_stalls_where_no_rank_does_changes_nothing():
    chance, speeds, work = np.random.default_rng(0), Speeds(), np.array([(64,) * 4] * WINDOW_STEPS, dtype=float)
    for _ in range(50):
        passes = work * chance.lognormal(0, 0.02, work.shape)
        note(speeds, work, passes, np.zeros_like(work), chance.lognormal(2, 1.5, (WINDOW_STEPS, 1)))
        assert speeds.better_shares(256, (64,) * 4) is None


def test_one_slow_step_changes_nothing():
    cluster = Cluster([1.0, 1.0, 1.0, 0.25])
    for _ in range(4):
        before = cluster.window()
    assert cluster.window(slow=1) == before
    assert cluster.window() == cluster.window() == before


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("now", [0.25, 0.7, 4.0])
def test_a_rank_that_becomes_slow_or_fast_is_followed_within_three_windows(now, ranks):
    cluster = Cluster([1.0] * ranks)
    for _ in range(4):
        cluster.window()
    cluster.ranks[1] = now
    for _ in range(4):
        shares = cluster.window()
    best = Cluster([1.0, now, *[1.0] * (ranks - 2)]).window()
    assert cluster.step_ms(shares) <= 1.03 * cluster.step_ms(best)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_gives_every_rank_a_share_within_its_limit_and_no_worse_ones(seed):
    chance = np.random.default_rng(seed)
    ranks = int(chance.integers(2, 17))
    cost = chance.uniform(0.5, 2.0, ranks) * chance.lognormal(0, chance.choice([0.01, 0.5]), (100, ranks))
    update, now = chance.uniform(0, 30, ranks) * np.ones((100, 1)), np.array(split(256, [*chance.uniform(0, 1, ranks)]))
    found = least_time(cost, update, now)
    assert found.min() >= 0 and found.sum() == pytest.approx(256)
    assert np.all((found <= np.maximum(GROWTH * now, now + 1) + 1e-9) | (now <= 1))
    assert (cost * found + update).max(axis=1).mean() <= (cost * now + update).max(axis=1).mean()


@pytest.mark.parametrize("slowest, ranks", [(1.1, 8), (1.3, 16), (1.3, 32)])
def test_the_search_finds_the_shares_of_many_ranks_too(slowest, ranks):
    cost = np.random.default_rng(0).lognormal(0, 0.03, (100, ranks)) * np.array([slowest] + [1.0] * (ranks - 1))
    now, update = np.full(ranks, 32.0), np.zeros((100, ranks))
    by_mean = np.array(fastest(cost.mean(axis=0).tolist(), [0.0] * ranks, now.sum()))
    found, wanted = ((cost * one).max(axis=1).mean() for one in (least_time(cost, update, now), by_mean))
    assert found <= 1.001 * wanted


def shares_of(cost, batch, windows, update_ms=0.0, rows=WINDOW_STEPS):
    """The shares after each window of a run whose ranks take so long for a sample. The steps have `rows` samples."""
    speeds, shares, found = Speeds(), split(batch, [1] * len(cost)), []
    for _ in range(windows):
        work = np.array([split(count, shares) for count in (rows if isinstance(rows, list) else [batch] * rows)], float)
        note(speeds, work, work * cost + update_ms, np.zeros_like(work))
        weights = speeds.better_shares(batch, shares)
        shares = split(batch, weights) if weights else shares
        found.append(shares)
    return found


@pytest.mark.parametrize("batch, cost", [(8, [100.0, 140.0]), (16, [50.0, 50.0, 50.0, 70.0])])
def test_the_shares_of_a_small_batch_settle(batch, cost):
    assert len(set(shares_of(cost, batch, 40)[5:])) == 1


def test_a_small_last_batch_of_an_epoch_says_nothing_of_the_speeds():
    assert set(shares_of([0.2] * 4, 256, 20, update_ms=2.0, rows=[256] * 5 + [1])) == {(64,) * 4}


def test_a_rank_with_one_sample_gets_more_once_it_is_fast():
    speeds, shares = Speeds(), (15, 1)
    for cost in [150.0] * 4 + [24.0] * 6:
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        note(speeds, work, work * [10.0, cost], np.zeros_like(work))
        if weights := speeds.better_shares(16, shares):
            shares = split(16, weights)
    assert shares == (11, 5)


@pytest.mark.parametrize("seed", range(5))
def test_with_noisy_times_the_shares_settle(seed):
    cluster = Cluster([1.0, 1.0, 0.5, 0.25], noise=0.1, seed=seed)
    for _ in range(10):
        cluster.window()
    found = [cluster.window() for _ in range(50)]
    best = cluster.step_ms(Cluster(cluster.ranks).window())
    assert all(cluster.step_ms(shares) <= 1.12 * best for shares in found)
    widest = max(max(shares[rank] for shares in found) - min(shares[rank] for shares in found) for rank in range(4))
    assert widest <= 0.08 * GLOBAL_BATCH


def test_equal_ranks_keep_equal_shares_in_spite_of_small_noise():
    cluster = Cluster([1.0] * 4, noise=0.01)
    for _ in range(50):
        cluster.window()
    assert cluster.changes == 0 and cluster.plan.shares == (64,) * 4


def test_a_rank_far_too_slow_gets_no_samples_and_is_asked_again_later():
    cluster = Cluster([1.0, 1.0, 0.001])
    assert cluster.window()[2] == 0
    cluster.ranks[2] = 1.0  # nobody can know this before it has computed something
    found = [cluster.window()[2] for _ in range(IDLE_WINDOWS + 3)]
    assert found[0] == 0 and 1 in found
    assert 80 <= found[-1] <= 90


def test_what_a_pass_costs_besides_its_samples_is_known_from_two_shares():
    cost, besides = np.array([0.1, 0.4]), np.array([3.0, 12.0])
    best = fastest(cost.tolist(), besides.tolist(), 256)
    first, second, *others = [shares[1] for shares in shares_of(cost, 256, 10, update_ms=besides)]
    assert first > 1.2 * best[1]
    assert second == pytest.approx(best[1], abs=2) and set(others) == {second}


@pytest.mark.parametrize("seed", range(5))
def test_shares_with_which_steps_take_longer_are_taken_back_and_not_tried_again_soon(seed):
    """Rank 1 is fast as long as what it has to do fits into its slice of a processor."""
    chance, speeds, shares, found = random.Random(seed), Speeds(), (440, 72), []
    for window in range(100):
        fits = window >= 10 and shares[1] <= 72
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        noise = np.array([[chance.lognormvariate(0, 0.2) for _ in shares] for _ in work])
        note(speeds, work, work * [0.1, 0.15 if fits else 0.6] * noise, np.zeros_like(work))
        if weights := speeds.better_shares(512, shares):
            shares = split(512, weights)
        found.append(shares[1])
    trials = [now for before, now in pairwise(found[10:]) if before <= 72 < now]
    assert 1 <= len(trials) <= 6 and trials[0] <= 2 * 72 and sum(share > 72 for share in found[10:]) <= 20, found


@pytest.mark.parametrize("then", [[1.0, 6.0], [12.0, 3.0], [2.0, 3.0], [4.0, 4.0]])
def test_a_speed_that_changes_right_after_the_shares_is_not_their_fault(then):
    """Nor are they taken back over and over: the shares before took as long."""
    speeds, shares, found = Speeds(), (128, 128), []
    for cost in [[1.0, 1.5], *[then] * 6]:
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        note(speeds, work, work * cost, np.zeros_like(work))
        if weights := speeds.better_shares(256, shares):
            shares = split(256, weights)
        found.append(shares)
    best = fastest(then, [0.0, 0.0], 256)
    assert shares == pytest.approx(best, rel=0.05) and found[3:] == [shares] * 4, found


def test_a_change_is_judged_by_the_first_window_after_which_shares_can_change():
    speeds, work = Speeds(), np.array([(128, 128)] * WINDOW_STEPS, dtype=float)
    note(speeds, work, work * [1.0, 2.0], np.zeros_like(work))
    assert speeds.better_shares(256, (128, 128)) == (171, 85)
    for _ in range(2):  # at the end of an epoch
        work = np.array([(171, 85)] * WINDOW_STEPS, dtype=float)
        note(speeds, work, work * [2.0, 2.0], np.zeros_like(work))
    assert speeds.better_shares(256, (171, 85)) == (128, 128)


def test_a_bad_change_of_which_one_window_is_not_sure_is_taken_back_after_two():
    """Steps took 256 ms before. Now they take 320, give or take 70."""
    speeds, shares, found = Speeds(), (128, 128), []
    for passes in [[(128, 256)] * 5, *[[(250, 170)] * 2 + [(390, 170)] * 3] * 2]:
        note(speeds, np.array([shares] * 5, dtype=float), np.array(passes, dtype=float), np.zeros((5, 2)))
        shares = split(256, speeds.better_shares(256, shares) or shares)
        found.append(shares)
    assert found == [(171, 85), (171, 85), (128, 128)]


def test_after_a_change_that_was_taken_back_one_in_the_other_direction_is_made():
    speeds, shares, found = Speeds(), (128, 128), []
    for costs in [[4.0, 1.0], *[[1.0, 4.0]] * 14]:  # the first window was not typical
        work = np.array([shares] * WINDOW_STEPS, dtype=float)
        note(speeds, work, work * costs, np.zeros_like(work))
        if weights := speeds.better_shares(256, shares):
            shares = split(256, weights)
        found.append(shares[1])
    assert found[:2] == [205, 128] and shares[1] == pytest.approx(51, abs=5), found


def test_one_slow_step_right_after_a_change_does_not_take_it_back():
    speeds, shares = Speeds(), (128, 128)
    for slow in (0.0, 3000.0):
        passes = (work := np.array([shares] * WINDOW_STEPS, dtype=float)) * [1.0, 4.0]
        passes[2, 0] += slow
        note(speeds, work, passes, np.zeros_like(work))
        shares = split(256, speeds.better_shares(256, shares) or shares)
        assert shares == (205, 51)


def test_a_good_change_is_rarely_taken_back_where_each_step_may_take_twice_as_long():
    """At random: of a window's five steps one may be long, and four of the next."""
    chance, taken_back = np.random.default_rng(0), 0
    for _ in range(100):
        speeds, shares, found = Speeds(), (128, 128), []
        for _ in range(4):
            work = np.array([shares] * WINDOW_STEPS, dtype=float)
            note(speeds, work, work * [1.0, 1.5] * chance.choice([1, 2], (WINDOW_STEPS, 1)), np.zeros_like(work))
            shares = split(256, speeds.better_shares(256, shares) or shares)
            found.append(shares[1])
        assert found[0] == 102
        taken_back += max(found) > 110
    assert taken_back <= 5


@pytest.mark.parametrize("window", [20, 26, 29, 35, 38])  # right after it is asked, it takes some windows more
def test_a_rank_that_is_asked_again_and_is_still_slow_does_not_keep_others_from_being_followed(window):
    cluster = Cluster([1.0, 1.0, 0.001], update_ms=0.0)
    for _ in range(window):
        cluster.window()
    cluster.ranks[0] = 4.0
    found = [cluster.window() for _ in range(IDLE_WINDOWS)]
    assert 195 <= found[-1][0] <= 210 and found[-1][2] <= 1


def test_a_rank_that_is_slow_now_and_then_gets_less_than_by_its_mean_speed():
    cost = np.array([[1.0, 1.0]] * 3 + [[1.0, 10.0]])  # of four steps; with 3.25 in each, it would get 60
    shares = least_time(cost, np.zeros((4, 2)), np.array([200.0, 56.0]))
    assert shares.sum() == pytest.approx(256) and shares[1] == pytest.approx(256 / 11, rel=0.03)


class Slices:
    """A processor of which a rank has a part: it stops for the rest of each period in which it has used that up."""

    def __init__(self, part, period_ms, phase_ms):
        self.part, self.period, self.phase, self.number, self.left = part, period_ms, phase_ms, -1, 0.0

    def end(self, begin, needs):
        """When it has computed for so many milliseconds."""
        while True:
            number = (begin + self.phase) // self.period
            if number != self.number:
                self.number, self.left = number, self.period * self.part
            ends = (number + 1) * self.period - self.phase
            now = min(self.left, needs, ends - begin)
            self.left, needs = self.left - now, needs - now
            if needs <= 1e-9:
                return begin + now
            begin = ends


def train(
    batch, period_ms, besides_ms, seed, shares=None, steps=150, speeds=(1, 0.25), then=None, noise=0.03, warm=0.0
):
    """(seconds at which each step ended, {step: shares from then on}). With `shares`, these stay. Ranks have slices of
    a processor, other ones after step 45 with `then`. Each pass costs so much besides its samples, and the first dozen
    steps take longer by up to the factor 1 + `warm`."""
    chance, balance, now, fixed = random.Random(seed), Speeds(), 0.0, shares
    processors = [Slices(part, period_ms, chance.uniform(0, period_ms)) for part in speeds]
    shares = shares or (batch / 2, batch / 2)
    window, size, timed_from, changes, ends = [], WINDOW_STEPS, 3, {1: shares}, [now]
    for step in range(1, steps + 1):
        if then and step == CHANGE_STEP:
            processors = [Slices(part, period_ms, chance.uniform(0, period_ms)) for part in then]
        slower = 1 + warm * max(0, 1 - step / 12)
        needs = [(besides_ms + share * 0.1) * slower * chance.lognormvariate(0, noise) for share in shares]
        passes = [one.end(now, need) - now for one, need in zip(processors, needs, strict=True)]
        exchanged = max(one.end(now + max(passes), 2.0) for one in processors)
        exchange = [exchanged - now - one for one in passes]
        update = [one.end(exchanged, 1.0) - exchanged for one in processors]
        now = exchanged + max(update)
        ends.append(now)
        window += [(shares, passes, update, exchange)] * (step >= timed_from)
        if len(window) == size and not fixed:
            work, *times = (np.array(one) for one in zip(*window, strict=True))
            balance.note(work, *times)
            window, size = [], next_window(times[0] + times[1])
            if weights := balance.better_shares(batch, shares):
                shares, timed_from = split(batch, weights), step + 2
                changes[step + 1] = shares
    return ends, changes


def step_ms(ends, first=30):
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


@pytest.mark.parametrize("period_ms", [10, 50, 100])
@pytest.mark.parametrize("batch, besides_ms", [(256, 0.0), (512, 0.0), (512, 3.0), (1024, 0.0)])
def test_shares_settle_where_a_processor_is_taken_away_in_slices(batch, besides_ms, period_ms):
    found = [train(batch, period_ms, besides_ms, seed) for seed in range(9)]
    fixed = [split(batch, (100 - part, part)) for part in range(10, 26)]
    best = min(step_ms(train(batch, period_ms, besides_ms, 0, shares)[0]) for shares in fixed)
    assert statistics.median(step_ms(ends) for ends, _ in found) <= 1.08 * best
    changes = [sum(step > 30 for step in changes) for _, changes in found]
    assert statistics.median(changes) <= 3 and max(changes) <= 7


@pytest.mark.parametrize("before, after", [
    ((1, 0.25), (0.25, 1)),
    ((0.25, 0.9), (0.9, 0.9)),
    ((1, 0.25), (1, 1)),
    ((1, 1), (1, 0.25)),
])  # fmt: skip
@pytest.mark.parametrize("besides_ms", [0.0, 3.0])
def test_speeds_that_change_are_followed_within_thirty_steps(before, after, besides_ms):
    """The first steps take longer: what was concluded of them once gave a rank no samples after the speeds changed."""
    best = step_ms(train(1024, 5, besides_ms, 0, split(1024, after), speeds=after)[0])
    for seed in range(5):
        ends, changes = train(1024, 5, besides_ms, seed, speeds=before, then=after, noise=0.08, warm=0.3)
        assert step_ms(ends, CHANGE_STEP + 30) <= 1.1 * best, changes
        assert min(min(shares) for shares in changes.values()) > 50, changes
