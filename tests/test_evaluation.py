"""Evaluation counts every image once, on any number of ranks."""

import struct

import pytest
import torch
import torch.distributed as dist

from common.uneven.sums import Sums
from tests.harness import MNIST, SHARED, nodes_of, play, playing, rows
from tests.trainers import altered


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with MNIST's files: the real ones where they are at hand, else noise of the same shape."""
    if (SHARED / "MNIST").is_dir():
        return SHARED
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for prefix, count in (("train", 60_000), ("t10k", 10_000)):
        pixels = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        header = struct.pack(">4i", 2051, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.numpy().tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.numpy().tobytes())
    return folder


def test_numbers_of_python_keep_all_their_digits_in_a_sum():
    sums = Sums("loss", "weight", device=torch.device("cpu"))
    sums.add(torch.tensor(0.5), 0.1)
    sums.add(torch.tensor(0.5, dtype=torch.float64), 1669.7)
    assert sums.values.tolist() == [1.0, 0.1 + 1669.7]


def test_a_sum_may_be_a_tensor_such_as_a_confusion_matrix(alone):
    sums = Sums("count", device=torch.device("cpu"), confusion=(2, 2))
    sums.add(3, torch.tensor([[1, 0], [0, 2]]))
    sums.add(1, torch.tensor([[0, 1], [0, 0]]))
    found = sums.reduce()
    assert (found["count"], found["confusion"].tolist()) == (4.0, [[1.0, 1.0], [0.0, 2.0]])


ONLY_MINE = 'count = total["count"]'


def test_an_evaluation_that_is_not_that_of_all_ranks_is_named(tmp_path):
    mine = altered(tmp_path / "mine_ddp", {ONLY_MINE: f"{ONLY_MINE} + run.worker.rank"})
    flags = ("--dataset", "digits", "--max-steps", 3)
    for node in playing(mine, nodes_of((1, 1), tmp_path / "run", *flags), tmp_path).results():
        assert node.code == 2 and "Traceback" not in node.output
        assert "error: the evaluation after step 3 has found loss " in node.output
        assert "it must be that of all ranks. Add up sums and counts over the ranks" in node.output


def test_seven_ranks_count_each_image_once_and_agree_with_one(tmp_path):
    """359 images in batches of 7 are 52, so that some ranks have one more than others."""
    flags = ("--dataset", "digits", "--max-steps", 3, "--eval-batch", 7, "--precision", "fp64")
    play(MNIST, (1,), tmp_path / "one", *flags)
    play(MNIST, (4, 3), tmp_path / "seven", *flags)
    (one,), (seven,) = rows(tmp_path / "one", "eval"), rows(tmp_path / "seven", "eval")
    assert one["count"] == seven["count"] == 359
    assert seven["accuracy"] == one["accuracy"]
    assert seven["loss"] == pytest.approx(one["loss"], abs=1e-12)


@pytest.mark.long
def test_seven_ranks_count_ten_thousand_images_once_and_agree_with_one(images, tmp_path):
    flags = ("--data-dir", images, "--max-steps", 3, "--eval-batch", 333, "--precision", "fp64")
    play(MNIST, (1,), tmp_path / "one", *flags)
    play(MNIST, (4, 3), tmp_path / "seven", *flags)
    (one,), (seven,) = rows(tmp_path / "one", "eval"), rows(tmp_path / "seven", "eval")
    assert one["count"] == seven["count"] == 10_000
    assert seven["accuracy"] == one["accuracy"]
    assert seven["loss"] == pytest.approx(one["loss"], abs=1e-12)
