"""The samplers: the order does not know the layout; evaluation repeats nothing."""

import functools
import itertools

import pytest

from common.errors import UserError
from common.uneven.evaluation import EvaluationSampler
from common.uneven.plan import plan_batches
from common.uneven.sampling import UnevenDistributedSampler
from common.uneven.seeding import derive_seed


def steps(world_size: int, epoch: int = 0, seed: int = 0, first_step: int = 0) -> list[list[int]]:
    """The global batch of each step, put together from all ranks."""
    plan = plan_batches(samples=103, global_batch=16, world_size=world_size)
    samplers = [UnevenDistributedSampler(plan, rank, seed) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch, skip_steps=first_step)
    return [joined(parts) for parts in zip(*samplers, strict=True)]


def joined(parts) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("world_size", [2, 3, 7, 20])
def test_every_layout_sees_the_same_global_batches_in_the_same_order(world_size):
    assert steps(world_size) == steps(1)


def test_an_epoch_holds_every_sample_once():
    assert sorted(joined(steps(3))) == list(range(103))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [str(steps(1, epoch, seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


def test_a_resumed_epoch_goes_on_where_it_stopped():
    assert steps(3, epoch=4, first_step=5) == steps(2, epoch=4)[5:]


@pytest.mark.parametrize("samples, world_size", [(10_000, 7), (10_000, 12), (3, 7), (0, 2)])
def test_evaluation_shards_hold_every_sample_once(samples, world_size):
    shards = [list(EvaluationSampler(samples, rank, world_size, batch=13)) for rank in range(world_size)]
    assert joined(joined(shards)) == list(range(samples))


def test_seeds_of_different_purposes_do_not_meet():
    purposes = [("order", 1), ("order", 2), ("dropout", 1, 2), ("dropout", 12), ("dropout", 1, 3)]
    seeds = [derive_seed(seed, *purpose) for seed in range(20) for purpose in purposes]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_shares_that_change_in_mid_epoch_leave_every_global_batch_as_it_is():
    plan = plan_batches(samples=103, global_batch=16, world_size=3)
    samplers = [UnevenDistributedSampler(plan, rank, seed=0) for rank in range(3)]
    for sampler in samplers:
        sampler.set_epoch(2)
    running = [iter(sampler) for sampler in samplers]
    taken = []
    for step in range(plan.steps_per_epoch):
        if step == 3:
            plan.change_shares((5, 0, 1), from_step=2 * plan.steps_per_epoch + step)
        parts = [next(parts) for parts in running]
        assert (len(parts[1]) == 0) == (step >= 3)
        taken.append(joined(parts))
    assert taken == steps(1, epoch=2)


@pytest.mark.parametrize("samples, batch, world_size", [(1000, 100, 3), (7, 100, 3), (0, 4, 2), (100, 3, 1)])
def test_ranks_that_take_evaluation_batches_in_turn_hold_every_sample_once(samples, batch, world_size):
    for _ in range(2):  # evaluations
        count = itertools.count()
        samplers = [
            EvaluationSampler(samples, rank, world_size, batch, functools.partial(iter, count))
            for rank in range(world_size)
        ]
        running, taken = [iter(sampler) for sampler in samplers], []
        while running:
            one = running[len(taken) ** 2 % len(running)]  # now this one is faster, now that one
            part = next(one, None)
            if part is None:
                running.remove(one)
            else:
                assert 0 < len(part) <= batch
                taken.append(part)
        assert joined(taken) == list(range(samples))


def test_an_epoch_that_begins_again_without_set_epoch_is_refused():
    sampler = UnevenDistributedSampler(plan_batches(10, 4, 1), 0, seed=0)
    assert len(list(sampler)) == 3  # the first one may do without, as with torch's sampler
    with pytest.raises(UserError, match="epoch 0 begins again, in the same order"):
        list(sampler)
    sampler.set_epoch(0)  # on purpose
    assert len(list(sampler)) == 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_sums_in_steps_are_those_of_each_steps_samples_in_every_epoch(shuffle):
    counts = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    sampler = UnevenDistributedSampler(plan_batches(10, 4, 1), 0, seed=0, shuffle=shuffle)
    sums, seen = sampler.sums_in_steps(counts), []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen += [sum(counts[index] for index in batch) for batch in sampler]
    assert [sums[step] for step in range(9)] == seen
    assert sums[4] == seen[4]  # of an earlier epoch again
