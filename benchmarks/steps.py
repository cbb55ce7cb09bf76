#!/usr/bin/env python3
"""Run the eight steps of docs/steps.md under torchrun, and write what they print, and their diffs, into the chapter.

    steps.py [--write docs/steps.md]

Without --write it prints lines and sizes of the diffs. About two minutes.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.faults import put_table
from benchmarks.machine import describe

STEPS = sorted((ROOT / "mnist_ddp" / "steps").glob("[1-8]_*.py"))
SHORT = 4  # lines
STARTS: dict[int, list[tuple[int, list[str]]]] = {7: [(4, ["10"]), (2, [])]}  # step -> (ranks, arguments) of each start


def diff(step: int) -> list[str]:
    """What changed from the step before, without context. Docstrings are left out, and so are blocks of lines that are
    only indented otherwise; a short one is shown, or one could not see what a new `if` is about."""
    before, after = (path.read_text().partition('"""\n\n')[2].splitlines() for path in STEPS[step - 2 : step])
    old_code, new_code = ([line.strip() for line in lines] for lines in (before, after))
    matcher = difflib.SequenceMatcher(None, old_code, new_code)
    lines = []
    for tag, old, old_end, new, new_end in matcher.get_opcodes():
        if tag == "equal":
            moved = [after[line] for line in range(new, new_end) if before[old + line - new] != after[line]]
            lines += [f" {line}" for line in moved] if len(moved) <= SHORT else []
        else:
            removed, added = before[old:old_end], after[new:new_end]
            lines += ["@@", *(f"-{line}" for line in removed), *(f"+{line}" for line in added)]
    return ["```diff", *lines, "```"]


def run(step: int, folder: Path) -> list[str]:
    """What a step prints, on four ranks."""
    said = []
    for ranks, arguments in STARTS.get(step, [(4, [])]):
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if step > 1 else []
        command = [sys.executable, *torchrun, str(STEPS[step - 1]), *arguments]
        result = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        said += result.stdout.splitlines()
    return said


def shown(said: list[str], step: int) -> list[str]:
    """The first lines, the last one, and what is said in between."""
    changes = [number for number, line in enumerate(said) if line.startswith("rank ")]
    around = {*changes, *([changes[0] - 1, changes[-1] + 1] if changes else [])}
    around |= {9, 10} if step == 7 else set()
    kept = sorted({0, 1, 6, 7, len(said) - 1} | around)
    lines = []
    for index, number in enumerate(kept):
        if index and number > kept[index - 1] + 1:
            lines.append("...")
        lines.append(said[number])
    return ["```", *lines, "```"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put outputs and diffs into this file, between its markers")
    args = parser.parse_args()
    print(describe())
    for step, path in enumerate(STEPS, start=1):
        with tempfile.TemporaryDirectory() as folder:
            said = run(step, Path(folder))
        lines = len(path.read_text().splitlines())
        size = sum(line.startswith(("+", "-")) for line in diff(step)) if step > 1 else 0
        print(f"{path.name}: {lines} lines, {size} in the diff; {said[0]} ... {said[-1]}", flush=True)
        if args.write:
            put_table(args.write, f"said {step}", shown(said, step))
            if step > 1:
                put_table(args.write, f"diff {step}", diff(step))


if __name__ == "__main__":
    main()
