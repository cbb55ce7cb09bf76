"""Signals in training: a checkpoint of all ranks, an exit code that schedulers start again, and a
second signal that ends at once."""

import json
import os
import re
import signal
import time

import psutil
import pytest

from common.launch.addresses import free_port
from common.launch.interruption import SIGNALS, TWICE_SECONDS, handle
from tests.harness import (
    MNIST,
    ROOT,
    Node,
    largest_difference,
    losses,
    nodes_of,
    play,
    playing,
    rows_so_far,
    run,
    wait_until,
    weights,
)
from tests.test_launch import stop
from tests.trainers import Patient, altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--log-every", 1, "--save-every", "1h")
AGAIN = 75


def started(tmp_path, gpus, *flags, script=MNIST):
    """A run that has made some steps."""
    run = playing(script, nodes_of(gpus, tmp_path / "run", *FLAGS, *flags), tmp_path)
    wait_until(lambda: len(rows_so_far(tmp_path / "run", "train")) >= 3, run)
    return run


def rank_pid(run, rank: int) -> int:
    """From run.json, and not from the title of the process, which a forked one cannot always change."""
    (start,) = json.loads((run.logs[0].parent / "run" / "run.json").read_text())["starts"]
    return start["ranks"][rank]["pid"]


@pytest.mark.parametrize(
    "number", ["SIGTERM", "SIGINT", *(pytest.param(one, marks=pytest.mark.long) for one in ("SIGUSR1", "SIGHUP"))]
)
def test_a_signal_to_one_supervisor_saves_a_checkpoint_and_ends_every_node(tmp_path, number):
    run = started(tmp_path, (1, 2), "--epochs", 2000)
    os.kill(run.processes[1].pid, getattr(signal, number))
    results = run.results()
    assert [result.code for result in results] == [AGAIN, AGAIN], [result.output for result in results]
    said = re.search(rf"interrupted: {number} on rank [12]: ended after step (\d+), which is saved", results[0].output)
    assert said, results[0].output
    saved = (tmp_path / "run" / "checkpoints" / "latest").resolve().name
    assert saved == f"step-{int(said[1]):08d}"


def test_a_run_that_was_interrupted_and_resumed_elsewhere_has_the_curve_of_one_that_was_not(tmp_path):
    trainer = Patient(tmp_path)
    run = playing(trainer.script, nodes_of((3, 1), tmp_path / "run", *Patient.FLAGS), tmp_path)
    wait_until(lambda: len(rows_so_far(tmp_path / "run", "train")) >= 3, run)
    os.kill(rank_pid(run, 3), signal.SIGUSR1)
    assert [result.code for result in run.results()] == [AGAIN, AGAIN]
    last = trainer.end(tmp_path / "run")
    play(trainer.script, (2,), tmp_path / "run", *Patient.FLAGS, "--resume")
    play(MNIST, (1,), tmp_path / "whole", *Patient.FLAGS, "--max-steps", last)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "whole")) < 1e-9


SAVED = """
import os, signal, sys
from common.record.interrupts import Interrupts
interrupts = Interrupts(0, speaks=True)
interrupts.all_know = {all_know}
interrupts.close()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75)
"""


@pytest.mark.parametrize("all_know, code", [(True, AGAIN), (False, -signal.SIGTERM)])
def test_a_launcher_that_ends_those_that_are_left_changes_no_exit_code_of_a_run_that_has_saved(all_know, code):
    assert run("python", "-c", SAVED.format(all_know=all_know), PYTHONPATH=str(ROOT)).code == code


def test_a_second_signal_ends_at_once(tmp_path):
    run = started(tmp_path, (2,), "--epochs", 2000)
    stop(psutil.Process(rank_pid(run, 1)))  # so that the ranks cannot agree
    os.kill(run.processes[0].pid, signal.SIGTERM)
    run.wait_for("once more ends at once")
    time.sleep(TWICE_SECONDS + 0.5)  # at least: what comes sooner counts as the same signal
    os.kill(run.processes[0].pid, signal.SIGTERM)
    (result,) = run.results()
    assert result.code == 128 + signal.SIGTERM, result.output


def test_one_process_in_place_saves_too(tmp_path):
    run = started(tmp_path, (1,), "--epochs", 2000)
    os.kill(run.processes[0].pid, signal.SIGTERM)
    (result,) = run.results()
    assert result.code == AGAIN, result.output
    assert "interrupted: SIGTERM on rank 0: ended after step" in result.output and "Traceback" not in result.output


