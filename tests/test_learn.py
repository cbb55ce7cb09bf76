"""The exercises: each mistake is found, each solution passes, and the runner keeps score."""

import json
import shutil

import pytest

from mnist_ddp.exercises import learn
from tests.harness import ROOT, run

LEARN = ROOT / "mnist_ddp" / "exercises" / "learn.py"
SAID = {  # what it says of each mistake
    "01_mean_of_means": "the loss of step 1 is 2.3",
    "02_forgotten_set_epoch": "two epochs begin with the same samples",
    "03_forward_outside_no_sync": "on 3+1 ranks, rank",
    "04_padding_in_evaluation": "there are 359 images",
    "05_local_rank_0": "the checkpoint is written by 2 ranks",
    "06_device_of_a_rank": "the GPUs that are taken: cuda:0 of node 0, cuda:0 of node 0, cuda:1 of node 0",
    "07_a_collective_that_one_rank_skips": "wait for ever: rank 0 in line 18, rank 1 in line 24",
    "08_batch_norm": "the loss of step 1 is 2.",
    "09_unseeded_augmentation": "the loss of step 1 is 2.",
    "10_checkpoint_without_the_optimizer": "the loss of step 4 is",
}


JUDGE = """
import json
from pathlib import Path
from mnist_ddp.exercises import learn
learn.prepare()
{programs}
Path("said.json").write_text(json.dumps({{name: learn.judge(one, path) for name, one, path in programs}}))
"""
MISTAKES = "programs = [(one.name, one, learn.HERE / f'{one.name}.py') for one in learn.EXERCISES]"
SOLUTIONS = """
programs = [(one.name, one, learn.HERE / 'solutions' / f'{one.name}.py') for one in learn.EXERCISES]
_, exercise, solution = programs[8]
for seed in ("SEED + sample", "SEED + epoch + sample"):
    path = Path(f"{seed}.py")
    path.write_text(solution.read_text().replace("SEED + 1_000_003 * epoch + sample", seed))
    programs.append((seed, exercise, path))
"""


def judged(folder, programs):
    """What the runner says of each program; None where nothing is wrong."""
    result = run("python", "-c", JUDGE.format(programs=programs), cwd=folder, PYTHONPATH=str(ROOT))
    assert result.code == 0, result.output
    return json.loads((folder / "said.json").read_text())


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("mistakes"), MISTAKES)


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("solutions"), SOLUTIONS)


@pytest.mark.parametrize("exercise", learn.EXERCISES, ids=lambda one: one.name)
def test_each_mistake_is_found(exercise, mistakes):
    assert SAID[exercise.name] in mistakes[exercise.name]


@pytest.mark.long
@pytest.mark.parametrize("seed, different", [("SEED + sample", 4), ("SEED + epoch + sample", 5)])
def test_noise_that_images_or_epochs_share_is_no_solution(seed, different, solutions):
    assert f"must get 8 different noises, and get {different}" in solutions[seed]


@pytest.mark.long
@pytest.mark.parametrize("exercise", learn.EXERCISES, ids=lambda one: one.name)
def test_each_solution_passes(exercise, solutions):
    assert solutions[exercise.name] is None


def test_the_folders_hold_the_same_ten():
    names = [f"{one.name}.py" for one in learn.EXERCISES]
    assert sorted(path.name for path in LEARN.parent.glob("[01]*.py")) == names
    assert sorted(path.name for path in (LEARN.parent / "solutions").glob("[01]*.py")) == names


@pytest.mark.long
def test_it_goes_on_with_the_next_one_and_keeps_hints_and_score(tmp_path):
    folder = tmp_path / "exercises"
    shutil.copytree(LEARN.parent, folder)
    start = ("python", folder / "learn.py")
    first, second = (run(*start, "--hint", cwd=tmp_path).output for _ in range(2))
    wrong = run(*start, cwd=tmp_path)
    assert wrong.code == 1 and "the loss of step 1 is 2.3" in wrong.output and "--hint gives a hint" in wrong.output
    assert "hint 1 of 3" in first and "hint 2 of 3" in second and first != second
    shutil.copy(folder / "solutions" / "01_mean_of_means.py", folder)
    solved = run(*start, cwd=tmp_path).output
    assert "solved, 1 of 10. Each rank sums, and divides by the samples of all ranks." in solved, solved
    assert "02_forgotten_set_epoch.py, hint 1" in run(*start, "--hint", cwd=tmp_path).output
    said = run(*start, "--list", cwd=tmp_path).output
    assert "solved  01_mean_of_means  (2 hints)" in said and "1 of 10 solved" in said, said
