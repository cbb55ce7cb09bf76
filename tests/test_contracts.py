"""`make lint` holds the imports between packages: a forbidden one fails it."""

import shutil

import pytest

from tests.harness import ROOT, run

LINT = ROOT / ".venv" / "bin" / "lint-imports"


@pytest.mark.parametrize("file, line, broken", [
    ("common/uneven/seeding.py", "import common.launch.cli", "The packages of common"),
    ("common/uneven/sums.py", "import socket", "The method works in anyone's script"),
    ("common/launch/gpus.py", "import torch", "torch stays out of what answers --help"),
    ("mnist_ddp/model.py", "import bert_ddp.model.optimizer", "Trainers stand on common"),
    ("bert_ddp/finetune/train.py", "import bert_ddp.cpu.packing", "The packages of bert_ddp"),
])  # fmt: skip
def test_a_forbidden_import_fails_the_contracts(file, line, broken, tmp_path):
    for package in ("common", "mnist_ddp", "bert_ddp"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = run(LINT, "--no-cache", cwd=tmp_path)
    said = " ".join(result.output.split())
    assert result.code == 1, result.output
    assert broken in said.partition("Broken contracts")[2], said
