"""Habits of people who train otherwise, each in a trainer that is right but for it: nothing goes wrong in silence."""

import re

import pytest

from tests.harness import losses, nodes_of, playing, rows, wait_until
from tests.trainers import NEXT_STEP, altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--max-steps", 12)
STEP = "            run.optimizer_step(optimizer, clip_norm=args.clip_norm)\n"
ZERO = "            optimizer.zero_grad()\n"
MICRO = "            for micro, is_last in batch.micro_batches():  # at least one: without images, an empty one\n"
BACKWARD = "run.backward(loss_sum / batch.global_count)"
DONE = "run.is_done or "
WRAP = "        while True:\n"
RESUME = "        run.resume(net, optimizer=optimizer, scheduler=scheduler)\n"
BEFORE_WRAP = "        model = run.wrap("
EVALUATE = "                run.log_evaluation(**evaluate(net, test_loader, run))\n"
ALONE = """                found = evaluate(net, test_loader, run)
                if worker.is_main:
                    run.log_evaluation(**found)
"""
ROLLED = "test_set.labels.roll(worker.rank)"


def run_of(changes, folder, *flags, gpus=(1, 1)):
    """Both nodes of a trainer with these changes."""
    return playing(altered(folder / "habit_ddp", changes), nodes_of(gpus, folder / "run", *FLAGS, *flags), folder)


