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
from tests.harness import BERT, ROOT, losses, play, run

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


def test_pretraining_runs_without_the_folder_and_gives_the_same_losses(tmp_path):
    for package in ("common", "mnist_ddp", "bert_ddp"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "bert_ddp" / "cpu")
    (tmp_path / "text.txt").write_text("\n\n".join(topics.values())[:40_000])
    flags = (*FLAGS, "--corpus", tmp_path / "text.txt", "--cache-dir", tmp_path / "cache")
    play(BERT, (1,), tmp_path / "with", *flags)
    entry = tmp_path / BERT.relative_to(ROOT)
    done = run("python", entry, "-g", 1, "--device", "cpu", *flags, "--out-dir", tmp_path / "without", cwd=tmp_path)
    assert done.code == 0, done.output
    assert losses(tmp_path / "without") == pytest.approx(losses(tmp_path / "with"), abs=1e-12)
