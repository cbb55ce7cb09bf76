"""--trace S: what each rank does during S steps, on one clock."""

import json
import threading
import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from common.join import clocks
from common.join.clocks import seconds_ahead
from common.record.trace import Kernels, RankTrace, Span, Trace, spans_between
from common.record.trace_files import split_exchanges, steps_of
from common.uneven.options.timer import StepTimer
from tests.harness import MNIST, play

DIGITS = ("--dataset", "digits", "--global-batch", 64)
STEPS = 20


def test_marks_of_a_step_with_two_micro_batches_become_its_spans():
    names = ["begin", "loaded", "pass", "passed", "pass", "ready", "passed", "reduced", "end"]
    spans = spans_between([(name, float(second)) for second, name in enumerate(names)], first_step=7)
    assert spans == [
        Span("loading", 0, 1, 7),
        Span("micro-batch", 2, 3, 7, 1),
        Span("micro-batch", 4, 5, 7, 2),
        Span("all-reduce", 5, 6, 7),
        Span("optimizer", 7, 8, 7),
    ]


def test_a_further_exchange_of_a_step_is_an_exchange():
    names = ["pass", "ready", "passed", "reduced", "further", "done", "end"]
    spans = spans_between([(name, float(second)) for second, name in enumerate(names)], first_step=1)
    assert [span.name for span in spans][1:] == ["all-reduce", "optimizer", "all-reduce", "optimizer"]


def test_what_happens_between_two_steps_belongs_to_the_one_before():
    names = ["reduced", "end", "evaluation:", ":evaluation", "begin", "loaded"]
    spans = spans_between([(name, float(second)) for second, name in enumerate(names)], first_step=3)
    assert spans == [Span("optimizer", 0, 1, 3), Span("evaluation", 2, 3, 3), Span("loading", 4, 5, 4)]


def test_a_rank_waits_until_the_slowest_one_is_ready():
    early, late = Span("all-reduce", 1, 6, 1), Span("all-reduce", 4, 6, 1)
    first, second = split_exchanges([RankTrace(0, [early], []), RankTrace(1, [late], [])], [[0, 1]])
    assert first.spans == [Span("wait", 1, 4, 1), Span("transfer", 4, 6, 1)]
    assert second.spans == [Span("wait", 4, 4, 1), Span("transfer", 4, 6, 1)]


def test_a_rank_does_not_wait_for_one_that_it_does_not_exchange_with():
    early, late = Span("all-reduce", 1, 2, 1), Span("all-reduce", 4, 6, 1)
    first, _ = split_exchanges([RankTrace(0, [early], []), RankTrace(1, [late], [])], [[0], [1]])
    assert first.spans == [Span("wait", 1, 1, 1), Span("transfer", 1, 2, 1)]


def test_a_clock_that_is_five_seconds_ahead_is_found_out(monkeypatch):
    class Clock:
        """Five seconds ahead in the threads of node 1."""

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + (5.0 if threading.current_thread().name == "node 1" else 0.0)

    monkeypatch.setattr(clocks, "time", Clock)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    found: dict[int, tuple[float, float]] = {}

    def ask(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=300))
        found[rank] = seconds_ahead(store, "clock", rank, [[0, 1], [2, 3]], timeout_seconds=300)

    threads = [threading.Thread(target=ask, args=(rank,), name=f"node {rank // 2}") for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == (0.0, 0.0)
    assert found[2] == found[3]
    ahead, off = found[2]
    assert off > 0
    assert ahead == pytest.approx(5.0, abs=off)


def test_what_the_profiler_has_seen_is_on_the_clock_of_the_process():
    began = time.perf_counter()
    kernels = Kernels(ProfilerActivity.CPU)
    torch.ones(300, 300) @ torch.ones(300, 300)
    kernels.end()
    ended = time.perf_counter()
    products = [span for span in kernels.spans() if span.name == "aten::mm"]
    assert len(products) == 1
    off = 0.05  # two clocks of the machine are compared
    assert began - off < products[0].start < products[0].end < ended + off


def test_a_run_of_few_steps_is_traced_from_its_first():
    timer = StepTimer(torch.device("cpu"))
    assert Trace(timer, 30, 0, 10).first_step == 1
    assert timer.on_mark is not None


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced") / "run"
    said = play(MNIST, (3, 1), folder, *DIGITS, "--micro-batch", 8, "--epochs", 2, "--trace", STEPS)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return folder, said, events


def spans_of(events: list[dict], rank: int) -> list[dict]:
    return [one for one in events if one["ph"] == "X" and one["pid"] == rank and not one["name"].startswith("step ")]


def test_the_file_names_every_rank_with_its_node(traced):
    _, _, events = traced
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert [name.partition(" (")[0] for name in names] == [
        *(f"rank {rank}, node 0" for rank in range(3)),
        "rank 3, node 1",
    ]


def test_each_step_of_each_rank_has_all_of_its_spans(traced):
    _, _, events = traced
    for rank in range(4):
        for step in range(6, 6 + STEPS):
            names = sorted(one["name"] for one in spans_of(events, rank) if one["args"]["step"] == step)
            between = {"report", "evaluation", "checkpoint"}
            wanted = ["loading", "micro-batch 1", "micro-batch 2", "optimizer", "transfer", "wait"]
            assert [name for name in names if name not in between] == (
                wanted if step != 23 else wanted[:2] + wanted[3:]
            )


def test_evaluation_and_checkpoint_are_between_the_steps(traced):
    _, _, events = traced
    for rank in range(4):
        steps = {one["name"]: one["args"]["step"] for one in spans_of(events, rank)}
        assert steps["evaluation"] == steps["checkpoint"] == 23


def test_the_spans_of_a_rank_do_not_overlap(traced):
    _, _, events = traced
    for rank in range(4):
        spans = sorted(spans_of(events, rank), key=lambda one: (one["ts"], one["dur"]))
        assert all(before["ts"] + before["dur"] <= after["ts"] + 0.01 for before, after in pairwise(spans))


def test_no_transfer_ends_before_the_last_rank_was_ready(traced):
    """On one clock: a sum needs what all ranks give."""
    folder, _, events = traced
    off = json.loads((folder / "trace.json").read_text())["otherData"]["clocks_may_differ_by_us"]
    transfers = [one for rank in range(4) for one in spans_of(events, rank) if one["name"] == "transfer"]
    for step in range(6, 6 + STEPS):
        mine = [one for one in transfers if one["args"]["step"] == step]
        assert max(one["ts"] for one in mine) <= min(one["ts"] + one["dur"] for one in mine) + 2 * off


def test_the_run_says_where_the_trace_is_and_draws_it(traced):
    folder, said, _ = traced
    assert f"steps 6 to 25: {folder}/trace.json and trace.png" in str(said)
    assert (folder / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ends_before_all_steps_writes_those_that_it_has(tmp_path):
    flags = ("--epochs", 4, "--target-accuracy", 0.1, "--trace", 80)
    play(MNIST, (1, 1), tmp_path / "run", *DIGITS, *flags)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {one["args"]["step"] for one in spans_of(events, 1)} == set(range(6, 24))


def test_steps_without_spans_of_their_own_have_none():
    assert steps_of(RankTrace(0, [Span("evaluation", 0, 1, 4)], [])) == []
