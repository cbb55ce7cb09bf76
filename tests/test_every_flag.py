"""Every flag of the shared parser works in every trainer: its effect is in the files or lines of a run.

The trainers: MNIST, pretraining, fine-tuning, the example of docs/your-own-task.md, and a copy of MNIST's that was made
by its two commands. A new flag in `cli` without a line in SEEN fails here.
"""

import argparse
import json
import shutil
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.launch import cli
from tests.harness import (
    BERT,
    FINETUNE,
    MNIST,
    ROOT,
    Node,
    flags_of,
    nodes_of,
    play,
    playing,
    rows,
    rows_so_far,
    run,
    wait_until,
)
from tests.small_bert import save_model, save_ner
from tests.test_bert_exactness import text  # noqa: F401 (a fixture)
from tests.test_your_own_task import example  # noqa: F401 (a fixture)

LONG = pytest.mark.long
TRAINERS = ["chapter", *(pytest.param(name, marks=LONG) for name in ("mnist", "copy", "pretraining", "fine-tuning"))]
# flag -> whether its effect is there, in one of the runs of `runs`
SEEN = {
    "--global-batch": lambda of: "batch    30 " in of.whole.said,
    "--batch-per-gpu": lambda of: "batch    6 " in of.nodes.said,
    "--micro-batch": lambda of: "micro-batches of at most 7" in of.whole.said,
    "--shares": lambda of: rows(of.whole.folder, "ranks")[-1]["shares"] == [15, 10, 5],
    "--balance": lambda of: '"shares"' in (of.nodes.folder / "trace.json").read_text(),  # the exchange of speeds
    "--compress": lambda of: "rounded to bf16" in of.nodes.said,
    "--sync-every": lambda of: "nodes average their changes every 3 steps" in of.nodes.said,
    "--outer-lr": lambda of: state(of.nodes)["nodes"]["outer"]["param_groups"][0]["lr"] == 0.7,
    "--outer-momentum": lambda of: state(of.nodes)["nodes"]["outer"]["param_groups"][0]["momentum"] == 0.5,
    "--epochs": lambda of: rows(of.nodes.folder, "train")[-1]["epoch"] == 0,
    "--max-steps": lambda of: "done     6 steps" in of.whole.said,
    "--lr": lambda of: max(row["lr"] for row in rows(of.whole.folder, "train")) < 1e-6,
    "--weight-decay": lambda of: 0.123 in [one["weight_decay"] for one in state(of.whole)["optimizer"]["param_groups"]],
    "--clip-norm": lambda of: momentum_norm(of.whole) < 0.01 < rows(of.whole.folder, "train")[0]["grad_norm"],
    "--seed": lambda of: of.whole.first_loss != of.large.first_loss,
    "--precision": lambda of: "gloo, fp64" in of.whole.said and "gloo, fp32" in of.nodes.said,
    "--on-nan": lambda of: "this step changes no weight (--on-nan skip)" in of.large.said,
    "--compile": lambda of: "torchdynamo start tracing" in of.compiled(),
    "--elastic": lambda of: "lost rank 2" in rows(of.elastic.folder, "members")[0]["cause"],
    "--join": lambda of: 3 in [one["original"] for one in rows(of.elastic.folder, "members")[-1]["ranks"]],
    "--stop": lambda of: "--stop: ended after step " in of.elastic.said,
    "--out-dir": lambda of: (of.whole.folder / "run.json").exists(),
    "--resume": lambda of: "resuming from" in of.resumed.said and rows(of.resumed.folder, "train")[-1]["step"] == 6,
    "--save-every": lambda of: of.whole.saved == ["step-00000004", "step-00000006"],
    "--keep": lambda of: len(of.whole.saved) == 2,
    "--eval-only": lambda of: "step 6: " in of.evaluated.said and of.evaluated.changed_nothing,
    "--log-every": lambda of: [row["step"] for row in rows(of.whole.folder, "train")] == [2, 4, 6],
    "--no-plot": lambda of: not (of.whole.folder / "curves.png").exists(),
    "--tensorboard": lambda of: list((of.whole.folder / "tensorboard").iterdir()),
    "--trace": lambda of: (of.whole.folder / "trace.json").exists(),
}
# What they change is time and memory: tests/test_async_save.py, tests/test_evaluation.py
WITHOUT_A_TRACE = {"--async-save", "--eval-batch"}
SAME = (
    *("--global-batch", 30, "--eval-batch", 20, "--max-steps", 6, "--lr", 1e-9, "--weight-decay", 0.123),
    *("--clip-norm", 0.01, "--precision", "fp64", "--save-every", 2, "--keep", 2, "--async-save", "--log-every", 2),
)
WHOLE = (*SAME, "--micro-batch", 7, "--shares", "3,2,1", "--tensorboard", "--trace", 2)
NODES = (
    *("--batch-per-gpu", 2, "--balance", "auto", "--sync-every", 3, "--outer-momentum", 0.5, "--outer-lr", 0.7),
    *("--compress", "bf16", "--epochs", 1, "--trace", 12),
)
LARGE = ("--global-batch", 30, "--max-steps", 6, "--lr", 1e36, "--seed", 5, "--on-nan", "skip")


