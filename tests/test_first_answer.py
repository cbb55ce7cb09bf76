"""--help and layout errors are answered before torch is imported."""

import pytest

from tests.harness import MNIST, ROOT, run

TRAINERS = sorted(ROOT.glob("*_ddp/*-*.py"))


def imported(output: str) -> set[str]:
    """Top-level packages in the output of `python -X importtime`."""
    lines = [line for line in output.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda path: path.name)
def test_help_imports_nothing_heavy(trainer):
    result = run("python", "-X", "importtime", trainer, "--help")
    assert result.code == 0
    assert "usage:" in result.output
    assert not imported(result.output) & {"torch", "numpy", "transformers", "datasets", "sklearn", "matplotlib"}


@pytest.mark.parametrize("flags, message", [
    ("-n 2 -g 8,2 -i 2", "-i/--node-rank is 2, but -g 8,2 names nodes 0 and 1: use 0 or 1"),
    ("-n 2 -g 8,2", "-i/--node-rank is missing"),
    ("-n 2 -g 8 -i 0", "-g/--gpus is 8, which names 1 node, but -n is 2"),
    ("-n 2 -g 8,2 -i 1", "--master-addr is missing: node 1 must know where node 0 is"),
    ("-n 2 -i 0", "-g/--gpus is missing"),
    ("-n 0 -g 8 -i 0", "argument -n/--nodes: '0' is not allowed: give a whole number of 1 or more"),
    ("-n 2 -g 8,0 -i 0", "argument -g/--gpus: '8,0' is not allowed"),
    ("-n 2 -g 8;2 -i 0", "argument -g/--gpus: '8;2' is not allowed"),
    ("-i -1", "argument -i/--node-rank: '-1' is not allowed"),
    ("-n 1 -g 1 --device cuda", "--device is cuda, but this node has no visible GPU"),
    ("--global-batch 0", "argument --global-batch: '0' is not allowed: give a whole number of 1 or more"),
    ("--global-batch 8 --batch-per-gpu 8", "not allowed with argument"),
    ("--global-batch 256 --batch-per-gpu 8", "not allowed with argument"),
    ("--dataset cifar", "invalid choice: 'cifar'"),
    ("-g 2 --shares 1,2,3 --device cpu", "--shares has 3 numbers, but the job has 2 ranks"),
    ("-g 2 --micro-batch 16x2 --device cpu", "--micro-batch has 16 numbers, but the job has 2 ranks"),
    ("--eval-only", "--eval-only has nothing to evaluate"),
    ("--step 3", "unrecognized arguments: --step 3: for --step write --max-steps"),
    ("--global_batch 8", "for --global_batch write --global-batch; see --help"),
    ("--batch-size=64", "for --batch-size write --global-batch, over all ranks, or --batch-per-gpu; see --help"),
    ("--num_train_epochs 3 --fp16", "for --num_train_epochs write --epochs; for --fp16 write --precision fp16"),
    ("--momentum 0.9", "unrecognized arguments: --momentum 0.9; see --help"),
    ("-- --lr 0.1", "unrecognized arguments: -- --lr 0.1; see --help"),
    ("--frobnicate 3", "unrecognized arguments: --frobnicate 3; see --help"),
])  # fmt: skip
def test_a_wrong_flag_is_answered_in_one_line_with_code_2(flags, message):
    result = run("python", "-X", "importtime", MNIST, *flags.split(), CUDA_VISIBLE_DEVICES="")
    said = [line for line in result.output.splitlines() if not line.startswith("import time:")]
    assert result.code == 2
    assert len(said) == 1, said
    assert message in said[0]
    assert not imported(result.output) & {"torch", "numpy"}
