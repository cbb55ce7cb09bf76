"""Every command, path and link in README, CONTRIBUTING, docs and launch_scripts is true."""

import os
import re
import shlex

import pytest

from tests.harness import ROOT, flags_of, run

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = {"played_link.py"}  # of play_nodes.py
SCRIPTS = sorted(path for path in (ROOT / "launch_scripts").glob("*.*") if path.name not in MODULES)
TRAINERS = {path.name: path for path in ROOT.glob("*_ddp/*-*.py")}
FOLDERS = ("mnist_ddp", "bert_ddp", "common", "launch_scripts", "tests", "docs", "benchmarks", r"\.ci")


def code(document) -> list[str]:
    """The lines of a document's code blocks, indented or fenced, and its inline code; continued lines joined."""
    text = document.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    .*$", text, re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", text)
    blocks = "\n".join([*fenced, *indented]).replace("\\\n", " ")
    return [line.strip() for line in [*blocks.splitlines(), *inline]]


def commands(document) -> list[tuple[str, list[str]]]:
    """(trainer's name, flags) of each command line that starts one of our programs."""
    found = []
    for line in code(document):
        match = re.search(r"(?:^|[\s/])((?:mnist|bert|prepare)-[a-z]+\.py)(\s+-.*)?$", line.partition("  #")[0])
        if match and match[2] and "..." not in match[2] and "|" not in match[2]:
            found.append((match[1], shlex.split(match[2])))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_and_link_exists(document):
    text = document.read_text()
    paths = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_names_flags_that_its_program_takes(document):
    for name, flags in commands(document):
        known = flags_of(TRAINERS[name])
        named = [flag.partition("=")[0] for flag in flags if re.match(r"--?[a-z]", flag)]
        unknown = [flag for flag in named if flag not in known]
        assert not unknown, f"{name} {' '.join(flags)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_and_module_exists(document):
    targets = set(re.findall(r"^([\w-]+|\.venv):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(document):
        if match := re.match(r"make ([\w.-]+)$", line):
            assert match[1] in targets, line
        if match := re.search(r"-m common\.(\w+)", line):
            assert (ROOT / "common" / match[1] / "__main__.py").exists(), line


def packages() -> list[str]:
    """The folders with Python files in common/ and bert_ddp/, and the modules at the top of common/."""
    folders = {path.parent for name in ("common", "bert_ddp") for path in (ROOT / name).rglob("*.py")}
    modules = [path for path in (ROOT / "common").glob("*.py") if path.name != "__init__.py"]
    paths = [f"{folder.relative_to(ROOT)}/" for folder in folders - {ROOT / "common"}]
    return sorted(paths) + [str(path.relative_to(ROOT)) for path in modules]


def test_the_readme_names_every_package_and_only_files_that_are_there():
    text = (ROOT / "README.md").read_text()
    assert [package for package in packages() if package not in text] == []
    tree = re.findall(r"^    ((?:common|\w+_ddp)/(?:\w+/)?)  +(.*)$", text, re.MULTILINE)
    named = [ROOT / package / file for package, line in tree for file in re.findall(r"[\w-]+\.py", line)]
    assert len(named) > 10
    assert [path for path in named if not path.exists()] == []


def test_contributing_names_every_package_of_common():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = [package.rstrip("/") for package in packages() if package.startswith("common/")]
    assert [name for name in names if name not in text] == []


def test_the_lines_that_the_docs_change_are_lines_of_the_trainers():
    """A line after "- " in a code block of the docs is in a trainer as it is."""
    others = [document for document in DOCUMENTS if document.name != "steps.md"]  # test_steps.py holds it
    lines = [line[2:] for document in others for line in code(document) if line.startswith("- ")]
    trainers = (ROOT / "mnist_ddp" / "train.py", ROOT / "bert_ddp" / "pretrain" / "train.py")
    source = "".join(path.read_text() for path in trainers)
    assert len(lines) >= 3
    assert [line for line in lines if line not in source] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_launch_script_has_a_header_and_no_fixed_address(script):
    lines = script.read_text().splitlines()
    assert lines[1].startswith(("#", '"""')), "line 2 says where to run it"
    fixed = [line for line in lines if re.search(r"\b(?!127\.0|0\.0)\d+\.\d+\.\d+\.\d+\b|/home/|/root/", line)]
    assert not fixed


def test_commands_are_found_at_all():
    """The tests above can fail: the README holds commands and they are recognised."""
    assert ("mnist-distributed.py", ["-n", "2", "-g", "8,2", "-i", "0"]) in commands(ROOT / "README.md")


def test_every_program_that_names_its_interpreter_can_be_started():
    tracked = run("git", "ls-files", cwd=ROOT).output.split()
    programs = [ROOT / name for name in tracked if (ROOT / name).read_bytes()[:2] == b"#!"]
    assert programs
    assert [path for path in programs if not os.access(path, os.X_OK)] == []


def test_every_picture_is_made_by_a_benchmark():
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    pictures = [path.name for path in (ROOT / "docs").glob("*.png")]
    assert pictures
    assert [name for name in pictures if name not in scripts] == []
