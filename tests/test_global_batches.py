"""GlobalBatchLoader on one process; tests/test_stranger.py has it on uneven ranks."""

import pytest
import torch

from common.errors import UserError
from common.uneven.global_batches import GlobalBatchLoader

NUMBERS = torch.arange(10, dtype=torch.float32)


class Exhausted(torch.utils.data.Dataset):
    """Its samples come from an iterator that ends too early."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return next(iter([]))


def samples_of(batches) -> list[list[float]]:
    """The samples of each step that is left, as if each step had exchanged its gradients."""
    found = []
    for batch in batches:
        found.append([value for micro, _ in batch.micro_batches() for value in micro.tolist()])
        batches.timer.mark("reduced")
    return found


def test_a_sum_over_ranks_within_the_loop_over_micro_batches_is_refused():
    batch = next(GlobalBatchLoader(NUMBERS, 4, micro_batch=3))
    assert batch.sum_over_ranks(len) == 4
    with pytest.raises(UserError, match=r"within the loop over the micro-batches.*: call it once, before that loop"):
        for _ in batch.micro_batches():
            batch.sum_over_ranks(len)
    assert len(list(batch.micro_batches())) == 2 and batch.sum_over_ranks(len) == 4


def test_each_epoch_has_every_sample_once_and_its_last_step_holds_what_is_left():
    batches = GlobalBatchLoader(NUMBERS, 4, epochs=3)
    assert len(batches) == batches.total_steps == 9
    steps = samples_of(batches)
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    epochs = [[*steps[first], *steps[first + 1], *steps[first + 2]] for first in (0, 3, 6)]
    assert all(sorted(epoch) == NUMBERS.tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(batches) == 0 and batches.step == 9


@pytest.mark.parametrize("step", range(10))
def test_it_goes_on_from_any_step(step):
    whole = samples_of(GlobalBatchLoader(NUMBERS, 4, seed=3, epochs=3))
    assert samples_of(GlobalBatchLoader(NUMBERS, 4, seed=3, epochs=3, step=step)) == whole[step:]


def test_pieces_have_at_most_a_micro_batch_and_the_last_one_says_so():
    batches = GlobalBatchLoader(NUMBERS, 8, micro_batch=3)
    pieces = list(next(batches).micro_batches())
    assert [(len(piece), is_last) for piece, is_last in pieces] == [(3, False), (3, False), (2, True)]


def test_the_count_is_the_samples_or_the_sum_of_what_each_sample_counts_for_also_where_that_is_no_whole_number():
    assert next(GlobalBatchLoader(NUMBERS, 10)).global_count == 10
    batch = next(GlobalBatchLoader(NUMBERS, 10, counts=[0.25] * 9 + [1.125]))
    assert (batch.global_count, batch.global_samples) == (3.375, 10)
    assert next(GlobalBatchLoader(NUMBERS, 10, counts=[0.1] * 10)).global_count == pytest.approx(1.0, abs=1e-15)


def test_a_part_is_of_the_type_that_was_asked_for_and_labels_keep_theirs():
    pairs = torch.utils.data.TensorDataset(NUMBERS, torch.arange(10))
    ((numbers, labels), _), *_ = next(GlobalBatchLoader(pairs, 5, dtype=torch.float64)).micro_batches()
    assert numbers.dtype == torch.float64 and labels.dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_ends_an_iterator_does_not_end_the_training(workers):
    batches = GlobalBatchLoader(Exhausted(), 4, num_workers=workers)
    with pytest.raises(RuntimeError, match="Exhausted has raised StopIteration for a sample"):
        for _ in batches:
            batches.timer.mark("reduced")


class ReadsBadlyOnce(torch.utils.data.Dataset):
    fails = True

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7 and self.fails:
            self.fails = False
            raise OSError("the disk has not answered")
        return index


def test_a_batch_that_could_not_be_read_is_the_next_one_where_the_loop_tries_again():
    batches, seen = GlobalBatchLoader(ReadsBadlyOnce(), 2), []
    while batches.step < batches.total_steps:
        try:
            seen += next(next(batches).micro_batches())[0].tolist()
        except OSError:
            continue
        batches.timer.mark("reduced")
    assert sorted(seen) == list(range(10))


def test_a_step_whose_gradients_were_not_exchanged_is_refused_before_the_next():
    batches = GlobalBatchLoader(NUMBERS, 4)
    next(batches)
    with pytest.raises(UserError, match="the gradients of this step were not exchanged"):
        next(batches)


def test_noise_is_that_of_the_step_and_not_of_what_was_drawn_before():
    noises = []
    for step in (0, 1, 1):
        torch.rand(step)
        next(GlobalBatchLoader(NUMBERS, 4, step=step))
        noises.append(torch.rand(1).item())
    assert noises[0] != noises[1] == noises[2]
