"""Fine-tuning: the same result on every layout, whatever the lengths of the rows."""

import json
import shutil

import pytest

from tests.harness import (
    FINETUNE,
    largest_difference,
    losses,
    nodes_of,
    play,
    play_torchrun,
    playing,
    rows,
    weights,
)
from tests.small_bert import save_classes, save_model, save_ner

# 75 rows of 3 to 25 tokens; tails of 75 mod 16 = 11 rows, so that of 7 ranks some have one row or none.
FLAGS = ("--global-batch", 16, "--lr", 3e-3, "--epochs", 2)
EXACT = (*FLAGS, "--precision", "fp64", "--dropout", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ner(tmp_path_factory, model):
    return ("--task", "ner", "--model", model, "--data", save_ner(tmp_path_factory.mktemp("ner")))


@pytest.fixture(scope="module")
def classify(tmp_path_factory, model):
    return ("--task", "classify", "--model", model, "--data", save_classes(tmp_path_factory.mktemp("classify")))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, ner):
    folder = tmp_path_factory.mktemp("one-process")
    play(FINETUNE, (1,), folder, *ner, *EXACT)
    return folder


@pytest.mark.parametrize("gpus", [(3, 1), pytest.param((5, 2), marks=pytest.mark.long)])
def test_weights_losses_and_scores_do_not_know_the_layout(gpus, ner, reference, tmp_path):
    play(FINETUNE, gpus, tmp_path, *ner, *EXACT, "--micro-batch", 3)
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)
    report = json.loads((tmp_path / "report.json").read_text())
    expected = json.loads((reference / "report.json").read_text())
    assert report["dev"].pop("loss") == pytest.approx(expected["dev"].pop("loss"), abs=1e-12)
    assert report["test"].pop("loss") == pytest.approx(expected["test"].pop("loss"), abs=1e-12)
    assert report == expected


def test_a_rank_without_a_share_changes_nothing(ner, reference, tmp_path):
    play(FINETUNE, (2, 1), tmp_path, *ner, *EXACT, "--shares", "0,2,1")
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10


@pytest.mark.long
def test_weights_and_losses_stay_the_same_while_tokens_follow_speed(ner, reference, tmp_path):
    slow = ("--micro-batch", "3x16,1")  # many small passes on rank 3
    play(FINETUNE, (3, 1), tmp_path, *ner, *EXACT, "--balance", "auto", *slow)
    assert rows(tmp_path, "shares"), "no share has changed"
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)


def test_classification_does_not_know_the_layout(classify, tmp_path):
    play(FINETUNE, (1,), tmp_path / "one", *classify, *EXACT)
    play_torchrun(FINETUNE, (3, 1), tmp_path / "four", *classify, *EXACT)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "four")) < 1e-10
    for measure in ("accuracy", "macro_f1", "matthews"):
        one, four = ([row[measure] for row in rows(tmp_path / name, "eval")] for name in ("one", "four"))
        assert one == pytest.approx(four, abs=1e-12)


@pytest.mark.long
def test_resumed_on_another_layout_in_mid_epoch_it_ends_with_the_same_weights_and_best(ner, reference, tmp_path):
    play(FINETUNE, (2,), tmp_path, *ner, *EXACT, "--max-steps", 7, "--save-every", 7)
    play(FINETUNE, (3, 1), tmp_path, *ner, *EXACT, "--resume")
    assert largest_difference(weights(tmp_path), weights(reference)) < 1e-10
    assert losses(tmp_path) == pytest.approx(losses(reference), abs=1e-12)
    best = [json.loads((folder / "best/latest/state.json").read_text())["step"] for folder in (tmp_path, reference)]
    assert best[0] == best[1]


NOTES = f"""
import runpy
from pathlib import Path

rename = Path.rename

def rename_and_note(self, target):
    run = Path(target).parents[1]
    if Path(target) == run / "checkpoints" / "step-00000005":
        (run / "best-is-there").write_text(str((run / "best" / "latest").exists()))
    return rename(self, target)

Path.rename = rename_and_note
runpy.run_path({str(FINETUNE)!r}, run_name="__main__")
"""


