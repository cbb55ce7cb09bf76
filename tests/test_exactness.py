"""The promise: in float64 the result does not depend on the layout."""

import math

import pytest

from tests.harness import MNIST, largest_difference, losses, nodes_of, play, play_torchrun, playing, rows, weights
from tests.trainers import altered

# 1,438 samples: a tail of 1,438 mod 110 = 8 samples, so that 7 ranks have one sample or two, and micro-batches of
# 7 divide nothing. Shares of 0 leave a rank without a sample in every step.
FLAGS = ("--dataset", "digits", "--precision", "fp64", "--epochs", 2, "--global-batch", 110, "--micro-batch", 7)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-process")
    play(MNIST, (1,), folder, *FLAGS)
    return folder


@pytest.mark.parametrize("gpus", [
    pytest.param((2,), marks=pytest.mark.long), (3, 1), pytest.param((2, 1, 1), marks=pytest.mark.long),
    pytest.param((5, 2), marks=pytest.mark.long),
])  # fmt: skip
def test_weights_and_losses_do_not_know_the_layout(gpus, reference, tmp_path):
    play(MNIST, gpus, tmp_path, *FLAGS)
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)


def test_torchruns_variables_give_the_same_weights(reference, tmp_path):
    play_torchrun(MNIST, (3, 1), tmp_path, *FLAGS)
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10


def test_ranks_without_a_single_sample_change_nothing(reference, tmp_path):
    play(MNIST, (2, 2), tmp_path, *FLAGS, "--shares", "0,5,0,1")
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)


def test_a_global_batch_smaller_than_the_world_is_exact_too(tmp_path):
    flags = (*FLAGS[:4], "--global-batch", 3, "--max-steps", 20)
    play(MNIST, (1,), tmp_path / "one", *flags)
    said = play(MNIST, (3, 2), tmp_path / "five", *flags)[0].output
    assert "shares 1 x3, 0 x2, micro-batches of at most 1; 2 ranks without samples" in said
    assert largest_difference(weights(tmp_path / "five"), weights(tmp_path / "one")) < 1e-10


DIVIDES = "loss_sum / batch.global_count"


def test_averaging_each_ranks_mean_loss_would_fail(reference, tmp_path):
    """The tests above can fail: with every rank's own mean, as plain DDP has it, the weights are far off.

    Experiment 1 of docs/exactness.md.
    """
    plain = altered(tmp_path / "plain_ddp", {DIVIDES: "loss_sum / max(1, len(micro.labels)) / worker.world_size"})
    play(plain, (3, 1), tmp_path, *FLAGS, "--shares", "4,4,1,1")
    assert largest_difference(weights(tmp_path), weights(reference)) > 1e-3


def test_a_wrong_count_agrees_on_every_layout_and_only_the_first_loss_shows_it(tmp_path):
    """Experiment 2 of docs/exactness.md: an untrained network's loss must be near ln(number of classes)."""
    steps = ("--label-smoothing", 0, "--max-steps", 12)
    play(MNIST, (1,), tmp_path / "right", *FLAGS, *steps)
    wrong = altered(tmp_path / "count_ddp", {DIVIDES: "loss_sum / (2 * batch.global_count)"})
    play(wrong, (1,), tmp_path / "one", *FLAGS, *steps)
    play(wrong, (3, 1), tmp_path / "four", *FLAGS, *steps, "--shares", "4,4,1,1")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)
    assert losses(tmp_path / "right")[0] == pytest.approx(math.log(10), rel=0.02)
    assert losses(tmp_path / "one")[0] == pytest.approx(math.log(10) / 2, rel=0.02)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(one, marks=pytest.mark.long) for one in ("fp16", "fp32"))]
)
def test_lower_precision_trains_on_uneven_ranks(precision, tmp_path):
    play(MNIST, (2, 1), tmp_path, "--dataset", "digits", "--precision", precision, "--epochs", 4, "--shares", "3,2,1")
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] / 2
    assert rows(tmp_path, "eval")[-1]["count"] == 359


def test_a_count_of_one_ranks_own_samples_is_refused(tmp_path):
    own = "batches.last = batch = __import__('dataclasses').replace(next(batches), global_count=batches.last.work)"
    script = altered(tmp_path / "own_ddp", {"batch = next(batches)": own})
    nodes = nodes_of((2, 1), tmp_path / "run", *FLAGS, "--shares", "3,2,1")
    results = playing(script, nodes, tmp_path).results()
    for result in results:
        assert result.code == 2
    assert "divides the loss of step 1 by" in results[0].output and "the count over all ranks" in results[0].output


HALF = {
    "run.wrap(net, compute_loss,": "run.wrap(net.features, lambda model, batch: model(batch.images).sum(),",
    "loss_sum, _ = compute_loss(model, micro, args.label_smoothing)": (
        "loss_sum = cross_entropy(net.classifier(model(micro.images)), micro.labels, reduction='sum')"
    ),
}
CLIPPED = "run.optimizer_step(optimizer, "


@pytest.mark.parametrize("clipped, said", [
    ("net", "the gradient of classifier.1.weight is not summed over the ranks"),
    ("model", "that the model of this step lacks, so it would not be clipped"),
])  # fmt: skip
def test_a_network_that_is_not_wrapped_is_refused(clipped, said, tmp_path):
    script = altered(tmp_path / "half_ddp", {**HALF, CLIPPED: f"{CLIPPED}model={clipped}, "})
    for result in playing(script, nodes_of((2, 1), tmp_path / "run", *FLAGS), tmp_path).results():
        assert result.code == 2 and said in result.output
