"""Trackers get each row of metrics.jsonl, on rank 0 only, and cannot end the training."""

import json

import pytest

from tests.harness import MNIST, nodes_of, play, playing
from tests.trainers import NEXT_STEP, altered

FLAGS = ("--dataset", "digits", "--global-batch", 144, "--max-steps", 4)
REPORT = 'with Run(worker, args, name="mnist") as run:'
TRACKERS = """
import json
from pathlib import Path


class Keeper:
    def __init__(self, path):
        self.path, self.rows = path, []

    def __call__(self, row):
        self.rows.append(dict(row))
        row.clear()  # a tracker may do with its row what it wants

    def close(self):
        self.path.write_text(json.dumps(self.rows))


class Broken:
    def __init__(self, path):
        self.path = path

    def __call__(self, row):
        if row["step"] == 3:
            raise ConnectionError("no answer")

    def close(self):
        self.path.write_text("closed")
        raise OSError("closed already")


def quiet(row):
    raise ValueError
"""
GIVEN = f"""\
import sys
    sys.path.insert(0, str(args.out_dir.parent))
    import kept
    keepers = [kept.Keeper(args.out_dir / f"rows-of-{{worker.rank}}-{{name}}.json") for name in "ab"]
    broken = kept.Broken(args.out_dir / f"broken-on-{{worker.rank}}")
    {REPORT.replace(") as", ", trackers=[keepers[0], broken, kept.quiet, keepers[1]]) as")}"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """(the folder, what rank 0's node has printed) of a run with four trackers, two of which fail."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "kept.py").write_text(TRACKERS)
    nodes = play(altered(folder / "tracked_ddp", {REPORT: GIVEN}), (1, 1), folder / "run", *FLAGS, "--tensorboard")
    return folder / "run", nodes[0].output


def test_each_tracker_gets_the_rows_of_metrics_jsonl_as_dicts_on_rank_0_only(tracked):
    folder, _ = tracked
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in written} == {"train", "ranks", "eval", "summary"}
    for name in "ab":
        assert json.loads((folder / f"rows-of-0-{name}.json").read_text()) == written
    assert not list(folder.glob("rows-of-1-*"))


def test_a_tracker_that_raises_is_named_once_and_closed_and_training_goes_on(tracked):
    folder, output = tracked
    assert output.count("the tracker Broken failed (ConnectionError: no answer)") == 1
    assert output.count("the tracker quiet failed (ValueError") == 1
    assert output.count("the tracker Broken could not be closed (OSError: closed already)") == 1
    assert "done     4 steps" in output
    assert (folder / "broken-on-0").exists() and not (folder / "broken-on-1").exists()


def test_tensorboard_is_one_of_them(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked[0] / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert {"eval/accuracy", "summary/loading_seconds"} <= set(events.Tags()["scalars"])
    assert "train/step" not in events.Tags()["scalars"]


def test_a_run_with_nothing_left_to_do_closes_its_trackers(tracked, tmp_path):
    play(MNIST, (1,), tmp_path / "run", *FLAGS)
    (tmp_path / "kept.py").write_text(TRACKERS)
    trainer = altered(tmp_path / "tracked_ddp", {REPORT: GIVEN})
    play(trainer, (1,), tmp_path / "run", *FLAGS, "--resume")
    assert json.loads((tmp_path / "run" / "rows-of-0-a.json").read_text()) == []


HANGS = """\
from common.errors import UserError

    def hangs(row):
        pass

    hangs.close = lambda: __import__("time").sleep(3600)
    """


def test_a_tracker_whose_close_hangs_does_not_hold_a_run_that_ends_with_an_error(tmp_path):
    given = HANGS + REPORT.replace(") as", ", trackers=[hangs]) as")
    fails = "            if run.step == 2:\n                raise UserError('no more')\n"
    trainer = altered(tmp_path / "hung_ddp", {REPORT: given, NEXT_STEP: fails + NEXT_STEP})
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS, "--work-timeout", 3)
    first, second = playing(trainer, nodes, tmp_path).results()
    gives_up = "error: no more\n[0] error: what this rank writes in the end (--work-timeout) did not end within 3 s"
    assert first.code == second.code == 2 and gives_up in first.output, first.output
