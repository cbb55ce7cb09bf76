"""python -m common.predict: the arithmetic of a step, the advice, and what a person types."""

import json
import re
import sys

import pytest

from common.errors import UserError
from common.predict import figures
from common.predict.step import Cluster, Link, Way, advice, all_reduce, predict, ways
from tests.harness import MNIST, ROOT, play, run
from tests.test_first_answer import imported

FAST, SLOW = Link(1e12, 0.0), Link(12.5e6, 1e-4)  # 100 Mbit/s
MB = 1e6


def cluster(nodes, speeds, between=FAST, inside=FAST):
    return Cluster(nodes, speeds, (0.0,) * len(speeds), inside, between)


def steps_of(found):
    return {way: predict(found, 128, 3 * MB, way) for way in ways(found, 50)}


def test_a_ring_of_two_sends_the_gradients_once_each_way_and_a_large_one_twice():
    assert all_reduce(12.5 * MB, 2, SLOW) == pytest.approx(1.0 + 2 * 1e-4)
    assert all_reduce(12.5 * MB, 1000, SLOW) == pytest.approx(2 * 0.999 + 1998 * 1e-4)


def test_equal_shares_wait_for_the_slowest_and_shares_by_speed_do_not():
    found = cluster((2, 2), (100.0, 100.0, 100.0, 25.0))
    equal, balanced = (predict(found, 128, 0.0, Way(balanced=on)) for on in (False, True))
    assert equal.seconds == pytest.approx(1.28) and max(equal.waiting) == pytest.approx(0.96)
    assert balanced.shares == (40, 39, 39, 10) and balanced.seconds == pytest.approx(0.4)


def test_a_fast_link_is_hidden_behind_backward_but_for_its_last_piece():
    found = cluster((1, 1), (100.0, 100.0), Link(1e9, 0.0))
    step = predict(found, 128, 101 * 2**20, Way())
    assert step.exchange == pytest.approx(25 * 2**20 / 1e9)


def test_where_the_link_binds_half_the_bytes_take_half_the_time():
    found = cluster((1, 1), (1e6, 1e6), SLOW)
    whole, half = (predict(found, 128, 100 * MB, Way(compressed=part)).seconds for part in (1.0, 0.5))
    assert half / whole == pytest.approx(0.5, rel=0.01)


def test_rare_exchanges_divide_the_time_between_nodes_and_leave_that_within_a_node():
    found = cluster((2, 1), (1e6,) * 3, SLOW, inside=Link(1e9, 0.0))
    step = predict(found, 128, 100 * MB, Way(sync_every=50))
    inside = all_reduce(100 * MB, 2, Link(1e9, 0.0))
    outer = all_reduce(100 * MB, 2, SLOW)
    assert step.seconds == pytest.approx(inside + (outer + inside / 2) / 50, rel=0.01)


def test_of_micro_batches_only_the_last_one_hides_an_exchange():
    found = cluster((1, 1), (100.0, 100.0), Link(50 * 2**20, 0.0))
    one, four = (predict(found, 200, 100 * 2**20, Way(), count) for count in (1, 4))
    # Of a second of computing, the piece that ends at 26 % of the gradients is ready at this time; 99 MB are left.
    assert one.exchange == pytest.approx(1 - 2 / 3 * 0.74 + 1.98 - 1)
    assert four.exchange == pytest.approx(1 - 2 / 3 / 4 * 0.74 + 1.98 - 1)


def test_what_the_doctor_has_measured_counts_instead_of_a_ring():
    found = Cluster((1, 1), (100.0, 100.0), (0.0, 0.0), FAST, FAST, ((1e6, 0.5), (2e6, 0.6), (4e6, 0.8)))
    assert [found.all_reduce(size) for size in (1e3, 1e6, 1.5e6, 3e6, 8e6)] == pytest.approx([0.5, 0.5, 0.55, 0.7, 1.2])


def test_where_a_delay_counts_pieces_are_on_their_way_at_once():
    long = ((4.0, 0.1), (2.0**20, 0.5), (2.0**21, 0.51), (2.0**30, 0.51 + 2.0**29 / MB * 1e-4))
    step = predict(Cluster((1, 1), (1e9, 1e9), (0.0, 0.0), FAST, FAST, long), 2, 2 * 2.0**20, Way())
    assert step.exchange == pytest.approx(0.5)  # two of 1 MB, half a second each


def test_the_examples_are_printed_with_the_published_figures():
    result = run(*PREDICT, "--examples")
    assert result.code == 0
    assert "8     2.69 s, 1.72" in result.output and "1000 " in result.output


def test_it_answers_without_torch():
    result = run("python", "-X", "importtime", *PREDICT[1:], "--examples")
    assert result.code == 0 and not imported(result.output) & {"torch", "numpy"}


