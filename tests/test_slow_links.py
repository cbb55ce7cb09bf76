"""--compress and --sync-every, for slow links between nodes: what they exchange, and how near they stay."""

import pytest

from tests.harness import MNIST, largest_difference, losses, nodes_of, play, playing, rows, weights, write_trainer
from tests.test_bad_input import refusal
from tests.test_balanced_runs import FORWARD
from tests.trainers import altered

# 1,438 samples: 14 steps an epoch, the last of 8 samples, so that some ranks have one sample or none
DIGITS = ("--dataset", "digits", "--global-batch", 110)
AVERAGES = ("--outer-lr", 1, "--outer-momentum", 0)
# An inner optimizer without a state of its own, as the equality with DDP needs
SGD = {
    "AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay, eps=1e-5, fused=True)": (
        "torch.optim.SGD(net.parameters(), args.lr)"
    ),
    "OneCycleLR(optimizer, args.lr, total_steps=batches.total_steps)": (
        "torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)"
    ),
}
SAME_WEIGHTS = {
    "            run.end_step()\n": "            run.end_step()\n"
    "        vector = torch.nn.utils.parameters_to_vector(net.parameters())\n"
    "        run.group.agree(weights=vector.double().sum().item())\n"
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    play(MNIST, (2, 1), folder, *DIGITS, "--epochs", 4)
    return losses(folder)


@pytest.fixture(scope="module")
def sgd(tmp_path_factory):
    """The MNIST trainer with plain SGD. It ends with an error unless all ranks end with the same weights."""
    return altered(tmp_path_factory.mktemp("sgd") / "sgd_ddp", SGD | SAME_WEIGHTS)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The MNIST trainer, which ends with an error unless all ranks end with the same weights."""
    return altered(tmp_path_factory.mktemp("checked") / "checked_ddp", SAME_WEIGHTS)


# --- --compress --------------------------------------------------------------------------------------------------


def test_bf16_stays_near_the_exact_curve_and_all_ranks_have_the_same_weights(checked, exact, tmp_path):
    said = play(checked, (2, 1), tmp_path, *DIGITS, "--epochs", 4, "--compress", "bf16", "--micro-batch", 7)[0].output
    assert "links    gradients are exchanged as bf16" in said
    found = losses(tmp_path)
    assert found[0] == pytest.approx(exact[0], rel=1e-6)
    assert found != pytest.approx(exact, rel=1e-5)
    assert found == pytest.approx(exact, rel=0.02)


ROUNDED = """
torch.manual_seed(worker.rank)
mine = torch.randn(100_000)
exact, rounded = mine.double(), mine.to(torch.bfloat16)
dist.all_reduce(exact)
dist.all_reduce(rounded)
if worker.is_main:
    Path(args.out_dir, "error").write_text(str(((rounded.double() - exact).norm() / exact.norm()).item()))
"""


@pytest.mark.parametrize("ranks, error", [(2, 0.0023), pytest.param(8, 0.0035, marks=pytest.mark.long)])
def test_the_error_of_a_sum_in_bf16_is_that_of_the_docs(ranks, error, tmp_path):
    play(write_trainer(tmp_path, ROUNDED), (ranks,), tmp_path)
    assert float((tmp_path / "error").read_text()) == pytest.approx(error, rel=0.2)


def test_one_process_has_nothing_to_compress(tmp_path):
    for way in ("off", "bf16"):
        play(MNIST, (1,), tmp_path / way, *DIGITS, "--max-steps", 10, "--compress", way)
    assert losses(tmp_path / "bf16") == losses(tmp_path / "off")


@pytest.mark.long
def test_compression_may_change_when_a_run_is_resumed(tmp_path):
    play(MNIST, (2,), tmp_path, *DIGITS, "--max-steps", 5, "--compress", "bf16")
    play(MNIST, (2, 1), tmp_path, *DIGITS, "--max-steps", 10, "--compress", "off", "--resume")
    assert len(losses(tmp_path)) == 10


@pytest.mark.parametrize("flags, said", [
    (["--compress", "bf16", "--precision", "fp64"], "fp64 is for proofs, which are exact"),
    (["--compress", "fp16"], "invalid choice: 'fp16' (choose from"),
    (["--sync-every", 5, "--precision", "fp16"], "the nodes' loss scales would differ: use bf16"),
    (["--sync-every", 0], "'0' is not allowed"),
    (["--outer-lr", 0.7], "--outer-lr 0.7 without --sync-every"),
])  # fmt: skip
def test_what_cannot_work_is_refused(flags, said, tmp_path):
    assert said in refusal(tmp_path, *DIGITS, *flags)


# --- --sync-every ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, shares",
    [
        ((2, 1), "3,2,1"),
        pytest.param((1, 1, 1), "1,1,1", marks=pytest.mark.long),
        pytest.param((2, 2), "0,0,1,1", marks=pytest.mark.long),
    ],
)
def test_averaging_after_every_step_of_sgd_equals_an_exchange_of_gradients(gpus, shares, sgd, tmp_path):
    flags = (*DIGITS, "--precision", "fp64", "--epochs", 2, "--lr", 0.1, "--shares", shares, "--micro-batch", 7)
    play(sgd, gpus, tmp_path / "ddp", *flags)
    play(sgd, gpus, tmp_path / "nodes", *flags, "--sync-every", 1, *AVERAGES)
    assert losses(tmp_path / "nodes") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-12)
    assert largest_difference(weights(tmp_path / "nodes"), weights(tmp_path / "ddp")) < 1e-12


def test_between_outer_steps_the_nodes_differ_and_at_the_end_they_are_the_same(checked, exact, tmp_path):
    said = play(checked, (2, 1), tmp_path, *DIGITS, "--epochs", 4, "--sync-every", 5, *AVERAGES)[0].output
    assert "links    nodes average their changes every 5 steps, so the result depends on the nodes" in said
    found = losses(tmp_path)
    assert found[0] == pytest.approx(exact[0], rel=1e-6)
    assert abs(found[2] - exact[2]) > 1e-4 * exact[2]
    assert sum(found[-14:]) == pytest.approx(sum(exact[-14:]), rel=0.3)


@pytest.mark.long
def test_the_nodes_changes_may_be_rounded(checked, tmp_path):
    for way in ("off", "bf16"):
        flags = (*DIGITS, "--epochs", 4, "--sync-every", 5, "--compress", way)
        said = play(checked, (2, 1), tmp_path / way, *flags)[0].output
    assert "average their changes every 5 steps, rounded to bf16, so the result depends" in said
    exact, rounded = losses(tmp_path / "off"), losses(tmp_path / "bf16")
    assert rounded[:5] == exact[:5] and rounded[5:] != exact[5:]
    assert rounded == pytest.approx(exact, rel=0.05)


@pytest.mark.long
def test_one_node_rounds_nothing(tmp_path):
    for way in ("off", "bf16"):
        play(MNIST, (2,), tmp_path / way, *DIGITS, "--max-steps", 12, "--sync-every", 5, "--compress", way)
    assert losses(tmp_path / "bf16") == losses(tmp_path / "off")


@pytest.mark.long
def test_the_outer_step_is_nesterovs(sgd, tmp_path):
    """With H = 1 and plain SGD within, the outer step is a step of SGD with Nesterov momentum."""
    nesterov = altered(
        tmp_path / "nesterov_ddp",
        {old: new.replace("args.lr)", "args.lr * 0.7, 0.9, nesterov=True)") for old, new in SGD.items()},
    )
    flags = (*DIGITS, "--precision", "fp64", "--epochs", 2, "--lr", 0.02)
    play(nesterov, (2, 1), tmp_path / "ddp", *flags)
    play(sgd, (2, 1), tmp_path / "nodes", *flags, "--sync-every", 1, "--outer-lr", 0.7, "--outer-momentum", 0.9)
    assert losses(tmp_path / "nodes") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-9)


def test_a_checkpoint_waits_for_an_outer_step_and_a_resumed_run_goes_on_as_if_it_had_not_ended(sgd, tmp_path):
    flags = (*DIGITS, "--precision", "fp64", "--epochs", 2, "--lr", 0.02, "--sync-every", 5)
    flags += ("--save-every", 7, "--keep", 9)
    play(sgd, (2, 1), tmp_path / "whole", *flags)
    play(sgd, (2, 1), tmp_path / "parts", *flags)
    saved = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000010", "step-00000015", "step-00000025", "step-00000028"]
    assert [row["step"] for row in rows(tmp_path / "parts", "eval")] == [15, 28]  # an epoch has 14 steps
    flags = (*flags, "--resume", tmp_path / "parts" / "checkpoints" / "step-00000010")
    first, _ = play(sgd, (2, 1), tmp_path / "parts", *flags)
    assert "step-00000010: all nodes begin with rank 0's state of the optimizer" in first.output  # plain SGD has none
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-12)
    assert largest_difference(weights(tmp_path / "parts"), weights(tmp_path / "whole")) < 1e-12


TOKENS = """
from common.uneven import ddp
from common.uneven.global_batches import GlobalBatchLoader
from common.uneven.options.local_sgd import LocalSGD
"""
TOKEN_BODY = """
lengths = [1, 30, 2, 2, 9, 1, 1, 4, 25, 1, 3, 2, 7]  # the last step has one row
batches = GlobalBatchLoader(torch.arange(13.0, dtype=torch.float64)[:, None], 4, lengths=lengths)
net = torch.nn.Linear(1, 1).double()
torch.nn.init.ones_(net.weight), torch.nn.init.zeros_(net.bias)
nodes = LocalSGD(net, batches.sampler, batches.timer, group.ranks_of_nodes, {every})
optimizer = torch.optim.SGD(net.parameters(), 1e-3)


def compute_loss(model, micro):
    return model(micro).square().sum()


model = ddp.wrap(net, batches, compute_loss, nodes=nodes)
for batch in batches:
    for micro, is_last in batch.micro_batches():
        with model.no_sync(enabled=not is_last):
            (compute_loss(model, micro) / batch.global_count).backward()
    optimizer.step()
    optimizer.zero_grad()
    nodes.end_step(False, now=batch.step == 3)
if worker.is_main:
    Path(args.out_dir, "weight").write_text(repr(net.weight.item()))
"""


def test_a_nodes_samples_are_those_of_the_sampler_where_parts_are_balanced_by_tokens(tmp_path):
    found = []
    for every in ("None", "1"):
        folder = tmp_path / every
        folder.mkdir()
        play(write_trainer(folder, TOKEN_BODY.format(every=every), TOKENS), (1, 1), folder)
        found.append(float((folder / "weight").read_text()))
    assert found[0] != 1.0 and found[1] == pytest.approx(found[0], abs=1e-12)


def test_an_evaluation_alone_needs_no_flags_of_the_run(tmp_path):
    play(MNIST, (1, 1), tmp_path, *DIGITS, "--max-steps", 5, "--sync-every", 5)
    said = play(MNIST, (2,), tmp_path, *DIGITS, "--eval-only", "--resume")[0].output
    assert "step 5: loss" in said


def test_a_run_that_is_good_enough_ends_with_the_weights_that_were_evaluated(checked, tmp_path):
    flags = ("--epochs", 9, "--sync-every", 5, "--target-accuracy", 80)
    said = play(checked, (2, 1), tmp_path, *DIGITS, *flags)[0].output
    assert "reached 80.00%" in said
    assert rows(tmp_path, "eval")[-1]["step"] == rows(tmp_path, "summary")[-1]["step"]


def test_one_node_may_do_outer_steps_and_is_told_that_they_save_nothing(tmp_path):
    said = play(MNIST, (2,), tmp_path, *DIGITS, "--max-steps", 6, "--sync-every", 3)[0].output
    assert "there is one node, so nothing is saved" in said
    assert len(losses(tmp_path)) == 6


def test_a_checkpoint_of_such_a_run_does_not_fit_another_optimisation(tmp_path):
    play(MNIST, (1, 1), tmp_path, *DIGITS, "--max-steps", 5, "--sync-every", 5)
    nodes = nodes_of((1, 1), tmp_path, *DIGITS, "--max-steps", 9, "--resume", "--sync-every", 3)
    for result in playing(MNIST, nodes, tmp_path).results():
        assert result.code == 2 and "it was written with --sync-every 5, but this run has 3" in result.output
    nodes = nodes_of((1, 1), tmp_path, *DIGITS, "--max-steps", 9, "--resume")
    for result in playing(MNIST, nodes, tmp_path).results():
        assert result.code == 2 and "it was written with --sync-every 5, but this run has" in result.output


def test_shares_follow_speed_with_outer_steps_too(tmp_path):
    changes = {
        FORWARD: f"time.sleep(len(micro.labels) * (4e-3 * (worker.rank == 1))); {FORWARD}",
        "import torch\n": "import time, torch\n",
    }
    slow = altered(tmp_path / "slow_ddp", changes)
    play(slow, (1, 1), tmp_path / "run", *DIGITS, "--epochs", 3, "--sync-every", 5, *AVERAGES, "--balance", "auto")
    assert rows(tmp_path / "run", "ranks")[-1]["shares"][1] < 40
    assert rows(tmp_path / "run", "eval")[-1]["accuracy"] > 0.8


def test_a_node_that_is_lost_between_outer_steps_ends_the_run_on_the_other(tmp_path):
    ends = "            if run.step == 6 and worker.rank == 2:\n                os.kill(os.getpid(), 9)\n"
    step = "            run.end_step()\n"
    dies = altered(tmp_path / "dying_ddp", {step: ends + step, "import math\n": "import math, os\n"})
    nodes = nodes_of((2, 1), tmp_path, *DIGITS, "--sync-every", 5)
    first, second = playing(dies, nodes, tmp_path).results()
    assert first.code and second.code
    assert "rank 2" in first.output and "Traceback" not in first.output
