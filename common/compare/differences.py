"""Where two runs differ, and by how much."""

import math
from dataclasses import dataclass
from typing import Any

from common.compare.run import Run
from common.errors import UserError

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
SAME = 1e-6  # relative, of learning rates and gradient norms
NOT_MEASURES = {"kind", "step", "epoch", "training_seconds"}  # of an eval row


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs, in every step and evaluation that both have."""

    a: Run
    b: Run
    tolerance: float
    losses: dict[int, float]  # step -> difference, in order
    evaluations: list[tuple[int, str, float]]  # step, measure, difference
    first_rate: int | None  # the first step with another learning rate
    missing: list[str]  # in words, what one of them lacks

    def first_above(self, tolerance: float) -> int | None:
        """The first step whose losses differ by more than this."""
        return next((step for step, difference in self.losses.items() if difference > tolerance), None)

    @property
    def first_evaluation(self) -> tuple[int, str, float] | None:
        """The first measure of an evaluation that differs by more than the tolerance."""
        return next((one for one in self.evaluations if one[2] > self.tolerance), None)

    @property
    def agree(self) -> bool:
        differ = self.first_above(self.tolerance), self.first_evaluation, self.first_rate
        return differ == (None, None, None) and not self.missing


def compare(a: Run, b: Run, tolerance: float) -> Comparison:
    """Raises UserError where the runs have no step in common."""
    steps = sorted(a.train.keys() & b.train.keys())
    if not steps:
        have = " and ".join(f"{run.path} has steps {min(run.train)} to {max(run.train)}" for run in (a, b))
        raise UserError(f"the two runs have no step in common: {have}: compare runs of the same steps and --log-every")
    losses = {step: difference(a.train[step]["loss"], b.train[step]["loss"]) for step in steps}
    evaluations = [
        (step, name, difference(value, b.evaluations[step][name]))
        for step in sorted(a.evaluations.keys() & b.evaluations.keys())
        for name, value in a.evaluations[step].items()
        if name not in NOT_MEASURES and name in b.evaluations[step]
    ]
    rates = [step for step in steps if not same(a.train[step].get("lr"), b.train[step].get("lr"))]
    missing = [f"A {what}" for what in a.lacks(b)] + [f"B {what}" for what in b.lacks(a)]
    return Comparison(a, b, tolerance, losses, evaluations, next(iter(rates), None), missing)


def same(first: Any, second: Any) -> bool:
    """Equal but for the last digits, where both are numbers."""
    is_number = isinstance(first, int | float) and isinstance(second, int | float)
    return math.isclose(first, second, rel_tol=SAME) if is_number else first == second


def difference(first: Any, second: Any) -> float:
    """Relative where the values are above 1, absolute below: a loss near 0 has no digits to lose. Infinite where one
    is not a number, such as None, which stands for one that is not finite, and the other is something else."""
    if first == second:
        return 0.0
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (first, second)):
        return math.inf
    return abs(first - second) / max(1.0, abs(first), abs(second))


def default_tolerance(a: Run, b: Run) -> float:
    """That of the lower precision of both; fp32's, the trainers' default, where there is no run.json."""
    names = [start["flags"].get("precision", "fp32") for run in (a, b) for start in run.starts] or ["fp32"]
    return max(TOLERANCES.get(str(name), TOLERANCES["fp32"]) for name in names)
