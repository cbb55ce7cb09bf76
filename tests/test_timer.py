"""A step's time by what it is spent on, and a loader that does not give one item for each optimizer step."""

import pytest

from common.errors import UserError
from common.uneven.timer import StepTimer
from tests.harness import nodes_of, play, playing, rows
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--global-batch", 144, "--max-steps", 4)  # 1,438 samples: 10 steps an epoch
LOADER = "timer.steps(train_loader"


@pytest.mark.parametrize("loader, gave", [
    ("DataLoader(train_set, batch_size=2000, drop_last=True)", "a plain DataLoader knows no empty parts"),
    ("DataLoader(train_set, batch_sampler=sampler)", "a plain DataLoader knows no empty parts"),
    ("[[]] * 45", "the loader has 45 items, but this epoch has 10 optimizer steps left"),
    ("iter([])", "the loader gave 0 items, but this epoch has 10 optimizer steps left"),
])  # fmt: skip
def test_a_trainer_whose_loader_does_not_follow_the_plan_ends_and_is_told_what_to_write(loader, gave, tmp_path):
    trainer = altered(tmp_path / "stranger_ddp", {LOADER: f"timer.steps({loader}"})
    for node in playing(trainer, nodes_of((1, 1), tmp_path / "run", *FLAGS), tmp_path).results():
        assert node.code == 2, node.output
        assert gave in node.output and "write part_loader(data, sampler, seed)" in node.output
        assert "Traceback" not in node.output


@pytest.mark.parametrize("items, gave", [([], "0"), ([1], "1"), ([1, 2, 3, 4], "more than 3")])
def test_a_loader_without_a_length_that_gives_too_few_or_too_many_items_is_refused(items, gave, timer):
    with pytest.raises(UserError, match=f"gave {gave} items, but this epoch has 3 optimizer steps left"):
        trained(timer, iter(items))


def test_a_loader_that_gives_as_many_items_as_the_plan_has_steps_gives_them_all(timer):
    assert trained(timer, [1, 2, 3]) == trained(timer, iter([1, 2, 3])) == [1, 2, 3]


def trained(timer, loader):
    """The items of three steps, each of which exchanges its gradients."""
    items = []
    for item in timer.steps(loader, 3):
        items.append(item)
        timer.mark("reduced")
    return items


@pytest.fixture
def timer():
    import torch

    return StepTimer(torch.device("cpu"))


SLEEP_MS = 1000  # far more than a step computes, on a busy machine too


@pytest.fixture(scope="module")
def slow_loader(tmp_path_factory):
    """A run on two ranks whose rank 1 waits for its data in each step."""
    folder = tmp_path_factory.mktemp("slow-loader")
    slow = f"([time.sleep(worker.rank * {SLEEP_MS / 1e3}), part][1] for part in train_loader)"
    changes = {LOADER: f"timer.steps({slow}", "import torch\n": "import time, torch\n"}
    play(altered(folder / "slow_ddp", changes), (1, 1), folder, *FLAGS)
    return folder


def test_the_time_of_a_slow_loader_is_loading_on_its_rank_and_waiting_on_the_other(slow_loader):
    row = rows(slow_loader, "ranks")[-1]  # in the first step, DDP makes rank 0 wait within its forward pass
    assert row["loading_ms"][1] >= SLEEP_MS > row["loading_ms"][0]
    assert row["loading_ms"][1] > row["compute_ms"][1]
    assert row["wait_ms"][0] > row["wait_ms"][1] == 0


def test_the_summary_has_the_mean_loading_time_of_the_ranks(slow_loader):
    (summary,) = rows(slow_loader, "summary")
    assert summary["loading_seconds"] >= 4 * SLEEP_MS / 1e3 / 2


def test_a_step_without_reduce_gradients_if_is_named(tmp_path):
    trainer = altered(tmp_path / "stranger_ddp", {"with reduce_gradients_if(is_last, model, timer):": "if True:"})
    for node in playing(trainer, nodes_of((1, 1), tmp_path / "run", *FLAGS), tmp_path).results():
        assert node.code == 2, node.output
        assert "outside of its own `with reduce_gradients_if(is_last, model, timer)`" in node.output
