"""Nothing is lost: a run killed in the middle of an epoch ends as if it had not been."""

import json
import re
import shutil
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from common.errors import UserError
from common.launch import cli, values
from common.record import checkpoint
from common.record.metrics import drop_rows_after, last_rows, read_metrics
from tests.harness import MNIST, largest_difference, losses, nodes_of, play, playing, rows, wait_until, weights
from tests.trainers import NEXT_STEP, altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--epochs", 4, "--global-batch", 110, "--save-every", 5)
STEPS = 4 * 14


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    play(MNIST, (2, 1), folder, *FLAGS)
    return folder


def endless(folder: Path, steps: int) -> Path:
    """The script of a trainer that does so many steps and then waits to be killed; it keeps the run's folder locked."""
    waits = f"            while run.step >= {steps}:\n                __import__('time').sleep(1)\n"
    return altered(folder / f"endless_{steps}_ddp", {NEXT_STEP: waits + NEXT_STEP})


IMPATIENT = """import torch
import common.record.lock as locking
locking.SECONDS = 0.1  # for a run that was just killed, which none was here
"""


def kill_in_the_middle(folder, gpus, after_step: int) -> None:
    """Start a run and end all its processes with SIGKILL once a checkpoint of `after_step` or later is there, before
    it has done 15 steps more."""
    run = playing(endless(folder, after_step + 15), nodes_of(gpus, folder, *FLAGS, "--resume"), folder)
    wait_until(lambda: [path for path in folder.glob("checkpoints/step-*") if int(path.name[5:]) >= after_step], run)
    run.kill()


def test_resumed_on_another_layout_it_ends_with_the_same_weights(uninterrupted, tmp_path):
    kill_in_the_middle(tmp_path, (3,), after_step=5)
    play(MNIST, (1, 1), tmp_path, *FLAGS, "--resume")
    assert largest_difference(weights(tmp_path), weights(uninterrupted)) < 1e-10
    assert len(losses(tmp_path)) == STEPS
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), abs=1e-12)


def test_resumed_twice_on_the_same_layout_it_ends_bit_for_bit_the_same(uninterrupted, tmp_path):
    kill_in_the_middle(tmp_path, (2, 1), after_step=5)
    kill_in_the_middle(tmp_path, (2, 1), after_step=21)  # later than the first one can have come
    play(MNIST, (2, 1), tmp_path, *FLAGS, "--resume")
    assert largest_difference(weights(tmp_path), weights(uninterrupted)) == 0.0
    assert losses(tmp_path) == losses(uninterrupted)
    assert [row["step"] for row in rows(tmp_path, "eval")] == list(range(14, STEPS + 1, 14))


def test_a_checkpoint_cut_in_half_is_named_and_passed_over(uninterrupted, tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, "--max-steps", 20)
    newest = tmp_path / "checkpoints" / "step-00000020"
    state = newest / checkpoint.TRAINING_STATE
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    (node,) = play(MNIST, (1,), tmp_path, *FLAGS, "--resume")
    assert f"{newest} is damaged (the checksum of training_state.pt is wrong): using the one before" in node.output
    assert re.search(r"resuming from .*step-00000015", node.output)
    assert largest_difference(weights(tmp_path), weights(uninterrupted)) < 1e-10


def test_a_run_without_checkpoints_starts_anew_under_resume_auto(tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, "--max-steps", 2, "--resume", "auto")
    assert len(losses(tmp_path)) == 2


def test_only_as_many_checkpoints_as_keep_stay(uninterrupted):
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000050", "step-00000055", "step-00000056"]


# The ranks exchange their clocks after the first step, and a checkpoint is due after the second.
SLOW = {NEXT_STEP: f"            __import__('time').sleep(0.2 if run.step == 0 else 0)\n{NEXT_STEP}"}


