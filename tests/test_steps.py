"""The eight steps: what their chapter says is what the files are, and what they print."""

import re
import sys

import pytest

from benchmarks.steps import STEPS, diff
from common.launch.addresses import free_port
from tests.harness import ROOT, Node, playing, run, torchrun_nodes

CHAPTER = (ROOT / "docs" / "steps.md").read_text()
WITH_TAIL = 24  # optimizer steps from step 4 on


def block(name: str) -> list[str]:
    """The lines of the chapter between these markers, without the fence."""
    return CHAPTER.partition(f"<!-- {name} -->\n")[2].partition("\n<!-- end -->")[0].splitlines()


def losses_in(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def said(step: int, ranks: int, folder, *arguments: object) -> str:
    """What all ranks print, started as torchrun would, in `folder`."""
    folder.mkdir(exist_ok=True)
    results = playing(STEPS[step - 1], torchrun_nodes((ranks,), *arguments), folder, cwd=folder).results()
    assert [result.code for result in results] == [0] * ranks, [result.output for result in results]
    return "".join(result.output for result in results)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """All losses of step 4, on one rank."""
    return losses_in(said(4, 1, tmp_path_factory.mktemp("exact")))


def test_each_has_less_than_90_lines():
    assert len(STEPS) == 8
    assert all(len(path.read_text().splitlines()) < 90 for path in STEPS)


@pytest.mark.parametrize("step", range(2, 9))
def test_the_chapter_shows_the_diff_as_it_is(step):
    assert block(f"diff {step}") == diff(step)


def test_one_process_prints_what_the_chapter_says(tmp_path):
    (result,) = playing(STEPS[0], [Node([])], tmp_path).results()
    found = losses_in(result.output)
    assert len(found) == 21
    stated = losses_in("\n".join(block("said 1")))
    assert stated and {step: found[step] for step in stated} == pytest.approx(stated, abs=1e-12)


@pytest.mark.parametrize("step", [2, 3, 4, 5, 6])
def test_four_ranks_print_what_the_chapter_says(step, tmp_path):
    found, stated = losses_in(said(step, 4, tmp_path)), losses_in("\n".join(block(f"said {step}")))
    assert len(found) == (WITH_TAIL if step > 3 else 21)
    assert len(stated) >= 5 and {number: found[number] for number in stated} == pytest.approx(stated, abs=1e-12)


def test_even_parts_leave_the_losses_as_they_are(tmp_path):
    stated = {step: losses_in("\n".join(block(f"said {step}"))) for step in (1, 2, 3)}
    assert stated[2] == pytest.approx(stated[1], abs=1e-12)
    assert abs(stated[3][1] - stated[1][1]) > 1e-3


@pytest.mark.parametrize("step", [4, 5, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_ranks_have_the_same_losses(step, ranks, exact, tmp_path):
    assert losses_in(said(step, ranks, tmp_path)) == pytest.approx(exact, abs=1e-12)


def test_a_run_goes_on_on_other_ranks(exact, tmp_path):
    first, second = losses_in(said(7, 4, tmp_path, 10)), losses_in(said(7, 2, tmp_path))
    assert (len(first), len(second)) == (10, 14)
    assert first | second == pytest.approx(exact, abs=1e-12)
    stated = losses_in("\n".join(block("said 7")))
    assert {step: exact[step] for step in stated} == pytest.approx(stated, abs=1e-12)


@pytest.mark.long
def test_torchrun_starts_a_step_as_the_chapter_says(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    result = run(*torchrun, "--master-port", free_port(), STEPS[1], cwd=tmp_path)
    assert result.code == 0 and len(losses_in(result.output)) == 21, result.output


def test_the_others_go_on_after_a_rank_has_died(exact, tmp_path):
    output = said(8, 4, tmp_path)
    assert output.count("after step 12 go on with ranks [0, 1, 3]") == 3
    assert losses_in(output) == pytest.approx(exact, abs=1e-12)
