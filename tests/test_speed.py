"""bert_ddp/cpu only makes a CPU faster: a GPU does not use it, and without that folder everything runs as well."""

import shutil
from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from bert_ddp.cpu.dropout import NAME, Dropout
from bert_ddp.cpu.linear import Linear
from bert_ddp.model import speed
from tests.harness import BERT, FINETUNE, PREDICT, ROOT, losses, play, run, start
from tests.small_bert import save_model, save_ner

FLAGS = (
    *("--preset", "tiny", "--dropout", 0, "--precision", "fp64", "--max-steps", 3),
    *("--vocab-size", 400, "--sequence-length", 32, "--global-batch", 16, "--objective", "mlm+nsp"),
)


def small_model():
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=50, attn_implementation="sdpa", **size))


def kinds(net):
    return {type(module) for module in net.modules()}


def test_a_cpu_gets_other_layers_and_attention():
    net = small_model()
    speed.tune(net, torch.device("cpu"), same_sizes=True)
    assert {Dropout, Linear} <= kinds(net) and not {nn.Dropout, nn.Linear} & kinds(net)
    assert net.config._attn_implementation == NAME


def test_a_gpu_keeps_torch_s_own():
    net = small_model()
    before = kinds(net)
    speed.tune(net, torch.device("cuda"), same_sizes=True)
    assert kinds(net) == before and net.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A checkout without the folder bert_ddp/cpu."""
    checkout = tmp_path_factory.mktemp("checkout")
    for package in ("common", "mnist_ddp", "bert_ddp"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__", "cpu"))
    return checkout / "bert_ddp"


@pytest.mark.long
def test_pretraining_runs_without_the_folder_and_gives_the_same_losses(without, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(topics.values())[:40_000])
    flags = (*FLAGS, "--corpus", tmp_path / "text.txt", "--cache-dir", tmp_path / "cache")
    play(BERT, (1,), tmp_path / "with", *flags)
    done = run("python", without / BERT.name, "-g", 1, "--device", "cpu", *flags, "--out-dir", tmp_path / "without")
    assert done.code == 0, done.output
    assert losses(tmp_path / "without") == pytest.approx(losses(tmp_path / "with"), abs=1e-12)


@pytest.mark.long
def test_fine_tuning_and_prediction_run_without_the_folder_and_compute_the_same(without, tmp_path):
    (tmp_path / "lines.txt").write_text("anna went to rome .\nthe old man came home\n")
    task = ("--task", "ner", "--model", save_model(tmp_path / "model"), "--data", save_ner(tmp_path / "data"))
    flags = (*task, "--global-batch", 16, "--lr", 3e-3, "--precision", "fp64", "--dropout", 0, "--max-steps", 3)
    play(FINETUNE, (1,), tmp_path / "with", *flags)
    layout = ("-g", 1, "--device", "cpu")
    model = ("--task", "ner", "--model", tmp_path / "with")
    files = ("--input", tmp_path / "lines.txt", "--output", tmp_path / "answers.jsonl")
    commands = [
        start("python", without / FINETUNE.name, *layout, *flags, "--out-dir", tmp_path / "without"),
        start("python", without / PREDICT.name, *layout, *model, *files),
    ]
    for command in commands:
        result = command.result()
        assert result.code == 0, result.output
    assert losses(tmp_path / "without") == pytest.approx(losses(tmp_path / "with"), abs=1e-12)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
