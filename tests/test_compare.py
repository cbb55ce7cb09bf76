"""common.compare: real pairs of runs, right and wrong ones, and the question that it asks of each."""

import json
import shutil

import pytest

from common.compare.run import read_run
from tests.harness import MNIST, Result, play, run
from tests.test_exactness import DIVIDES, altered
from tests.test_first_answer import imported
from tests.trainers import NEXT_STEP

# Four steps an epoch, the last one of 358 samples. Shares of 4,4,1,1 make averages of ranks wrong.
FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 360, "--label-smoothing", 0)
STEPS = ("--max-steps", 8)
UNEVEN = ("--shares", "4,4,1,1")
END = "            run.end_step()\n"


def compare(*arguments: object) -> Result:
    return run("python", "-m", "common.compare", *arguments)


def said(result: Result) -> str:
    """The output as one line: the program wraps its lines."""
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Eight steps of the trainer on one process."""
    folder = tmp_path_factory.mktemp("right")
    play(MNIST, (1,), folder, *FLAGS, *STEPS)
    return folder


def test_layouts_agree(right, tmp_path):
    play(MNIST, (3, 1), tmp_path, *FLAGS, *STEPS, *UNEVEN)
    result = compare(right, tmp_path)
    assert result.code == 0, result.output
    assert "compared 8 steps, 1 to 8: largest difference" in said(result)
    assert "tolerance 1.0e-09 compared 2 evaluations" in said(result)
    assert result.output.endswith("equal     within the tolerance\n")


HIDES = "all ranks had equal shares, which hide a mean over each rank's part: give one run --shares"


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """The same on two nodes with one rank each."""
    folder = tmp_path_factory.mktemp("equal")
    play(MNIST, (1, 1), folder, *FLAGS, *STEPS, "--balance", "auto")
    return folder


def with_shares(run_, folder, *shares):
    """A copy of a run whose intervals had these shares."""
    shutil.copytree(run_, folder)
    rows = [json.loads(line) for line in (run_ / "metrics.jsonl").read_text().splitlines()]
    intervals = [row for row in rows if row["kind"] == "ranks"]
    assert intervals
    for row in intervals:
        row["shares"] = shares
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_shares_which_hide_a_mean_are_said(right, equal, tmp_path):
    result = compare(right, with_shares(equal, tmp_path / "equal", 180, 180))
    assert result.code == 0, result.output
    assert HIDES in said(result)


def test_shares_that_became_unequal_hide_nothing(right, equal, tmp_path):
    result = compare(right, with_shares(equal, tmp_path / "balanced", 240, 120))
    assert result.code == 0, result.output
    assert HIDES not in said(result)


def test_a_balanced_run_is_named_so(right, equal):
    assert "fp64, --balance auto" in said(compare(right, equal))


@pytest.mark.parametrize("factor, names", [
    ("2", "0.5 times (exactly 1/2) A's"),
    pytest.param("worker.world_size", "0.25 times (exactly 1/4, the world size of B) A's",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_a_wrong_scale_is_named(factor, names, right, tmp_path):
    changes = {DIVIDES: f"loss_sum / ({factor} * batch.global_count)"}
    play(altered(tmp_path / "scale_ddp", changes), (3, 1), tmp_path / "run", *FLAGS, *STEPS)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "differs from step 1 on" in said(result)
    assert f"B's loss is {names}, in each of the first 4 steps ask how is the loss scaled?" in said(result)


@pytest.mark.long
def test_an_equal_average_of_the_ranks_is_a_matter_of_the_gradient(right, tmp_path):
    mean = "own = loss_sum / max(1, len(micro.labels)) / worker.world_size; run.backward(own); "
    mean += "run.precision.backpropagated += (loss_sum / batch.global_count - own).item()"
    changes = {f"run.backward({DIVIDES})": mean}
    play(altered(tmp_path / "mean_ddp", changes), (3, 1), tmp_path / "run", *FLAGS, *STEPS, *UNEVEN)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "differs from step 2 on" in said(result)
    assert "about this gradient, because its loss agrees. Are the ranks' means averaged equally" in said(result)
    assert "layout -n 1 -g 1 -i 0 | -n 2 -g 3,1 -i 0" in said(result)


@pytest.mark.long
def test_other_first_weights_are_asked_for_by_their_cause(right, tmp_path):
    changes = {'run.seed("weights")': 'run.seed(f"weights{worker.world_size}")'}
    play(altered(tmp_path / "weights_ddp", changes), (3, 1), tmp_path / "run", *FLAGS, *STEPS)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "what is different before the first update?" in said(result) and "the initial weights" in said(result)


@pytest.mark.parametrize("flags, named", [
    (("--seed", 1), "--seed"), (("--lr", 0.004), "--lr"), (("--global-batch", 36), "global batch"),
])  # fmt: skip
def test_a_setting_that_decides_the_result_is_named_first(flags, named, right, tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, *STEPS, *flags)
    result = compare(right, tmp_path)
    assert result.code == 1, result.output
    assert f"ask first why {named} differ: with other values the result is another one" in said(result)


@pytest.mark.long
def test_fp32_layouts_agree_within_its_tolerance_and_differ_below_it_as_expected(tmp_path):
    flags = (*FLAGS, "--precision", "fp32", *STEPS)
    play(MNIST, (1,), tmp_path / "one", *flags)
    play(MNIST, (3, 1), tmp_path / "four", *flags)
    assert compare(tmp_path / "one", tmp_path / "four").code == 0
    result = compare(tmp_path / "one", tmp_path / "four", "--tolerance", "1e-12")
    assert result.code == 1, result.output
    assert "expected of fp32: layouts add the same numbers in another order" in said(result)


@pytest.mark.long
@pytest.mark.parametrize(
    "precision, rounding, fix", [("fp32", 1e-7, "--precision fp64"), ("fp64", 1e-14, "a smaller --lr")]
)
def test_rounding_that_grows_slowly_is_expected(precision, rounding, fix, tmp_path):
    """How fast it grows depends on torch and the processor: here by a fifth, in float64 by a half in each step."""
    flags = (*FLAGS, "--precision", precision, "--max-steps", 60, "--epochs", 50)
    growth = 1.2 if precision == "fp32" else 1.5
    changes = {END: f"            run.precision.backpropagated *= 1 + {rounding} * {growth}**run.step\n{END}"}
    play(MNIST, (1,), tmp_path / "one", *flags)
    play(altered(tmp_path / "drift_ddp", changes), (1,), tmp_path / "other", *flags)
    result = compare(tmp_path / "one", tmp_path / "other")
    assert result.code == 1, result.output
    assert f"expected of {precision}: the difference is at most" in said(result) and fix in said(result)


def test_a_sudden_difference_in_the_middle_is_not_rounding(right, tmp_path):
    changes = {END: f"            run.precision.backpropagated *= 1 + 1e-6 * (run.step == 2)\n{END}"}
    play(altered(tmp_path / "noise_ddp", changes), (1,), tmp_path / "run", *FLAGS, *STEPS)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "differs from step 3 on" in said(result)
    assert "about what is not in the gradient: the difference is at most 0.0e+00 before step 3" in said(result)


def test_a_difference_at_the_first_step_of_an_epoch_is_told(right, tmp_path):
    same = "            batches.sampler.order_of = lambda epoch: type(batches.sampler).order_of(batches.sampler, 0)\n"
    changes = {NEXT_STEP: same + NEXT_STEP}
    play(altered(tmp_path / "epoch_ddp", changes), (1,), tmp_path / "run", *FLAGS, *STEPS)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "about the end of an epoch: step 5 is the first of the next one" in said(result)


def test_a_run_that_was_resumed_agrees(right, tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, "--max-steps", 3)
    play(MNIST, (3, 1), tmp_path, *FLAGS, *STEPS, "--resume")
    result = compare(right, tmp_path)
    assert result.code == 0, result.output
    assert "resumed after step 3" in said(result) and "compared 8 steps" in said(result)


def test_a_resume_that_loses_the_optimizer_is_told(right, tmp_path):
    play(MNIST, (1,), tmp_path / "run", *FLAGS, "--max-steps", 3)
    changes = {"scheduler=scheduler)": "scheduler=scheduler), optimizer.state.clear()"}
    play(altered(tmp_path / "forgets_ddp", changes), (1,), tmp_path / "run", *FLAGS, *STEPS, "--resume")
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "differs from step 5 on" in said(result)
    assert "what B's resume after step 3 lost" in said(result)


@pytest.mark.parametrize("old, new, asked", [
    ('total["loss"] / count', 'total["loss"] / (count + 1)', "how the ranks' parts of the evaluation are put together"),
    ('"count": int(count)', '"count": int(count) + 3', "which samples are evaluated: 359 in A, 362 in B"),
])  # fmt: skip
def test_an_evaluation_that_differs_alone_is_told(old, new, asked, right, tmp_path):
    play(altered(tmp_path / "eval_ddp", {old: new}), (1,), tmp_path / "run", *FLAGS, *STEPS)
    result = compare(right, tmp_path / "run")
    assert result.code == 1, result.output
    assert "differs in the evaluation after step 4" in said(result) and asked in said(result)


def without(folder, other, *kinds, after=0):
    """A copy of a run without rows of these kinds after a step."""
    shutil.copytree(folder, other, symlinks=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] not in kinds or row["step"] <= after]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return other


def test_a_run_that_lacks_an_evaluation_is_not_called_equal(right, tmp_path):
    result = compare(right, without(right, tmp_path / "run", "eval"))
    assert result.code == 1 and "differs B has no evaluation after step 4" in said(result)


def test_a_run_that_has_ended_early_without_a_summary_is_not_called_equal(right, tmp_path):
    result = compare(without(right, tmp_path / "run", "train", "eval", "ranks", "summary", after=4), right)
    assert result.code == 1 and "differs A ends after step 4 without a summary" in said(result)


def test_a_run_without_a_checkpoint_is_not_called_equal(right, tmp_path):
    shutil.copytree(right, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    result = compare(right, tmp_path / "run")
    assert result.code == 1 and "differs B has no checkpoint" in said(result)


def test_another_learning_rate_in_the_last_step_is_told(right, tmp_path):
    other = without(right, tmp_path / "run")
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"lr": row["lr"] * 2} if row["kind"] == "train" and row["step"] == 8 else row for row in rows]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compare(right, other)
    assert result.code == 1 and "differs in the learning rate in step 8: " in said(result)


# --- files ---------------------------------------------------------------------------------------------------------


def write(path, *rows):
    path.write_text("".join(json.dumps({"kind": "train", **row}) + "\n" for row in rows))
    return path


def test_a_metrics_file_alone_is_enough(right, tmp_path):
    shutil.copy(right / "metrics.jsonl", tmp_path / "other.jsonl")
    result = compare(right / "metrics.jsonl", tmp_path / "other.jsonl")
    assert result.code == 0, result.output
    assert "8 steps, no run.json" in said(result)


def test_rows_without_a_gradient_norm_are_compared_without_it(tmp_path):
    files = [
        write(tmp_path / f"{name}.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": loss})
        for name, loss in (("a", 1.0), ("b", 1.5))
    ]
    result = compare(*files)
    assert result.code == 1
    assert "about this gradient" in said(result) and "None" not in result.output


def test_the_last_row_of_a_step_counts(tmp_path):
    first = write(tmp_path / "a.jsonl", {"step": 1, "loss": 2.0})
    second = write(tmp_path / "b.jsonl", {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 2.0})
    assert compare(first, second).code == 0


def test_a_loss_that_is_not_finite_differs_from_one_that_is(tmp_path):
    first = write(tmp_path / "a.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0})
    second = write(tmp_path / "b.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": None})
    result = compare(first, second)
    assert result.code == 1, result.output
    assert "largest difference inf at step 2" in said(result)


def test_runs_without_their_first_steps_are_not_judged_by_them(tmp_path):
    first, second = (write(tmp_path / f"{loss}.jsonl", {"step": 50, "loss": loss}) for loss in (2.0, 1.0))
    assert "are the steps before 50 not in both?" in said(compare(first, second))


@pytest.mark.parametrize("text, message", [
    (None, "there is no such file or folder: name the --out-dir of a run"),
    ("", "has no losses of training steps"),
    ("{\n", "line 1 is not JSON: correct that line, or name a metrics.jsonl"),
    ("3\n", "line 1 is no row of a run"),
    ('{"kind": "eval", "step": 1, "loss": 2.0}\n', "has no losses of training steps"),
    ('{"kind": "train", "step": 7, "loss": 2.0}\n', "no step in common"),
    (b"\xff\xfe\n", "is not text"),
])  # fmt: skip
def test_a_mistake_is_answered_in_one_line_with_code_2(text, message, tmp_path):
    first = write(tmp_path / "a.jsonl", {"step": 1, "loss": 2.0})
    second = tmp_path / "b.jsonl"
    if text is not None:
        second.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = compare(first, second)
    assert result.code == 2, result.output
    assert message in result.output and len(result.output.splitlines()) == 1


def test_a_run_beside_itself_is_refused(tmp_path):
    metrics = write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    result = compare(metrics, tmp_path)
    assert result.code == 2 and "are the same run: name two" in result.output


@pytest.mark.parametrize("text", ["{", '{"starts": [3]}', '{"starts": [{"flags": {}}]}', "[]"])
def test_a_run_json_of_something_else_is_named(text, tmp_path):
    metrics = write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    (tmp_path / "run.json").write_text(text)
    result = compare(metrics, tmp_path / "other.jsonl")
    assert result.code == 2, result.output
    assert "run.json is not what a run writes" in result.output


def test_it_imports_nothing_heavy(tmp_path):
    metrics = write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    again = write(tmp_path / "again.jsonl", {"step": 1, "loss": 2.0})
    result = run("python", "-X", "importtime", "-m", "common.compare", metrics, again)
    assert result.code == 0, result.output
    assert not imported(result.output) & {"torch", "numpy", "matplotlib"}


@pytest.mark.parametrize("state", ["[1]", "3", "[" * 100_000, "\xff"])
def test_a_state_that_no_run_has_written_is_none(state, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "state.json").write_text(state, encoding="latin-1")
    assert read_run(tmp_path).state == {}
