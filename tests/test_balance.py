"""Shares by speed: what the balancer computes from the ranks' times (test_balanced_runs.py has real runs)."""

import random

import pytest

from common.uneven.options.balance import WINDOW_STEPS, next_window
from common.uneven.options.speeds import IDLE_WINDOWS, Speeds, fastest
from common.uneven.plan import plan_batches

GLOBAL_BATCH = 256


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
        work = [share * WINDOW_STEPS for share in self.plan.shares]
        noise = [1 + self.random.uniform(-self.noise, self.noise) for _ in work]
        passes = [done / speed * one for done, speed, one in zip(work, self.ranks, noise, strict=True)]
        if slow is not None:
            passes[slow] *= 10
        update = [self.update_ms * one / speed for one, speed in zip(noise, self.ranks, strict=True)]
        self.speeds.note(work, passes, update, GLOBAL_BATCH)
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
    passes, update = [step_ms * 5, step_ms], [step_ms * 2, 0.0]  # of 7 steps
    assert next_window(7, passes, update) == steps


def test_the_first_window_already_gives_shares_by_speed():
    cluster = Cluster([1.0, 0.25], update_ms=0.0)
    assert cluster.window() == (205, 51)


def test_the_shares_add_up_to_the_global_batch_whatever_the_speeds():
    chance = random.Random(1)
    for _ in range(200):
        cluster = Cluster([chance.uniform(0.01, 5) for _ in range(chance.randint(2, 12))], noise=0.3)
        assert all(sum(cluster.window()) == GLOBAL_BATCH for _ in range(5))


def test_one_slow_step_changes_nothing():
    cluster = Cluster([1.0, 1.0, 1.0, 0.25])
    for _ in range(4):
        before = cluster.window()
    assert cluster.window(slow=1) == before
    assert cluster.window() == cluster.window() == before


@pytest.mark.parametrize("now", [0.25, 4.0])
def test_a_rank_that_becomes_slow_or_fast_is_followed_within_three_windows(now):
    cluster = Cluster([1.0, 1.0, 1.0])
    for _ in range(4):
        cluster.window()
    cluster.ranks[1] = now
    for _ in range(3):
        shares = cluster.window()
    best = Cluster([1.0, now, 1.0]).window()
    assert cluster.step_ms(shares) <= 1.03 * cluster.step_ms(best)


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
