"""The full example of docs/your-own-task.md, as it is printed there."""

import re
import shutil

import pytest

from tests.harness import ROOT, losses, nodes_of, play, playing, rows, run

CHAPTER = ROOT / "docs" / "your-own-task.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's entry, written into a folder of its own, with a text beside it."""
    folder = tmp_path_factory.mktemp("example")
    files = re.findall(r"^`([\w/.-]+)`:\n\n```python\n(.*?)^```", CHAPTER.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["lines_ddp/lines-distributed.py", "lines_ddp/train.py"]
    for name, text in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / "lines_ddp" / "lines-distributed.py"


FLAGS = ("--text", ROOT / "README.md", "--precision", "fp64", "--global-batch", 30, "--max-steps", 12)


def test_it_is_exact_on_uneven_nodes_and_begins_near_the_loss_of_an_untrained_model(example, tmp_path):
    play(example, (1,), tmp_path / "one", *FLAGS)
    play(example, (3, 1), tmp_path / "uneven", *FLAGS, "--micro-batch", 5)
    assert losses(tmp_path / "uneven") == pytest.approx(losses(tmp_path / "one"), abs=1e-9, rel=0)
    assert losses(tmp_path / "one")[0] == pytest.approx(4.85, abs=0.2)  # ln 128
    assert rows(tmp_path / "one", "eval")[-1]["perplexity"] < 100
    said = run("python", "-m", "common.compare", tmp_path / "one", tmp_path / "uneven", cwd=ROOT).output
    # Parts of equal tokens have different numbers of rows.
    assert "within the tolerance" in said and "equal shares" not in said, said


def test_the_plain_loop_of_the_chapter_prints_the_same_losses(example, tmp_path):
    plain = re.search(r'^```python\n(""".{,200}must have\."""\n.*?)^```', CHAPTER.read_text(), re.MULTILINE | re.DOTALL)
    (example.parent / "plain.py").write_text(plain[1])
    printed = run("python", example.parent / "plain.py", cwd=ROOT, PYTHONPATH=str(ROOT))
    assert printed.code == 0, printed.output
    wanted = [float(line.split()[1]) for line in printed.output.splitlines()]
    assert len(wanted) > 3
    play(example, (1,), tmp_path / "one", *FLAGS[:-1], len(wanted))
    assert losses(tmp_path / "one") == pytest.approx(wanted, abs=1e-12, rel=0)


MISTAKES = {
    "optimizer.step()": ("run.optimizer_step(optimizer, clip_norm=args.clip_norm)", "has had no run.optimizer_step("),
    "pass": ("run.end_step()", "step 1 has had no run.end_step()"),
}


@pytest.mark.parametrize("written", MISTAKES)
def test_a_line_of_the_step_that_is_missing_is_named(written, example, tmp_path):
    missing, said = MISTAKES[written]
    shutil.copytree(example.parent, tmp_path / "missing_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "missing_ddp").iterdir():
        file.write_text(file.read_text().replace(missing, written).replace("lines_ddp", "missing_ddp"))
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS)
    for result in playing(tmp_path / "missing_ddp" / example.name, nodes, tmp_path).results():
        assert result.code == 2 and said in result.output and "Traceback" not in result.output


def test_its_parser_may_do_without_the_flags_of_slow_links(example, tmp_path):
    shutil.copytree(example.parent, tmp_path / "few_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "few_ddp").iterdir():
        text = file.read_text().replace("    cli.add_link_flags(parser)\n", "")
        file.write_text(text.replace("lines_ddp", "few_ddp"))
    play(tmp_path / "few_ddp" / example.name, (2,), tmp_path / "run", *FLAGS)


def test_it_continues_on_another_layout(example, tmp_path):
    play(example, (1,), tmp_path / "whole", *FLAGS)
    play(example, (2, 1), tmp_path / "parts", *FLAGS[:-1], 5)
    play(example, (1, 1), tmp_path / "parts", *FLAGS, "--resume")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-9, rel=0)