@pytest.mark.long
def test_resumed_from_a_checkpoint_that_the_clock_asked_for_in_mid_epoch_it_ends_bit_for_bit_the_same(tmp_path):
    flags = (*FLAGS[: FLAGS.index("--save-every")], "--max-steps", 16)
    slow = altered(tmp_path / "slow_ddp", SLOW)
    play(slow, (3, 1), tmp_path / "whole", *flags, "--save-every", "0.001m", "--keep", 1000)
    steps = [int(path.name[5:]) for path in (tmp_path / "whole" / "checkpoints").glob("step-*")]
    middle = max([step for step in steps if step < 14], default=0)
    assert middle, steps
    saved = tmp_path / "whole" / "checkpoints" / f"step-{middle:08d}"
    play(slow, (3, 1), tmp_path / "resumed", *flags, "--save-every", "1h", "--resume", saved)
    assert largest_difference(weights(tmp_path / "resumed"), weights(tmp_path / "whole")) == 0.0
    assert [row["step"] for row in rows(tmp_path / "resumed", "train")] == list(range(middle + 1, 17))


def test_by_default_a_checkpoint_is_due_every_fifteen_minutes():
    parser = cli.parser("")
    cli.add_output_flags(parser)
    every = parser.parse_args([]).save_every
    assert not every.is_due(500, unsaved_seconds=15 * 60 - 1)
    assert every.is_due(501, unsaved_seconds=15 * 60)


def test_steps_between_checkpoints_do_not_depend_on_the_clock(tmp_path):
    play(MNIST, (2,), tmp_path, *FLAGS, "--max-steps", 13, "--save-every", 4, "--keep", 1000)
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == [4, 8, 12, 13]


@pytest.mark.parametrize("value", ["0", "0m", "-1h", "10s", "m", "1.5", "infh", "nanm"])
def test_a_save_every_that_is_neither_steps_nor_time_is_refused(value):
    with pytest.raises(ArgumentTypeError, match=f"'{value}' is not allowed: give a number of steps, minutes or hours"):
        values.save_every(value)


def test_save_every_takes_steps_minutes_and_hours():
    assert values.save_every("500").steps == 500
    assert [values.save_every(text).seconds for text in ("10m", "0.5h")] == [600, 1800]


def refusal(tmp_path, *flags) -> str:
    (node,) = playing(MNIST, nodes_of((1,), tmp_path, *flags), tmp_path).results()
    assert node.code == 2, node.output
    assert "Traceback" not in node.output
    return node.output


