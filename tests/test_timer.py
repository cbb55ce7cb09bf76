"""A step's time by what it is spent on."""

import time

import pytest
import torch

from common.uneven.options.timer import StepTimer
from tests.harness import nodes_of, play, playing, rows
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--global-batch", 144, "--max-steps", 4)  # 1,438 samples: 10 steps an epoch
LOADER = "run.evaluation_loader(test_set)\n"


SLEEP_MS = 1000  # far more than a step computes, on a busy machine too


@pytest.fixture(scope="module")
def slow_loader(tmp_path_factory):
    """A run on two ranks whose rank 1 waits for its data in each step."""
    folder = tmp_path_factory.mktemp("slow-loader")
    slow = f"        load, pause = train_set.get_batch, worker.rank * {SLEEP_MS / 1e3}\n"
    slow += "        train_set.get_batch = lambda chosen: [time.sleep(pause), load(chosen)][1]\n"
    changes = {LOADER: LOADER + slow, "import torch\n": "import time, torch\n"}
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


def test_a_step_without_no_sync_is_named(tmp_path):
    trainer = altered(tmp_path / "stranger_ddp", {"with model.no_sync(enabled=not is_last):": "if True:"})
    for node in playing(trainer, nodes_of((1, 1), tmp_path / "run", *FLAGS), tmp_path).results():
        assert node.code == 2, node.output
        assert "outside of its own `with model.no_sync(enabled=not is_last)`" in node.output


def test_a_further_exchange_counts_as_exchange_and_is_known_apart():
    timer = StepTimer(torch.device("cpu"))
    for name in ("begin", "loaded", "ready", "reduced"):
        timer.mark(name)
    with timer.exchange():
        time.sleep(0.02)
    timer.end_step()
    [times] = timer.take()
    assert times.exchange >= times.further >= 20
