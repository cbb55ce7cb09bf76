"""Pretraining does not depend on the layout either, with a loss that counts masked tokens and not rows."""

import json
from pydoc_data import topics

import pytest

from tests.harness import BERT, SHARED, largest_difference, losses, play, play_torchrun, rows, weights

WIKITEXT = SHARED / "wikitext-2" / "valid.txt"
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 400,
}
# 50 rows in parts that micro-batches of 9 do not divide; 4 tokens of 32 are masked, in some rows 5.
FLAGS = (
    *("--dropout", 0, "--vocab-size", 400, "--sequence-length", 32, "--global-batch", 50, "--micro-batch", 9),
    *("--lr", "1e-3", "--warmup-steps", 3, "--clip-norm", 1),
)
LAYOUTS = {"two-nodes": (play, (3, 1)), "torchrun": (play_torchrun, (3, 1)), "empty-part": (play, (2, 1))}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small part of WikiText where that is at hand, else of Python's own prose, so that a whole run is short."""
    prose = WIKITEXT.read_text() if WIKITEXT.exists() else "\n\n".join(topics.topics.values())
    folder = tmp_path_factory.mktemp("text")
    (folder / "part.txt").write_text(prose[:40_000])
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def flags_of(text, objective, *more):
    return (
        *FLAGS,
        "--config-file",
        text / "config.json",
        "--corpus",
        text / "part.txt",
        "--cache-dir",
        text / "cache",
        "--objective",
        objective,
        *more,
    )


@pytest.fixture(scope="module", params=[pytest.param("mlm", marks=pytest.mark.long), "mlm+nsp"])
def reference(request, text, tmp_path_factory):
    """A whole run of two epochs in one process, in float64."""
    folder = tmp_path_factory.mktemp("one-process")
    flags = flags_of(text, request.param, "--precision", "fp64", "--epochs", 2)
    play(BERT, (1,), folder, *flags)
    return folder, flags


@pytest.mark.parametrize(
    "name", ["two-nodes", *(pytest.param(one, marks=pytest.mark.long) for one in ("empty-part", "torchrun"))]
)
def test_every_loss_and_the_weights_do_not_know_the_layout(name, reference, tmp_path):
    folder, flags = reference
    start, gpus = LAYOUTS[name]
    more = ("--shares", "3,0,2") if name == "empty-part" else ()
    start(BERT, gpus, tmp_path, *flags, *more)
    assert losses(tmp_path) == pytest.approx(losses(folder), abs=1e-9)
    assert largest_difference(weights(tmp_path), weights(folder)) < 1e-8
    for here, there in zip(rows(tmp_path, "eval"), rows(folder, "eval"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-9)
        assert here["count"] == there["count"]


@pytest.mark.long
def test_losses_and_weights_stay_the_same_while_shares_follow_speed_and_a_loader_fetches_ahead(reference, tmp_path):
    folder, flags = reference
    slow = ("--micro-batch", "3x50,1")  # many small passes on rank 3
    play(BERT, (3, 1), tmp_path, *flags, "--balance", "auto", *slow, "--data-workers", 1)
    assert rows(tmp_path, "shares"), "no share has changed"
    assert losses(tmp_path) == pytest.approx(losses(folder), abs=1e-9)
    assert largest_difference(weights(tmp_path), weights(folder)) < 1e-8


@pytest.mark.long
def test_float32_agrees_at_first_and_in_the_end(text, tmp_path):
    for gpus in ((1,), (3, 1)):
        play(BERT, gpus, tmp_path / str(len(gpus)), *flags_of(text, "mlm", "--epochs", 2))
    first, second = tmp_path / "1", tmp_path / "2"
    assert losses(second)[:20] == pytest.approx(losses(first)[:20], abs=1e-4)
    assert rows(second, "eval")[-1]["loss"] == pytest.approx(rows(first, "eval")[-1]["loss"], rel=0.01)


@pytest.mark.long
def test_a_run_that_was_interrupted_goes_on_as_if_it_were_not(text, tmp_path):
    flags = flags_of(text, "mlm", "--precision", "fp64", "--epochs", 2)
    play(BERT, (2,), tmp_path / "whole", *flags)
    play(BERT, (2,), tmp_path / "parts", *flags, "--max-steps", 5, "--save-every", 5)
    play(BERT, (2, 1), tmp_path / "parts", *flags, "--resume")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-9)


@pytest.mark.long
def test_workers_of_the_loader_change_nothing_and_warn_of_nothing(text, tmp_path):
    flags = flags_of(text, "mlm", "--precision", "fp64", "--max-steps", 3)
    play(BERT, (1,), tmp_path / "without", *flags)
    results = play(BERT, (1,), tmp_path / "with", *flags, "--data-workers", 1)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert "warning" not in results[0].output.lower(), results[0].output
    assert "fork" not in results[0].output.lower(), results[0].output


@pytest.mark.long
def test_workers_of_the_loader_that_stay_over_the_epochs_mask_anew_in_each(text, tmp_path):
    flags = flags_of(text, "mlm", "--precision", "fp64", "--epochs", 3)
    play(BERT, (2, 1), tmp_path / "without", *flags)
    play(BERT, (2, 1), tmp_path / "with", *flags, "--data-workers", 2)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.long
def test_evaluations_within_an_epoch_come_when_asked_and_change_nothing(text, tmp_path):
    flags = flags_of(text, "mlm", "--precision", "fp64", "--max-steps", 5, "--dropout", 0.1)
    play(BERT, (2,), tmp_path / "without", *flags)
    play(BERT, (2,), tmp_path / "with", *flags, "--eval-every", 2)
    assert [row["step"] for row in rows(tmp_path / "with", "eval")] == [2, 4, 5]
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
