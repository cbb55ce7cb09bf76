"""The folder bert_ddp/cpu only makes CPUs faster: without it everything runs, and computes the same."""

import shutil

import pytest

from tests.harness import FINETUNE, PREDICT, ROOT, losses, play, start
from tests.small_bert import save_model, save_ner


def test_without_the_cpu_room_fine_tuning_and_prediction_run_and_compute_the_same(tmp_path):
    checkout = tmp_path / "checkout"
    for folder in ("bert_ddp", "common", "mnist_ddp"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("cpu", "__pycache__"))
    (tmp_path / "lines.txt").write_text("anna went to rome .\nthe old man came home\n")
    task = ("--task", "ner", "--model", save_model(tmp_path / "model"), "--data", save_ner(tmp_path / "data"))
    flags = (*task, "--global-batch", 16, "--lr", 3e-3, "--precision", "fp64", "--dropout", 0, "--max-steps", 3)
    play(FINETUNE, (1,), tmp_path / "with", *flags)
    layout = ("-g", 1, "--device", "cpu")
    model = ("--task", "ner", "--model", tmp_path / "with")
    files = ("--input", tmp_path / "lines.txt", "--output", tmp_path / "answers.jsonl")
    commands = [
        start("python", checkout / "bert_ddp" / FINETUNE.name, *layout, *flags, "--out-dir", tmp_path / "without"),
        start("python", checkout / "bert_ddp" / PREDICT.name, *layout, *model, *files),
    ]
    for command in commands:
        result = command.result()
        assert result.code == 0, result.output
    assert losses(tmp_path / "without") == pytest.approx(losses(tmp_path / "with"), abs=1e-12)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