def test_when_an_epoch_s_checkpoint_is_there_its_evaluation_and_the_best_weights_are_too(ner, tmp_path):
    noting = tmp_path / "noting.py"
    noting.write_text(NOTES)
    play(noting, (2,), tmp_path / "run", *ner, *FLAGS, "--save-every", 5)  # 5 steps an epoch
    assert (tmp_path / "run" / "best-is-there").read_text() == "True"  # as the checkpoint gets its name


def resumed(ner, reference, tmp_path, *flags):
    nodes = nodes_of((1,), tmp_path, *ner, *EXACT, "--resume", reference, *flags)
    (node,) = playing(FINETUNE, nodes, tmp_path).results()
    return node


def test_a_resumed_run_must_have_the_same_flags(ner, reference, tmp_path):
    node = resumed(ner, reference, tmp_path, "--warmup-steps", "90%")
    assert node.code == 2
    assert "written with --warmup-steps 0.1, but this run has 0.9" in node.output


@pytest.mark.parametrize("given, code, said", [
    ("10%", 0, "nothing to do"),
    ("20%", 2, "written with --warmup 0.1, but this run has 0.2"),
    ("5", 2, "written with --warmup 0.1, but this run has 5"),
])  # fmt: skip
def test_a_checkpoint_of_a_version_with_another_warm_up_flag_is_resumed_or_refused(
    given, code, said, ner, reference, tmp_path
):
    earlier = tmp_path / "earlier"
    shutil.copytree(reference, earlier, symlinks=True)
    state = earlier / "checkpoints" / "latest" / "state.json"
    fields = json.loads(state.read_text())
    assert fields.pop("warmup_steps") == 0.1
    state.write_text(json.dumps(fields | {"warmup": 0.1}))
    node = resumed(ner, earlier, tmp_path, "--warmup-steps", given)
    assert node.code == code and said in node.output, node.output


@pytest.mark.long
def test_with_dropout_the_same_layout_gives_the_same_bits(ner, tmp_path):
    for name in ("first", "second"):
        play(FINETUNE, (2,), tmp_path / name, *ner, *FLAGS, "--max-steps", 4)
    assert losses(tmp_path / "first") == losses(tmp_path / "second")


@pytest.mark.long
def test_with_dropout_a_run_resumed_on_the_same_layout_gives_the_same_bits(ner, tmp_path):
    play(FINETUNE, (2,), tmp_path / "whole", *ner, *FLAGS)
    play(FINETUNE, (2,), tmp_path / "parts", *ner, *FLAGS, "--max-steps", 3)
    play(FINETUNE, (2,), tmp_path / "parts", *ner, *FLAGS, "--resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_the_first_step_has_dropout_already(ner, tmp_path):
    for dropout in (0, 0.5):
        flags = (*ner, *FLAGS, "--dropout", dropout, "--max-steps", 1)
        play(FINETUNE, (1,), tmp_path / str(dropout), *flags)
    assert losses(tmp_path / "0") != losses(tmp_path / "0.5")


def test_the_best_weights_are_those_of_the_best_evaluation_and_transformers_reads_them(ner, tmp_path):
    play(FINETUNE, (2,), tmp_path, *ner, *FLAGS, "--epochs", 6)
    evaluations = rows(tmp_path, "eval")
    best = max(evaluations, key=lambda row: row["f1"])
    assert best["f1"] > 0.5  # the task is easy: names of persons and places are always the same
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["step"] == best["step"] and report["dev"]["f1"] == pytest.approx(best["f1"])
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert {"person", "place", "micro avg"} <= set(report["dev"]["per_class"])

    from transformers import pipeline

    tagger = pipeline("token-classification", str(tmp_path / "best" / "latest"))
    assert {found["entity"] for found in tagger("anna went to berlin")} <= {"B-person", "B-place", "I-place"}
