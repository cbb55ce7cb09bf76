#!/usr/bin/env python3
"""A hundred thousand random inputs for every parser of foreign input: how many are taken, and how many refused.

    fuzz.py [--examples 100000] [--seed 0] [--only IDX,CoNLL]

Ends with the input that made one of them fail otherwise.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.machine import describe
from tests.fuzzing import TARGETS, Target


def count(target: Target, examples: int, number: int) -> dict[bool, int]:
    """How many of so many inputs are taken (True) and refused (False); fewer where a strategy has no more values."""
    taken = {True: 0, False: 0}

    def read(value: Any) -> None:
        taken[target.is_taken(value)] += 1

    checks = list(HealthCheck)
    limits = settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=checks, phases=[Phase.generate]
    )
    seed(number)(limits(given(target.strategy)(read)))()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TARGETS))
    args = parser.parse_args()
    print("| input | read | taken | refused | seconds |\n| --- | --- | --- | --- | --- |")
    for name in args.only.split(","):
        began = time.perf_counter()
        taken = count(TARGETS[name], args.examples, args.seed)
        cells = [name, f"{sum(taken.values()):,}", f"{taken[True]:,}", f"{taken[False]:,}"]
        print(f"| {' | '.join(cells)} | {time.perf_counter() - began:.0f} |", flush=True)
    print(f"\nSeed {args.seed}. {describe()}")


if __name__ == "__main__":
    main()