@pytest.mark.parametrize("flags, message", [
    (("--dataset", "digits", "--global-batch", 100), "written with --global-batch 110, but this run has 100"),
    (("--dataset", "digits", "--global-batch", 110, "--seed", 1), "written with --seed 0, but this run has 1"),
    (("--dataset", "digits", "--global-batch", 110, "--epochs", 2), "written with --epochs 4, but this run has 2"),
    (("--dataset", "digits", "--global-batch", 110, "--clip-norm", 1), "with --clip-norm inf, but this run has 1.0"),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(flags, message, uninterrupted, tmp_path):
    output = refusal(tmp_path, "--epochs", 4, *flags, "--resume", uninterrupted)
    assert message in output
    assert "--resume" in output


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    assert "there is no such directory" in refusal(tmp_path, *FLAGS, "--resume", tmp_path / "nowhere")
    assert "there is no checkpoint in it" in refusal(tmp_path, *FLAGS, "--resume", tmp_path)


def test_eval_only_repeats_the_last_evaluation_and_writes_nothing(uninterrupted, tmp_path):
    before = (uninterrupted / "metrics.jsonl").read_text()
    (node,) = playing(MNIST, nodes_of((3,), uninterrupted, *FLAGS, "--resume", "--eval-only"), tmp_path).results()
    assert node.code == 0, node.output
    assert f"accuracy {rows(uninterrupted, 'eval')[-1]['accuracy']:.2%}, count 359" in node.output
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_a_run_that_went_back_goes_on_from_there_but_one_that_only_evaluates_does_not(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run", symlinks=True)
    latest, earlier = tmp_path / "run" / "checkpoints" / "latest", tmp_path / "run" / "checkpoints" / "step-00000055"
    before = latest.resolve().name
    play(MNIST, (1,), tmp_path / "run", *FLAGS, "--resume", earlier, "--eval-only")
    assert latest.resolve().name == before
    play(MNIST, (1,), tmp_path / "run", *FLAGS, "--resume", earlier, "--max-steps", 55)  # ends before any save
    assert latest.resolve().name == earlier.name


def test_a_line_of_the_metrics_that_is_no_row_is_named_and_one_cut_off_at_the_end_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert read_metrics(file) == [{"kind": "train", "step": 1}]
    file.write_text('{"kind": "tra\n{"kind": "train", "step": 1}\n')
    with pytest.raises(UserError, match="line 1 is not JSON"):
        read_metrics(file)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 9])
def test_rows_of_later_steps_are_dropped_whatever_follows_them(step, tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [
        ("train", 1),
        ("ranks", 1),
        ("eval", 1),
        ("shares", 2),
        ("train", 2),
        ("members", 1),
        ("eval", 3),
        ("train", 3),
        ("note", None),
    ]
    rows = [{"kind": kind, "step": at} for kind, at in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    drop_rows_after(file, step)
    assert read_metrics(file) == [row for row in rows if row["step"] is None or row["step"] <= step]
    wanted = {row["kind"]: row for row in read_metrics(file) if row["kind"] in ("train", "ranks", "eval")}
    assert wanted.items() <= last_rows(file).items()


def test_the_last_evaluation_is_found_however_many_steps_follow_it(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"kind": "eval", "step": 1}, {"kind": "eval", "step": 2}, {"kind": "members", "step": 2, "cause": "eval"}]
    rows += [{"kind": kind, "step": step} for step in (3, 4) for kind in ("train", "ranks")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_rows(file) == {"eval": rows[1], "train": rows[-2], "ranks": rows[-1]}
    assert list(last_rows(file)) == ["eval", "train", "ranks"]


def test_resuming_from_latest_by_its_path_keeps_latest_a_link_to_a_step(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run", symlinks=True)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    play(MNIST, (1,), tmp_path / "run", *FLAGS, "--resume", latest)
    assert latest.resolve().name == f"step-{STEPS:08d}"


def test_an_evaluation_needs_no_flags(uninterrupted, tmp_path):
    (node,) = play(MNIST, (1,), tmp_path, "--dataset", "digits", "--resume", uninterrupted, "--eval-only")
    assert "accuracy" in node.output


def test_another_precision_than_that_of_the_checkpoint_is_said(tmp_path):
    play(MNIST, (1,), tmp_path, "--dataset", "digits", "--max-steps", 1, "--precision", "fp64")
    (node,) = play(MNIST, (1,), tmp_path, "--dataset", "digits", "--max-steps", 2, "--resume")
    assert "step-00000001, which was trained in fp64, in fp32" in node.output


def test_metrics_that_cannot_be_read_are_named_on_every_node(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run", symlinks=True)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("no row\n")
    nodes = playing(MNIST, nodes_of((1, 1), tmp_path / "run", *FLAGS, "--resume"), tmp_path).results()
    for node in nodes:
        assert node.code == 2 and "is not JSON: correct that line" in node.output, node.output


@pytest.fixture(scope="module")
def beside_another(tmp_path_factory):
    """(folder, checkpoint, result) of a second run in a folder, from a checkpoint that is not the latest one."""
    folder = tmp_path_factory.mktemp("beside-another")
    nodes = nodes_of((1,), folder, *FLAGS, "--keep", 1000)
    first = playing(endless(tmp_path_factory.mktemp("endless"), 40), nodes, folder)
    wait_until(lambda: checkpoint.latest_name(folder / "checkpoints") == "step-00000040", first)
    saved = sorted(folder.glob("checkpoints/step-*"))[0]
    impatient = altered(tmp_path_factory.mktemp("impatient") / "impatient_ddp", {"import torch\n": IMPATIENT})
    (result,) = playing(impatient, nodes_of((1,), folder, *FLAGS, "--resume", saved), folder).results()
    first.kill()
    return folder, saved, result


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_writes(beside_another):
    _, _, result = beside_another
    assert result.code == 2
    assert "another run is writing there at this moment" in result.output


def test_a_second_run_that_is_refused_leaves_latest_as_it_is(beside_another):
    folder, saved, _ = beside_another
    assert saved.name == "step-00000005"
    assert checkpoint.latest_name(folder / "checkpoints") == "step-00000040"
