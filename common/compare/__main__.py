#!/usr/bin/env python3
"""Do two runs agree? Compares their losses step by step, and asks the right question where they do not.

    python -m common.compare runs/a runs/b                    # two --out-dirs, or two metrics.jsonl
    python -m common.compare runs/a runs/b --tolerance 1e-6

The difference of two losses is relative where they are above 1, and absolute below. Exit code 0: losses,
learning rates and evaluations agree within the tolerance, as far as both runs go; 1: some do not, or one of the runs
lacks an evaluation or a checkpoint, or has failed before the other one ends; 2: a file is missing or wrong.
From any folder: python common/compare/__main__.py, by its path.
"""

import sys
from argparse import Namespace
from pathlib import Path

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.compare import questions
from common.compare.differences import Comparison, compare, default_tolerance
from common.compare.run import Run, read_run
from common.console import say
from common.errors import ExplainedError, UserError
from common.launch import values
from common.launch.parser import Parser
from common.launch.reading import count


def flags() -> Parser:
    parser = Parser(__doc__, prog="common.compare")
    parser.add_argument("a", metavar="A", type=Path, help="a run's --out-dir, or its metrics.jsonl")
    parser.add_argument("b", metavar="B", type=Path, help="another one")
    largest = "largest difference that counts as equal (1e-9 for fp64, 1e-5 for fp32, 1e-2 for bf16 and fp16)"
    parser.add_argument("--tolerance", type=values.non_negative_float, metavar="X", help=largest)
    return parser


def main() -> int:
    parser = flags()
    args = parser.parse_args()
    try:
        return report(args)
    except ExplainedError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")


def report(args: Namespace) -> int:
    """Compare, print, and return the exit code. Raises UserError."""
    a, b = read_run(args.a), read_run(args.b)
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{args.a} and {args.b} are the same run: name two")
    found = compare(a, b, default_tolerance(a, b) if args.tolerance is None else args.tolerance)
    say("\n".join([_described("A", a), _described("B", b), *_summary(found)]))
    if not found.agree:
        say(questions.ask(found))
        return 1
    ends = sorted({max(run.train) for run in (a, b)})
    say("equal     within the tolerance" + f", up to step {ends[0]}: one of them ends there" * (len(ends) > 1))
    say(questions.what_equal_shares_hide(a, b))
    return 0


def _described(name: str, run: Run) -> str:
    how = ", no run.json: give --tolerance 1e-9 if it is in fp64"
    if start := run.start_at(max(run.train)):
        balanced = ", --balance auto" * (start["flags"].get("balance") == "auto")
        how = f", {start['layout']['source']}, {start['flags'].get('precision')}{balanced}"
    resumed = "".join(f", resumed after step {step}" for step in run.resumes)
    return f"{name:<10}{run.path}: {count(len(run.train), 'step')}{how}{resumed}"


def _summary(found: Comparison) -> list[str]:
    (step, largest), steps = max(found.losses.items(), key=lambda one: one[1]), list(found.losses)
    compared = f"compared  {count(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    lines = [f"{compared}: largest difference {largest:.1e} at step {step}; tolerance {found.tolerance:.1e}"]
    if found.evaluations:
        step, measure, largest = max(found.evaluations, key=lambda one: one[2])
        times = count(len({step for step, _, _ in found.evaluations}), "evaluation")
        lines.append(f"compared  {times}: largest difference {largest:.1e} at step {step}, in its {measure}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
