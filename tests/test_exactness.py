"""The promise: in float64 the result does not depend on the layout."""

import pytest

from tests.harness import MNIST, largest_difference, losses, play, play_torchrun, weights

# 1,438 samples: a tail of 1,438 mod 110 = 8 samples, so that 7 ranks have one sample or two, and micro-batches of
# 7 divide nothing. Shares of 0 leave a rank without a sample in every step.
FLAGS = ("--dataset", "digits", "--precision", "fp64", "--epochs", 2, "--global-batch", 110, "--micro-batch", 7)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-process")
    play(MNIST, (1,), folder, *FLAGS)
    return folder


@pytest.mark.parametrize("gpus", [(2,), (3, 1), (2, 1, 1), (5, 2)])
def test_weights_and_losses_do_not_know_the_layout(gpus, reference, tmp_path):
    play(MNIST, gpus, tmp_path, *FLAGS)
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)


def test_torchruns_variables_give_the_same_weights(reference, tmp_path):
    play_torchrun(MNIST, (3, 1), tmp_path, *FLAGS)
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
