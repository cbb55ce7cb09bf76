"""Batches of any structure, and fingerprints of any data set."""

import gc
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding
from transformers.modeling_outputs import MaskedLMOutput

from common.errors import UserError
from common.launch.worker import clear_frames
from common.uneven.batches import micro_batches, move, rows_in, take_rows
from common.uneven.guards.fingerprint import fingerprint
from common.uneven.loading import dataset_fingerprint, part_loader
from common.uneven.options.workers import worker_options
from common.uneven.sampling import Indices

Pair = namedtuple("Pair", "points labels")


@dataclass(frozen=True)
class Record:
    points: torch.Tensor
    mask: torch.Tensor | None


POINTS, LABELS = torch.arange(12.0).reshape(4, 3), torch.arange(4)
STRUCTURES = [
    POINTS,
    (POINTS, LABELS),
    [POINTS, ["a", "b", "c", "d"]],
    {"x": POINTS, "more": {"y": LABELS}},
    Pair(POINTS, LABELS),
    Record(POINTS, None),
    BatchEncoding({"input_ids": POINTS}),
    MaskedLMOutput(logits=POINTS),
]


@pytest.mark.parametrize("batch", STRUCTURES, ids=lambda batch: type(batch).__name__)
def test_micro_batches_keep_the_structure_and_every_row(batch):
    pieces = [piece for piece, _ in micro_batches(batch, range(4), 3)]
    assert [rows_in(piece) for piece in pieces] == [3, 1]
    assert {type(piece) for piece in pieces} == {type(batch)}
    assert rows_in(take_rows(batch, slice(0, 0))) == 0


def test_only_floating_point_tensors_change_their_type():
    moved = move({"x": POINTS, "y": LABELS, "name": ["a"] * 4}, torch.device("cpu"), torch.float64)
    assert (moved["x"].dtype, moved["y"].dtype, moved["name"]) == (torch.float64, torch.int64, ["a"] * 4)


def test_what_has_no_rows_is_refused():
    with pytest.raises(UserError, match="a batch holds a set, whose rows are unknown"):
        rows_in({"x": POINTS, "names": {"a", "b"}})
    with pytest.raises(UserError, match="a tensor of the batch has no rows"):
        rows_in((POINTS, torch.tensor(1.0)))
    with pytest.raises(UserError, match=r"not 4 \(a tensor of \(4, 3\)\) and 2 \(a list of 2\)"):
        rows_in((POINTS, ["a", "b"]))


class Words(Dataset):
    def __init__(self, *words: str):
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict:
        return {"word": self.words[index], "noise": torch.rand(2)}


def test_the_fingerprint_of_a_data_set_sees_every_sample_and_no_noise():
    assert dataset_fingerprint(Words("a", "b")) == dataset_fingerprint(Words("a", "b"))
    others = [Words("a", "c"), Words("b", "a"), Words("a", "b", "b"), Words("ab"), Words()]
    found = {dataset_fingerprint(other) for other in [Words("a", "b"), *others]}
    assert len(found) == 6


def test_reading_samples_leaves_the_random_numbers_of_training_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    loader = part_loader(Words("a", "b"), [Indices([0, 1], 5)])
    (batch,) = iter(loader)
    base_seed_drawn = torch.Generator().manual_seed(3)  # a DataLoader draws one number when it starts
    torch.empty((), dtype=torch.int64).random_(generator=base_seed_drawn)
    assert torch.rand(1) == torch.rand(1, generator=base_seed_drawn) != expected
    assert batch["word"] == ["a", "b"]


def test_noise_is_that_of_the_epoch_and_the_sample():
    def noise(*indices: Indices) -> list[list[float]]:
        loader: DataLoader = part_loader(Words("a", "b", "c"), list(indices), seed=7)
        return [row for batch in loader for row in batch["noise"].tolist()]

    together = noise(Indices([2, 0, 1], 4))
    assert noise(Indices([1], 4), Indices([2, 0], 4)) == [together[2], together[0], together[1]]
    assert noise(Indices([2], 5)) != together[:1]


class ManyTensors(Dataset):
    def __init__(self, count: int):
        self.rows = [torch.full((3,), float(index)) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def test_a_data_set_of_many_tensors_reaches_the_loaders_processes():
    """Each tensor would need a file descriptor, and a fork server takes about 250 ("too many fds")."""
    loading = worker_options(1, torch.device("cpu"))
    (batch,) = part_loader(ManyTensors(600), [Indices([599, 3])], **loading)
    assert batch[:, 0].tolist() == [599.0, 3.0]


@pytest.mark.parametrize("option, hint", [
    ({"batch_size": 8}, "no batch_size=: the sampler says which samples"),
    ({"shuffle": True}, "no shuffle=: the sampler"),
    ({"drop_last": True}, "no drop_last=: .* the last batch of an epoch is smaller"),
    ({"collate_fn": list}, "no collate_fn=: give the function as collate="),
])  # fmt: skip
def test_options_of_a_dataloader_that_a_part_loader_cannot_take_are_named(option, hint):
    with pytest.raises(UserError, match=f"part_loader has {hint}"):
        part_loader(LABELS, [Indices([1])], **option)


def test_a_sampler_of_single_samples_is_refused():
    with pytest.raises(UserError, match="the sampler gives 0, not a list of the samples of a part"):
        next(iter(part_loader(LABELS, torch.utils.data.SequentialSampler(LABELS))))


def test_a_collate_function_that_gives_nothing_is_named():
    with pytest.raises(UserError, match="the collate function has returned None for 1 samples: it must make a batch"):
        next(iter(part_loader(LABELS, [Indices()], collate=lambda samples: None)))


def test_a_collate_function_with_a_generator_of_its_own_is_refused():
    generator = torch.Generator().manual_seed(0)

    def noisy(samples):
        return torch.stack(samples) + torch.rand(len(samples), generator=generator)

    with pytest.raises(UserError, match="the collate function noisy draws random numbers"):
        next(iter(part_loader(LABELS, [Indices([1, 2])], collate=noisy)))


class Lost(Exception):
    """As MembersChanged, raised out of a frame that holds it."""


def lose_a_rank(processes):
    loader = DataLoader(range(8), batch_size=2, **worker_options(1, torch.device("cpu")))
    batches = iter(loader)
    next(batches)
    processes += batches._workers
    try:
        raise RuntimeError("a connection was lost")
    except RuntimeError as error:
        lost = Lost(error)  # a circle: the frame, its exception, the traceback, the frame
    raise lost


def test_processes_of_a_loader_end_by_themselves_when_the_members_change():
    processes = []
    try:
        lose_a_rank(processes)
    except Lost as lost:
        clear_frames(lost)
    gc.collect()
    assert [process.exitcode for process in processes] == [0]  # torch ends those with SIGTERM that do not end in 5 s


def test_the_fingerprint_of_an_array_of_objects_is_that_of_the_objects():
    """And not of where they are in memory, which differs from rank to rank."""
    one, same, other = (
        np.array(["".join(word), None, 2.5], dtype=object) for word in (("a", "b"), ("ab",), ("a", "c"))
    )
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
