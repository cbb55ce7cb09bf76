"""One rank goes wrong alone: all ranks agree what to do in the same step, and say which rank it was."""

import math

import pytest

from tests.harness import MNIST, largest_difference, losses, nodes_of, play, playing, rows, weights
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--max-steps", 12, "--log-every", 1)
BACKWARD = "                    run.backward("
NAN = "                    if run.step in {steps} and worker.rank == worker.world_size - 1:\n"
# The gradient of the second one is finite.
NAN += "                        loss_sum = loss_sum * math.nan if run.step == 5 else loss_sum + math.inf\n"
RESUME = "        run.resume(net, optimizer=optimizer, scheduler=scheduler)\n"
UPDATE = "            scheduler.step()\n"
DAMAGE = "            if run.step == 4 and worker.rank == 1:\n"
DAMAGE += "                next(net.parameters()).data.view(-1)[0] += 1e-9\n"

ODD = """class Odd:
    def state_dict(self):
        return {"best": math.nan, "worst": -math.inf}

    def load_state_dict(self, state):
        pass


"""


def not_finite(folder, steps):
    """The MNIST trainer whose last rank has a loss that is not finite in these steps, which count from 0."""
    return altered(folder, {BACKWARD: NAN.format(steps=steps) + BACKWARD})


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_and_names_it(tmp_path):
    nodes = nodes_of((2, 1), tmp_path / "run", *FLAGS)
    results = playing(not_finite(tmp_path / "bad_ddp", (5,)), nodes, tmp_path).results()
    assert [result.code for result in results] == [1, 1]
    assert "step 6: the loss of rank 2 is not finite" in results[0].output
    assert "error: the loss of step 6 is nan" in results[0].output


def test_a_step_that_is_skipped_changes_nothing_on_any_layout(tmp_path):
    bad = not_finite(tmp_path / "bad_ddp", (5, 6))
    said = [
        play(bad, gpus, tmp_path / name, *FLAGS, "--on-nan", "skip")[0].output
        for name, gpus in (("one", (1,)), ("uneven", (2, 1)))
    ]
    assert "step 6: the loss of rank 2 is not finite: this step changes no weight (--on-nan skip)" in said[1]
    one, uneven = (losses(tmp_path / name) for name in ("one", "uneven"))
    assert one[5] is one[6] is None
    assert [loss for loss in one if loss] == pytest.approx([loss for loss in uneven if loss], abs=1e-12)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "uneven")) < 1e-12
    assert math.isfinite(rows(tmp_path / "one", "eval")[-1]["loss"])


def test_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    nodes = nodes_of((2, 1), tmp_path / "run", *FLAGS, "--on-nan", "skip")
    results = playing(not_finite(tmp_path / "bad_ddp", "range(1, 100)"), nodes, tmp_path).results()
    assert [result.code for result in results] == [1, 1]
    assert "the gradient was not finite in 11 steps in a row (--on-nan skip)" in results[0].output


def test_weights_that_differ_on_one_rank_are_said_at_the_next_checkpoint(tmp_path):
    damaged = altered(tmp_path / "damaged_ddp", {UPDATE: DAMAGE + UPDATE})
    said = play(damaged, (2, 1), tmp_path / "run", *FLAGS)[0].output
    assert "warning: after step 12, rank 1 has not the same weights as the other ranks, bit by bit" in said


@pytest.mark.parametrize("alone, what", [
    ("net.mark.data.add_(1)", "buffers"),  # which does not count as a write
    ("next(net.parameters()).data.mul_(0.99)", "weights"),
    ("optimizer.state_dict()['state'][0]['step'].add_(1)", "state of optimizer"),
])  # fmt: skip
def test_what_one_rank_alone_has_changed_in_the_first_step_is_said_after_it(alone, what, tmp_path):
    change = f"            if run.step == 0 and worker.rank == 0:\n                {alone}\n"
    changes = {UPDATE: change + UPDATE, RESUME: f"        net.register_buffer('mark', torch.zeros(1))\n{RESUME}"}
    said = play(altered(tmp_path / "alone_ddp", changes), (2, 1), tmp_path / "run", *FLAGS)[0].output
    assert f"warning: after step 1, rank 0 has not the same {what} as the other ranks" in said
    assert "as under `if rank == 0`?" in said