REFUSED = [
    ({ZERO: ""}, "the gradients of the step before are still there, .*: call optimizer.zero_grad"),
    ({BACKWARD: "(loss_sum / batch.global_count).backward()"}, "this step has had no run.backward"),
    ({STEP: f"            optimizer = AdamW(net.parameters())\n{STEP}"}, "AdamW changes .*, but run.resume.. was not"),
    (
        {ZERO: f"            AdamW(net.classifier.parameters()).step()\n{ZERO}"},
        "AdamW changes .*, but run.resume.. was not given",
    ),
    ({"optimizer=optimizer, scheduler": "scheduler"}, "AdamW changes .*, but run.resume.. was not given"),
    (
        {BACKWARD: f"{BACKWARD}\n                    run.backward(net.features[0].weight.sum())"},
        "the gradients of this step would be summed over the ranks twice: add up the losses",
    ),
    ({BEFORE_WRAP: f"        run.backward(net.features[0].bias.sum())\n{BEFORE_WRAP}"}, "backward.. before run.wrap"),
    ({WRAP: f"        run.wrap(net, compute_loss)\n{WRAP}"}, "run.wrap.. twice: a run has one model"),
    ({"untrained_loss=math": "find_unused_parameters=True, untrained_loss=math"}, "has no find_unused_parameters"),
    ({NEXT_STEP: f"            net.features.requires_grad_(run.step < 5)\n{NEXT_STEP}"}, "was frozen after wrap"),
    (
        {"(test_set)\n": f"((setattr(test_set, 'labels', {ROLLED}), test_set)[1])\n"},
        "held-out set 1 is .* on rank 1, but .* on rank 0: every rank must read the same data",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_a_habit_that_would_go_wrong_is_refused(changes, said, tmp_path):
    for result in run_of(changes, tmp_path).results():
        assert result.code == 2 and "Traceback" not in result.output, result.output
    assert re.search(f"error: .*{said}", (tmp_path / "node-0-0.log").read_text())


@pytest.mark.parametrize(("changes", "said"), [
    ({BACKWARD: f"len(micro.labels) and {BACKWARD}"}, "no backward has run within this .*: .* also of an empty one"),
    ({MICRO: f"{MICRO}                if not len(micro.labels):\n                    continue\n"},
     "this step has had no run.backward.loss.: .* for an empty micro-batch too"),
])  # fmt: skip
def test_an_empty_micro_batch_that_a_loop_leaves_out_is_named(changes, said, tmp_path):
    for result in run_of(changes, tmp_path, "--shares", "1,0").results():
        assert result.code == 2 and "Traceback" not in result.output, result.output
    assert re.search(f"error: {said}", (tmp_path / "node-1-1.log").read_text())


EVALUATION = "evaluate(net, test_loader, run)"


@pytest.mark.parametrize(("change", "said"), [
    ({EVALUATION: "evaluate(net, [test_set.get_batch(range(len(test_set)))], run)"},
     r"this evaluation counts 718 samples, those of the held-out set 2 times: read run.evaluation_loader"),
    ({'total["loss"] / count,': 'total["loss"] / count**2,'},
     r"the held-out loss is \S+, but that of the training \S+: is it a mean already, which was divided by the count"),
], ids=["every rank reads the whole set", "a mean is divided again"])  # fmt: skip
def test_an_evaluation_that_cannot_be_right_is_said_once(change, said, tmp_path):
    first, _ = run_of(change, tmp_path, "--max-steps", 46).results()
    assert first.code == 0 and "step 46: loss" in first.output, first.output
    assert len(re.findall(f"warning: {said}", first.output)) == first.output.count("warning") == 1, first.output


def test_a_loop_that_is_left_early_has_written_and_saved_all_of_its_steps(tmp_path):
    """Also where the step's numbers were not exchanged yet."""
    for result in run_of({DONE: "run.step == 5 or run.is_done or "}, tmp_path).results():
        assert result.code == 0, result.output
    assert len(losses(tmp_path / "run")) == 5
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000005"
    assert rows(tmp_path / "run", "summary")[0]["step"] == 5


def test_a_buffer_that_changes_at_the_end_of_a_loop_that_is_left_early_is_not_saved(tmp_path):
    """No backward follows, after which the guards would look."""
    changes = {RESUME: f"        net.register_buffer('mark', torch.zeros(1))\n{RESUME}"}
    changes |= {
        ZERO: f"            run.step == 8 and net.mark.add_(1)\n{ZERO}",
        DONE: "run.step == 9 or run.is_done or ",
    }
    for result in run_of(changes, tmp_path).results():
        assert result.code == 2 and "training changes the buffer mark" in result.output, result.output
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_rank_that_draws_for_longer_than_the_others_would_wait_ends_the_run_well(tmp_path):
    slow = "        import common.join.process_group as groups\n        import common.run.run as runs\n\n"
    slow += "        groups.LEAVE_SECONDS = 0.5\n"
    slow += "        summary = runs.StepLog.summary\n"
    slow += "        runs.StepLog.summary = lambda log, *of, **more: (\n"
    slow += "            __import__('time').sleep(2 * worker.is_main), summary(log, *of, **more)\n        )\n"
    for result in run_of({WRAP: slow + WRAP}, tmp_path).results():
        assert result.code == 0 and "left the training loop" not in result.output, result.output


def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(tmp_path):
    spoilt = f"{STEP}            if run.step == 11:\n                next(net.parameters()).data.fill_(math.inf)\n"
    for result in run_of({STEP: spoilt}, tmp_path).results():
        assert result.code == 1 and "Traceback" not in result.output, result.output
    said = "error: after step 12, features.0.weight holds NaN or infinity, and is not saved"
    assert said in (tmp_path / "node-0-0.log").read_text()
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_call_that_one_rank_alone_makes_says_who_must_make_it(tmp_path):
    soon = f"        import common.run.run as runs\n\n        runs.CALL_SECONDS = 1.0\n{WRAP}"
    alone = {EVALUATE: ALONE, WRAP: soon}
    run = run_of(alone, tmp_path)
    run.wait_for("waiting for all ranks, each of which must call run.log_evaluation()")


def test_a_call_that_one_rank_alone_does_not_make_is_named_by_each_that_waits(tmp_path):
    soon = f"        import common.run.run as runs\n\n        runs.CALL_SECONDS = 1.0\n{WRAP}"
    stays = ALONE.replace(
        "if worker.is_main:",
        "if worker.is_main:\n                    __import__('time').sleep(3600)\n                else:",
    )
    run = run_of({EVALUATE: stays, WRAP: soon}, tmp_path, gpus=(3,))
    for rank in (1, 2):
        wait_until(
            lambda rank=rank: re.search(rf"\[{rank} \S+\] waiting for all ranks, .* run.log_eval", run.said()), run
        )


def test_what_a_step_draws_from_python_and_numpy_is_the_same_again(tmp_path):
    draws = "__import__('random').random() * __import__('numpy').random.rand()"
    changes = {BACKWARD: f"run.backward(loss_sum / batch.global_count * {draws})"}
    trainer = altered(tmp_path / "habit_ddp", changes)
    for name in ("first", "again"):
        playing(trainer, nodes_of((1,), tmp_path / name, *FLAGS), tmp_path).results()
    assert losses(tmp_path / "first") == losses(tmp_path / "again")
