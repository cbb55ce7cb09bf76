"""--micro-batch auto: the largest micro-batch that fits on each rank, and the same result."""

import re

import pytest
import torch

from common.uneven.options.memory import is_out_of_memory, wanted_memory
from tests.harness import MNIST, largest_difference, losses, nodes_of, play, playing, run, weights
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 800, "--max-steps", 3)
# A sample takes about a megabyte: 64 x 64 pixels
LARGE = {"ConvNet(train_set.side)": "torch.nn.Sequential(torch.nn.Upsample(scale_factor=8), ConvNet(64))"}
START = '        run.seed("weights")\n'
LIMIT = """        if worker.rank == 1:
            import resource
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + {megabytes} * 2**20, resource.RLIM_INFINITY))
"""


def limited(folder, megabytes):
    """The MNIST trainer with a large network, whose rank 1 may take so many megabytes more."""
    return altered(folder, {**LARGE, START: LIMIT.format(megabytes=megabytes) + START})


def run_limited(trainer, folder, micro_batch="auto", *more):
    """Two ranks, in a process of their own: glibc reads the variables when a process starts, and the harness' ranks are
    forked. RLIMIT_AS counts addresses. Of these glibc takes 64 MiB for each thread that allocates, how many differs,
    and keeps up to 200 MiB in pieces of blocks that were freed, unless large blocks always are mappings of their own.
    """
    flags = ("-g", 2, "--device", "cpu", "--out-dir", folder, *FLAGS, "--max-steps", 1, "--micro-batch", micro_batch)
    return run("python", trainer, *flags, *more, MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="1000000")


@pytest.mark.long
def test_a_rank_with_little_memory_gets_smaller_micro_batches_and_the_curve_is_the_same(tmp_path):
    one = altered(tmp_path / "large_ddp", LARGE)
    play(one, (1,), tmp_path / "one", *FLAGS, "--max-steps", 1)
    small = limited(tmp_path / "limited_ddp", 500)
    said = run_limited(small, tmp_path / "two").output
    first, second = map(int, re.search(r"micro-batches of at most (\d+), (\d+)", said).groups())
    assert first == 400 and 8 <= second < 400
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)
    assert largest_difference(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-10


def test_with_memory_enough_every_rank_takes_its_whole_part_at_once(tmp_path):
    said = play(MNIST, (2, 1), tmp_path, *FLAGS, "--micro-batch", "auto")[0].output
    assert "shares 267 x2, 266, micro-batches of at most 267 x2, 266" in said


@pytest.mark.long
def test_a_rank_on_which_not_even_one_sample_fits_is_named(tmp_path):
    trainer = limited(tmp_path / "limited_ddp", 40)
    result = run_limited(trainer, tmp_path / "run")
    assert result.code == 2
    assert "--micro-batch auto: on rank 1 the memory is too small" in result.output


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--elastic", 1)], ids=["", "elastic"])  # the others would get more rows yet
def test_a_micro_batch_that_does_not_fit_is_named_with_what_to_do(tmp_path, flags):
    result = run_limited(limited(tmp_path / "limited_ddp", 200), tmp_path / "run", 400, *flags)
    assert result.code == 2 and "Traceback" not in result.output
    assert "a micro-batch does not fit into the memory of cpu (can't allocate memory: you tried to" in result.output
    assert "give a smaller --micro-batch" in result.output


@pytest.mark.long
def test_an_evaluation_that_does_not_fit_is_named_with_what_to_do(tmp_path):
    result = run_limited(limited(tmp_path / "limited_ddp", 80), tmp_path / "run", 8)
    assert result.code == 2 and "Traceback" not in result.output
    said = (
        r"memory ran out between two steps \(can't allocate memory: .*\), in train > evaluate > .*train.py\): if it is"
    )
    assert re.search(f"error: {said} an evaluation, give a --eval-batch smaller than 1000;", result.output)


def test_an_error_that_says_nothing_of_its_size_is_one_of_memory_all_the_same():
    error = torch.OutOfMemoryError()
    assert is_out_of_memory(error) and wanted_memory(error) == ""


def test_a_model_with_statistics_over_the_global_batch_refuses_it(tmp_path):
    changes = {
        "net = ConvNet(train_set.side)": "net = global_batch_norm(nn.Sequential(ConvNet(train_set.side), BN(10)))",
        "import torch\n": "import torch\nfrom torch import nn\nfrom torch.nn import BatchNorm1d as BN\n"
        "from common.uneven.options.global_batch import global_batch_norm\n",
    }
    trainer = altered(tmp_path / "normed_ddp", changes)
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS, "--micro-batch", "auto")
    for result in playing(trainer, nodes, tmp_path).results():
        assert result.code == 2
        assert "--micro-batch auto: statistics over the global batch need each rank's whole part" in result.output


def test_help_names_it():
    assert "auto: what fits" in " ".join(run("python", MNIST, "--help").output.split())