def test_a_state_that_holds_no_number_on_every_rank_is_the_same(tmp_path):
    odd = {", scheduler=scheduler": ", scheduler=scheduler, odd=Odd()", "def train(": ODD + "def train("}
    assert "bit by bit" not in play(altered(tmp_path / "odd_ddp", odd), (2, 1), tmp_path / "run", *FLAGS)[0].output


def test_a_scheduler_that_one_rank_alone_steps_ends_all_with_both_rates(tmp_path):
    alone = altered(tmp_path / "alone_ddp", {UPDATE: f"            if worker.is_main:\n    {UPDATE}"})
    results = playing(alone, nodes_of((2, 1), tmp_path / "run", *FLAGS), tmp_path).results()
    assert [result.code for result in results] == [2, 2]
    assert "error: rank 1 has taken step 2 with a learning rate of " in results[0].output
    assert "every rank must step the scheduler" in results[0].output


def test_a_rate_of_any_group_that_one_rank_alone_changes_ends_all(tmp_path):
    groups = "AdamW([{'params': [one]} for one in net.parameters()]"
    later = "            if worker.is_main and run.step == 3:\n                optimizer.param_groups[1]['lr'] *= 2\n"
    changes = {"AdamW(net.parameters()": groups, UPDATE: UPDATE + later}
    alone = altered(tmp_path / "alone_ddp", changes)
    results = playing(alone, nodes_of((2, 1), tmp_path / "run", *FLAGS), tmp_path).results()
    assert [result.code for result in results] == [2, 2]
    assert "error: rank 1 has taken step 5 with a learning rate of " in results[0].output


def test_weights_that_are_the_same_are_not_mentioned(tmp_path):
    assert "bit by bit" not in play(MNIST, (2, 1), tmp_path, *FLAGS)[0].output


def test_a_micro_batch_that_does_not_fit_into_a_gpu_is_said_with_the_rank_and_the_way_out(tmp_path):
    error = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...')"
    full = f"                    if run.step == 4 and worker.rank == 2:\n                        raise {error}\n"
    nodes = nodes_of((2, 1), tmp_path / "run", *FLAGS)
    first, second = playing(altered(tmp_path / "full_ddp", {BACKWARD: full + BACKWARD}), nodes, tmp_path).results()
    assert second.code == 2 and "Traceback" not in second.output
    assert "error: a micro-batch does not fit into the memory of cpu" in second.output
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB): give a smaller --micro-batch" in second.output
    assert first.code and "rank 2, node 1" in first.output


BACKPROPAGATED = "run.backward(loss_sum / batch.global_count)  # the count over all ranks, because DDP sums\n"
FOR_EACH = "# at least one: without images, an empty one\n"
ZERO_GRAD = "            optimizer.zero_grad()\n"
WRAP = "        model = run.wrap("
LATE = {
    "a gradient has changed between two micro-batches": {
        FOR_EACH: f"{FOR_EACH}                one = next(net.parameters())\n"
        "                if run.step >= 15 and one.grad is not None:\n"
        "                    one.grad.mul_(0.5)\n"
    },
    "training changes the buffer seen": {
        WRAP: f"        net.register_buffer('seen', torch.zeros(1))\n{WRAP}",
        BACKPROPAGATED: f"{BACKPROPAGATED}                    if run.step >= 15:\n"
        "                        net.seen.add_(1)\n",
    },
    "an optimizer trains a parameter (7,) that the model of this step lacks": {
        ZERO_GRAD: f"{ZERO_GRAD}            if run.step == 15:\n"
        "                own = torch.nn.Parameter(torch.ones(7))\n"
        "                optimizer.param_groups[0]['params'].append(own)\n"
        "            if run.step >= 15:\n"
        "                own.grad = torch.ones(7)\n",
    },
}


@pytest.mark.parametrize("said", LATE)
def test_what_goes_wrong_later_than_the_first_steps_is_found_before_the_next_exchange(said, tmp_path):
    script = altered(tmp_path / "late_ddp", LATE[said])
    flags = (*FLAGS, "--max-steps", 60, "--micro-batch", 8)
    for result in playing(script, nodes_of((2, 1), tmp_path / "run", *flags), tmp_path).results():
        assert result.code == 2 and said in result.output
    assert max(row["step"] for row in rows(tmp_path / "run", "train")) < 20  # of 23 steps, after which they exchange