def shared_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    cli.add_batch_flags(parser, 8)
    cli.add_link_flags(parser)
    cli.add_training_flags(parser, epochs=1, lr=1.0)
    cli.add_output_flags(parser)
    return {max(action.option_strings, key=len) for action in parser._actions}


def state(run) -> dict:
    """What the last checkpoint has besides the weights."""
    return torch.load(run.folder / "checkpoints" / "latest" / "training_state.pt", weights_only=True)


def momentum_norm(run) -> float:
    """The norm of AdamW's first moments: a mean of the gradients that it was given."""
    moments = [one["exp_avg"].flatten() for one in state(run)["optimizer"]["state"].values()]
    return torch.cat(moments).norm().item()


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request, text, example, tmp_path_factory):  # noqa: F811
    """(script, the flags that this trainer needs)."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "chapter":
        return example, ("--text", ROOT / "docs" / "benchmarks.md")
    if request.param == "pretraining":
        files = ("--config-file", text / "config.json", "--corpus", text / "part.txt", "--cache-dir", text / "cache")
        return BERT, (*files, "--vocab-size", 400, "--sequence-length", 32, "--dropout", 0)
    if request.param == "fine-tuning":
        data = ("--data", save_ner(folder / "data"))
        return FINETUNE, ("--task", "ner", "--model", save_model(folder / "model"), *data, "--warmup-steps", 0)
    if request.param == "mnist":
        return MNIST, ("--dataset", "digits")
    shutil.copytree(MNIST.parent, folder / "my_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "my_ddp").glob("*.py"):
        path.write_text(path.read_text().replace("mnist_ddp", "my_ddp"))
    return folder / "my_ddp" / MNIST.name, ("--dataset", "digits")


def ended(folder, said) -> SimpleNamespace:
    train = rows(folder, "train")
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return SimpleNamespace(folder=folder, said=said, saved=saved, first_loss=train[0]["loss"])


@pytest.fixture(scope="module")
def runs(trainer, tmp_path_factory):
    script, flags = trainer
    folder = tmp_path_factory.mktemp("runs")
    found = SimpleNamespace()
    for name, more in (("whole", WHOLE), ("nodes", NODES), ("large", LARGE)):
        found.__dict__[name] = ended(folder / name, play(script, (2, 1), folder / name, *flags, *more)[0].output)
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    said = play(script, (2, 1), folder / "whole", *flags, *WHOLE, "--resume", "--eval-only")[0].output
    same = (folder / "whole" / "metrics.jsonl").read_bytes() == before
    found.evaluated = SimpleNamespace(said=said, changed_nothing=same)
    shutil.copytree(folder / "whole", folder / "resumed", symlinks=True)
    checkpoint = ("--resume", folder / "resumed" / "checkpoints" / "step-00000004")
    said = play(script, (1, 1), folder / "resumed", *flags, *SAME, *checkpoint)[0].output
    found.resumed = ended(folder / "resumed", said)
    found.elastic = SimpleNamespace(folder=folder / "elastic")
    nodes = nodes_of((2, 1), folder / "elastic", *flags, "--elastic", 1, "--epochs", 10_000)
    under_way = playing(script, nodes, folder)
    wait_until(lambda: rows_so_far(folder / "elastic", "train"), under_way)
    (start,) = json.loads((folder / "elastic" / "run.json").read_text())["starts"]
    psutil.Process(start["ranks"][2]["pid"]).kill()
    wait_until(lambda: rows_so_far(folder / "elastic", "members"), under_way)
    address = (f"127.0.0.1:{nodes[0].flags[nodes[0].flags.index('--master-port') + 1]}",)
    joining = playing(script, [Node(["--join", *address, "--device", "cpu"])], folder)
    wait_until(
        lambda: 3 in [one["original"] for one in rows_so_far(folder / "elastic", "members")[-1]["ranks"]], joining
    )
    (stopped,) = playing(script, [Node(["--stop", *address])], folder).results()
    assert [result.code for result in [*under_way.results(), *joining.results()]] == [75, 75, 75], under_way.said()
    found.elastic.said = stopped.output
    one = nodes_of((1,), folder / "compiled", *flags, "--global-batch", 8, "--max-steps", 1, "--compile")[0]
    one.environ = {"TORCH_LOGS": "dynamo"}  # read when torch is imported
    command = ("python", script, *one.flags)
    found.compiled = lambda: run(*command, timeout=800, **one.environ, PYTHONPATH=str(ROOT)).output
    return found


def test_each_shared_flag_has_a_check():
    assert set(SEEN) | WITHOUT_A_TRACE == shared_flags()


def test_the_trainer_takes_all_shared_flags(trainer):
    assert shared_flags() <= flags_of(trainer[0])


@pytest.mark.parametrize("flag", [pytest.param(flag, marks=[LONG] * (flag == "--compile")) for flag in SEEN])
def test_the_flag_has_its_effect(flag, runs):
    assert SEEN[flag](runs)