def test_a_thousand_ranks_are_predicted():
    assert steps_of(cluster((8,) * 125, (100.0,) * 1000, SLOW))[Way()].seconds > 0


@pytest.mark.parametrize("found, said", [
    (cluster((2,), (100.0, 100.0)), "nothing to change"),
    (cluster((1, 1), (100.0, 25.0)), "--balance auto (the result stays the same)"),
    (cluster((1, 1), (1e4, 1e4), SLOW), "--sync-every 50 (changes the result"),
])  # fmt: skip
def test_the_advice_names_the_flag_that_pays(found, said):
    assert advice(steps_of(found)).startswith(said)


PREDICT = (sys.executable, "-m", "common.predict")
TYPED = ("-g", "8,2", "--speed", "8x210,2x120", "--gradients", "440MB", "--global-batch", "1024")


def test_figures_typed_by_hand_give_a_table_and_an_advice():
    result = run(*PREDICT, *TYPED, "--link", "10Gbit,0.1ms")
    assert result.code == 0
    assert "equal shares" in result.output and "advice     --balance auto" in result.output


def test_a_slow_rank_has_a_part_of_its_speed():
    result = run(*PREDICT, *TYPED, "--link", "10Gbit,0.1ms", "--slow", "9=0.25,0=0.5")
    assert result.code == 0
    assert "speeds     105, 210, 210, 210, 210, 210, 210, 210, 120, 30 samples a second by rank" in result.output


@pytest.mark.parametrize("flags, said", [
    ((*TYPED, "--link", "1Gbit,1ms", "--slow", "10=0.5"), "--slow names rank 10, but -g has ranks 0 to 9"),
    ((*TYPED, "--link", "1Gbit,1ms", "--slow", "1=2"), "'1=2' is not allowed: give RANK=SPEED"),
    (TYPED, "--link is missing: give rate and latency between the nodes"),
    ((*TYPED, "--link", "10Gbit"), "'10Gbit' is not allowed: give the rate each way and the latency one way"),
    ((*TYPED, "--link", "1Gbit,1ms", "--speed", "1,2"), "--speed has 2 numbers, but -g has 10 ranks"),
    ((*TYPED, "--link", "1Gbit,1ms", "--gradients", "440"), "'440' is not allowed: give bytes, such as 440MB"),
    ((*TYPED, "--link", "1Gbit,1ms", "--fixed-ms", "1,2"), "--fixed-ms has 2 numbers, but -g has 10 ranks"),
    (("-g", "2"), "--speed is missing: give it, or a run that has it with --run"),
    (("--run", "nowhere"), "name the --out-dir of a run that has ended"),
    ((*TYPED, "--doctor", "nowhere"), "give what `python -m common.doctor --json` has printed"),
])  # fmt: skip
def test_what_is_missing_or_wrong_is_said(flags, said):
    result = run(*PREDICT, *flags)
    assert result.code == 2 and said in result.output and "Traceback" not in result.output


def test_a_run_and_the_doctor_give_the_figures(tmp_path):
    play(MNIST, (2, 1), tmp_path / "run", "--dataset", "digits", "--max-steps", 30, "--global-batch", 64)
    links = [{"mbit_per_second": 94.0, "latency_ms": 0.3}, {"mbit_per_second": None, "latency_ms": 9.0}]
    all_reduce = [{"bytes": 4, "ms": 1.0}, {"bytes": 1048576, "ms": 100.0}, {"bytes": 4194304, "ms": None}]
    report = {"layout": {"gpus_per_node": [2, 1]}, "links": links, "all_reduce": all_reduce}
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    result = run(*PREDICT, "--run", tmp_path / "run", "--doctor", tmp_path / "doctor.json")
    assert result.code == 0, result.output
    assert "--sync-every 50" in result.output


def test_the_chapter_shows_what_it_prints():
    chapter = (ROOT / "docs" / "unequal-machines.md").read_text()
    command = re.search(r"^    python (-m common\.predict -g 8,2 .*)$", chapter, re.MULTILINE)
    assert command and f"```\n{run('python', *command[1].split()).output}```\n" in chapter


ROW = {"kind": "ranks", "step": 30, "shares": [1], "compute_ms": [2.0], "loading_ms": [0.1]}


@pytest.mark.parametrize("change", [{"step": None}, {"shares": 3}, {"compute_ms": [0.0]}, {"compute_ms": [1.0, 2.0]}])
def test_rows_that_no_run_has_written_are_one_line(change, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"flags": {"gpus": [1]}}]}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW | change) + "\n")
    (tmp_path / "checkpoints" / "step-00000030").mkdir(parents=True)  # and no `latest`, as object stores leave it
    (tmp_path / "checkpoints" / "step-00000030" / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(UserError, match="name the --out-dir of a run that has ended"):
        figures.of_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert figures.of_run(tmp_path)["gradients"] == 8