@pytest.fixture(scope="module")
def before_training(tmp_path_factory):
    """How two nodes end, at once, that wait for others and get a signal: one of ours, and a rank of a launcher."""
    ours, launchers = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("launcher")
    node = playing(MNIST, nodes_of((2, 1), ours / "run", *FLAGS)[:1], ours)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = playing(MNIST, [Node(["--dataset", "digits", "--device", "cpu"], {**launched, **where})], launchers)
    node.wait_for("waiting for node 1")
    os.kill(node.processes[0].pid, signal.SIGTERM)
    rank.wait_for("waiting for rank 1")
    os.kill(rank.processes[0].pid, signal.SIGUSR1)
    return [*node.results(), *rank.results()]


def test_a_signal_before_training_ends_without_a_checkpoint(before_training):
    result, _ = before_training
    assert result.code == 143 and "Traceback" not in result.output, result.output


def test_a_schedulers_signal_to_a_rank_that_waits_for_the_others_asks_for_another_start(before_training):
    _, result = before_training
    assert result.code == AGAIN, result.output
    assert "interrupted: SIGUSR1 while nothing was to be saved: start the run again" in result.output
    assert "Traceback" not in result.output


@pytest.mark.long
def test_nodes_that_train_by_themselves_meet_before_they_save(tmp_path):
    run = started(tmp_path, (1, 1), "--sync-every", 100000, "--epochs", 2000)
    os.kill(run.processes[1].pid, signal.SIGTERM)
    results = run.results()
    assert [result.code for result in results] == [AGAIN, AGAIN], [result.output for result in results]


# on a slow machine, too, a signal that comes once more "at once" comes within TWICE_SECONDS
ALWAYS_THE_SAME = """import torch
import common.launch.interruption, common.record.interrupts
common.launch.interruption.TWICE_SECONDS = common.record.interrupts.TWICE_SECONDS = 300.0
"""


def test_a_signal_to_all_processes_of_a_node_at_once_counts_once(tmp_path):
    """As Ctrl-C in a terminal, `timeout`, and what ends a process group."""
    trainer = altered(tmp_path / "twice_ddp", {"import torch\n": ALWAYS_THE_SAME})
    run = started(tmp_path, (3,), "--epochs", 2000, script=trainer)
    node = psutil.Process(run.processes[0].pid)
    ranks = node.children()
    stop(ranks[-1])  # so that the run does not end before all have their signals
    for process in (node, *ranks):
        process.send_signal(signal.SIGINT)
    run.wait_for("once more ends at once")
    node.send_signal(signal.SIGINT)
    ranks[-1].resume()
    (result,) = run.results()
    assert result.code == AGAIN, result.output
    assert "ended after step" in result.output and "again" not in result.output


@pytest.mark.parametrize(
    "loading", ["num_workers=1", pytest.param("**worker_options(1, run.device)", marks=pytest.mark.long)]
)
def test_a_closed_terminal_saves_a_checkpoint(tmp_path, loading):
    """It sends SIGHUP to every process of a run, also to those that make batches."""
    changes = {
        "import torch\n": "import torch\nfrom common.uneven.options.workers import worker_options\n",
        "run.global_batches(train_set)": f"run.global_batches(train_set, {loading})",
    }
    run = started(tmp_path, (2,), "--epochs", 2000, script=altered(tmp_path / "loading_ddp", changes))
    node = psutil.Process(run.processes[0].pid)
    for process in node.children(recursive=True)[::-1]:
        process.send_signal(signal.SIGHUP)
    node.send_signal(signal.SIGHUP)
    (result,) = run.results()
    assert result.code == AGAIN, result.output
    assert re.search(r"interrupted: SIG\w+ on rank \d: ended after step \d+, which is saved", result.output)
    assert "SIGHUP: " in result.output and "DataLoader" not in result.output


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert handle(signal.SIG_DFL).keys() == set(SIGNALS) - {signal.SIGHUP}
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_loader_whose_processes_end_does_not_interrupt_the_run(tmp_path):
    """Their end sends SIGCHLD, for which torch has a handler in Python."""
    loading = {"run.global_batches(train_set)": "run.global_batches(train_set, num_workers=1)"}
    forked = altered(tmp_path / "forked_ddp", loading)
    said = play(forked, (2,), tmp_path / "run", *FLAGS, "--epochs", 3)[0].output
    assert "interrupted" not in said and "done " in said
