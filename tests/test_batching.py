"""The arithmetic of the global batch."""

import random

import pytest
import torch

from common.uneven.batches import micro_batches
from common.uneven.plan import plan_batches, split


@pytest.mark.parametrize("total, weights, parts", [
    (10, (4, 4, 2), (4, 4, 2)),
    (256, (1, 1, 1), (86, 85, 85)),
    (3, (1, 1, 1, 1), (1, 1, 1, 0)),
    (7, (8, 2), (6, 1)),
    (5, (0, 1), (0, 5)),
])  # fmt: skip
def test_split_gives_what_is_left_to_the_largest_remainders(total, weights, parts):
    assert split(total, weights) == parts


def test_split_always_adds_up_and_is_never_off_by_a_whole_one():
    dice = random.Random(0)
    for _ in range(2000):
        weights = [dice.choice([0, 1, dice.random(), dice.random() * 1e6]) for _ in range(dice.randint(1, 12))]
        if sum(weights) == 0:
            continue
        total = dice.randint(0, 10_000)
        parts = split(total, weights)
        assert sum(parts) == total
        assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("samples, global_batch", [(1438, 110), (100, 100), (5, 64), (64, 3)])
def test_an_epoch_holds_every_position_once_in_order(world_size, samples, global_batch):
    plan = plan_batches(samples, global_batch, world_size)
    positions = [
        position
        for step in range(plan.steps_per_epoch)
        for rank in range(world_size)
        for position in plan.part(step, rank)
    ]
    assert positions == list(range(samples))


def test_the_global_count_of_the_tail_is_what_is_left():
    plan = plan_batches(samples=25, global_batch=10, world_size=4)
    assert [plan.global_count(step) for step in range(6)] == [10, 10, 5, 10, 10, 5]


def test_shares_follow_weights_and_keep_the_global_batch():
    plan = plan_batches(samples=1000, global_batch=100, world_size=3, weights=(3, 1, 1))
    assert plan.shares == (60, 20, 20)
    assert plan.global_batch == 100


def test_a_tail_smaller_than_the_world_leaves_ranks_empty():
    plan = plan_batches(12, 10, 4, (3, 3, 2, 2))
    assert [len(plan.part(1, rank)) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("length, size, expected", [
    (7, 3, [(3, False), (3, False), (1, True)]),
    (6, 3, [(3, False), (3, True)]),
    (4, None, [(4, True)]),
    (2, 5, [(2, True)]),
    (0, 3, [(0, True)]),
    (0, None, [(0, True)]),
])  # fmt: skip
def test_micro_batches_cut_a_part_and_only_the_last_is_last(length, size, expected):
    pieces = list(micro_batches(torch.arange(length), range(length), size))
    assert [(len(piece), is_last) for piece, is_last in pieces] == expected
    assert [sample for piece, _ in pieces for sample in piece] == list(range(length))


def test_shares_that_change_count_from_their_step_on_and_leave_the_global_batch_as_it_is():
    before, after = (plan_batches(samples=100, global_batch=10, world_size=2) for _ in range(2))
    after.change_shares((4, 1), from_step=13)
    after.change_shares((0, 1), from_step=15)
    parts = [[len(after.part(step, rank)) for rank in range(2)] for step in range(12, 17)]
    assert parts == [[5, 5], [8, 2], [8, 2], [0, 10], [0, 10]]
    assert [after.global_count(step) for step in range(30)] == [before.global_count(step) for step in range(30)]


def test_a_later_change_from_an_earlier_step_takes_the_place_of_the_one_before():
    plan = plan_batches(100, 10, 2)
    plan.change_shares((4, 1), from_step=13)
    plan.change_shares((1, 4), from_step=12)
    assert [plan.shares_at(step) for step in (0, 11, 12, 13, 14)] == [(5, 5), (5, 5), (2, 8), (2, 8), (2, 8)]


def test_shares_that_change_for_ever_do_not_fill_the_memory():
    plan = plan_batches(100, 10, 2)
    for step in range(1000):
        plan.change_shares((1, step + 1), from_step=step)
    assert len(plan.changes) <= 100
    assert plan.shares == (0, 10) and sum(plan.shares_at(990)) == 10
