"""Runs whose shares follow the ranks' speeds: the slow rank gets less, and the result stays the same."""

import json

import pytest

from tests.harness import MNIST, largest_difference, losses, nodes_of, play, playing, rows, weights
from tests.trainers import NEXT_STEP, altered

# 1,438 samples: 14 steps an epoch, so that shares change in mid-epoch, and a tail of 8 samples
FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 110)
FORWARD = "loss_sum, _ = compute_loss(model, micro, args.label_smoothing)"
SLOW = "time.sleep(len(micro.labels) * (4e-3 * (worker.rank == 1)))"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-process")
    play(MNIST, (1,), folder, *FLAGS, "--epochs", 3)
    return folder


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    """The MNIST trainer, with a rank 1 that takes many times as long for a sample as the others."""
    changes = {FORWARD: f"{SLOW}; {FORWARD}", "import torch\n": "import time, torch\n"}
    return altered(tmp_path_factory.mktemp("slow-rank") / "slow_ddp", changes)


@pytest.fixture(scope="module")
def balanced(slow_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    said = play(slow_rank, (3, 1), folder, *FLAGS, "--epochs", 3, "--balance", "auto")[0].output
    assert "shares by speed: " in said
    return folder


def test_the_slow_rank_gets_fewer_samples_from_step_20_on(balanced):
    found = [row["shares"] for row in rows(balanced, "ranks") if row["step"] > 20]
    # no more is sure beside other processes: a rank whose update takes 15 ms there gets no samples at all
    assert found and all(shares[1] < 28 and shares[1] <= 0.6 * max(shares) for shares in found)
    assert all(sum(shares) == 110 for shares in found)


def test_losses_and_weights_are_those_of_one_process_though_shares_change(balanced, one_process):
    assert losses(balanced) == pytest.approx(losses(one_process), abs=1e-12)
    assert largest_difference(weights(balanced), weights(one_process)) < 1e-10


def test_evaluations_count_each_sample_once_though_ranks_take_batches_in_turn(balanced, one_process):
    for row, alone in zip(rows(balanced, "eval"), rows(one_process, "eval"), strict=True):
        assert row["count"] == alone["count"] == 359
        assert (row["loss"], row["accuracy"]) == pytest.approx((alone["loss"], alone["accuracy"]), abs=1e-12)


@pytest.mark.long
def test_it_resumes_on_another_layout_in_mid_epoch_with_shares_of_its_own(slow_rank, one_process, tmp_path):
    flags = (*FLAGS, "--epochs", 3, "--balance", "auto", "--save-every", 17)
    play(slow_rank, (3, 1), tmp_path, *flags, "--max-steps", 17)
    play(slow_rank, (2,), tmp_path, *flags, "--resume")
    assert losses(tmp_path) == pytest.approx(losses(one_process), abs=1e-12)
    assert largest_difference(weights(tmp_path), weights(one_process)) < 1e-10


def test_without_the_flag_shares_stay_as_they_are(slow_rank, tmp_path):
    play(slow_rank, (1, 1), tmp_path, *FLAGS, "--max-steps", 20)
    assert all(row["shares"] == [55, 55] for row in rows(tmp_path, "ranks"))


def test_one_process_alone_has_nothing_to_balance(tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, "--max-steps", 20, "--balance", "auto")
    assert all(row["shares"] == [110] for row in rows(tmp_path, "ranks"))


def test_a_model_whose_forward_waits_for_other_ranks_is_refused(tmp_path):
    changes = {
        "net = ConvNet(train_set.side)": "net = global_batch_norm(nn.Sequential(ConvNet(train_set.side), BN(10)))",
        "import torch\n": "import torch\nfrom torch import nn\nfrom torch.nn import BatchNorm1d as BN\n"
        "from common.uneven.options.global_batch import global_batch_norm\n",
    }
    trainer = altered(tmp_path / "waiting_ddp", changes)
    for node in playing(trainer, nodes_of((1, 1), tmp_path, *FLAGS, "--balance", "auto"), tmp_path).results():
        assert node.code == 2
        assert "--balance auto times each rank's forward, which waits for the other ranks" in node.output
        assert "Traceback" not in node.output


@pytest.mark.parametrize("ranks, change, said", [
    ((1,), "(1, 3), 9", "rank 1 has the shares 1, 3 in step 10, but rank 0 1.0, 1.0, so samples would be left out"),
    ((0, 1), "(1, 3), 8 + worker.rank", "rank 1 has the shares 1.0, 1.0 in step 9, but rank 0 1, 3, so"),
    ((0, 1), "(1, 3 + worker.rank * 1e-10), 9", "rank 1 has the shares 1, 3.0000000001 in step 10, but rank 0 1, 3.0"),
])  # fmt: skip
def test_ranks_with_other_changes_of_the_plan_are_named_before_a_checkpoint(tmp_path, ranks, change, said):
    alone = f"            if worker.rank in {ranks} and run.step == 7:\n"
    alone += f"                run.batches.plan.change_shares({change})\n"
    trainer = altered(tmp_path / "alone_ddp", {NEXT_STEP: alone + NEXT_STEP})
    flags = (*FLAGS, "--max-steps", 10)
    for node in playing(trainer, nodes_of((1, 1), tmp_path, *flags), tmp_path).results():
        assert node.code == 1 and "Traceback" not in node.output, node.output
        assert said in node.output, node.output
    assert not (tmp_path / "checkpoints").exists()


def test_a_micro_batch_of_its_own_for_each_rank_changes_nothing(one_process, tmp_path):
    play(MNIST, (2, 1), tmp_path, *FLAGS, "--epochs", 3, "--micro-batch", "2x30,7")
    assert losses(tmp_path) == pytest.approx(losses(one_process), abs=1e-12)


def test_each_change_of_shares_is_a_row_at_its_first_step(balanced):
    changes = rows(balanced, "shares")
    assert changes and all(sum(row["shares"]) == 110 for row in changes)
    for row in rows(balanced, "ranks"):
        before = [change["shares"] for change in changes if change["step"] <= row["step"]]
        assert row["shares"] == (before or [[28, 28, 27, 27]])[-1]
    lines = (balanced / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)
