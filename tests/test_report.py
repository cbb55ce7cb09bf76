"""What a run leaves: its rows, its lines, run.json and curves.png say the same, also in a resumed run."""

import io
import json
import time

import pytest

from common import console
from common.record import wording
from common.record.clock import Clock, seconds_between_exchanges
from tests.harness import MNIST, play, rows
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--global-batch", 144, "--epochs", 3, "--save-every", 5)  # 10 steps an epoch
PARTS = ("loading", "compute", "communication", "waiting", "other")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of 20 steps, and what it printed when it went back to the middle of its first epoch and went on."""
    folder = tmp_path_factory.mktemp("resumed")
    play(MNIST, (1,), folder, *FLAGS, "--max-steps", 20, "--keep", 9)
    before = rows(folder, "ranks")
    (node,) = play(MNIST, (1,), folder, *FLAGS, "--resume", folder / "checkpoints" / "step-00000005")
    return folder, before, node.output


def test_the_parts_of_a_resumed_run_s_time_add_up_to_its_seconds(resumed):
    folder, _, output = resumed
    (summary,) = rows(folder, "summary")
    assert sum(summary[f"{part}_seconds"] for part in PARTS) == pytest.approx(summary["seconds"], abs=0.005)
    (line,) = [line for line in output.splitlines() if " time " in line]
    assert (
        f"{summary['seconds']:.1f} s of training since step 5 ({summary['training_seconds']:.1f} s over all runs)"
        in line
    )
    assert all(f"{part} {summary[f'{part}_seconds']:.1f} s" in line for part in PARTS)


def test_the_seconds_of_all_runs_count_the_earlier_run_up_to_the_step_that_is_resumed(resumed):
    folder, before, _ = resumed
    (summary,) = rows(folder, "summary")
    (earlier,) = [row["training_seconds"] for row in before if row["step"] == 5]  # no evaluation was so early
    assert earlier > 0
    assert summary["training_seconds"] - summary["seconds"] == pytest.approx(earlier, abs=0.002)


def test_a_run_with_no_plot_draws_none_and_names_none(resumed):
    folder, _, output = resumed
    assert not (folder / "curves.png").exists()
    assert f"files    {folder}: metrics.jsonl, run.json, checkpoints/latest" in output


def test_rows_are_in_the_order_of_their_steps(resumed):
    steps = [json.loads(line)["step"] for line in (resumed[0] / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_run_json_names_the_process_of_each_rank(tmp_path):
    play(MNIST, (2, 1), tmp_path, *FLAGS, "--max-steps", 1)
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [rank["rank"] for rank in start["ranks"]] == [0, 1, 2]
    assert len({rank["pid"] for rank in start["ranks"]}) == 3 and all(rank["host"] for rank in start["ranks"])


def test_measures_of_one_kind_are_printed_alike_whatever_comes_before_their_kind():
    found = wording.measures({"accuracy": 0.126, "top3_accuracy": 0.335, "dev_macro_f1": 0.5, "perplexity": 30.25})
    assert found == "accuracy 12.60%, top3_accuracy 33.50%, dev_macro_f1 50.00%, perplexity 30.2500"


DIVIDES = "loss_sum / batch.global_count"
OWN = "batches.last = batch = __import__('dataclasses').replace(next(batches), global_count=worker.world_size)"


@pytest.mark.parametrize("changes, warning", [
    ({}, None),
    ({DIVIDES: "loss_sum / max(1, len(micro.labels))"}, "the first loss is 9."),  # a sum of the ranks' means
    ({"batch = next(batches)": OWN, DIVIDES: "loss_sum / max(1, len(micro.labels)) / batch.global_count"},
     "is divided by 4, but its global batch has 110 samples"),
])  # fmt: skip
def test_a_loss_that_is_not_a_mean_over_the_global_batch_is_said(changes, warning, tmp_path):
    trainer = altered(tmp_path / "mean_ddp", changes)
    flags = ("--dataset", "digits", "--global-batch", 110, "--max-steps", 12, "--shares", "4,4,1,1")
    said = play(trainer, (3, 1), tmp_path / "run", *flags)[0].output
    assert ("warning:" in said) == (warning is not None)
    assert warning is None or warning in said


def test_a_pause_within_a_pause_counts_once():
    clock = Clock()
    with clock.pause(), clock.saving(), clock.pause():
        time.sleep(0.2)
    assert 0.2 <= clock.paused_seconds <= time.perf_counter() - clock.began


@pytest.mark.parametrize(("exchange", "between"), [(0.0005, 1.0), (0.05, 2.5), (1.0, 5.0)])
def test_exchanges_that_take_long_are_rarer(exchange, between):
    assert seconds_between_exchanges(exchange) == between


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_character_that_the_terminal_does_not_know_ends_nothing(encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    console.say("the label \u8a00, in the file \udcff", rank=0)
    said = written.getvalue().decode(encoding)
    sign = "\u8a00" if encoding == "utf-8" else "\\u8a00"
    assert said == f"[0] the label {sign}, in the file \\udcff\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_terminal_that_is_gone_ends_nothing(stream, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed if stream else None)
    console.say("a line")
    console.flush()
