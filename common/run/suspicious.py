"""What the log says of losses that are not finite, and of a first loss that cannot be right."""

from collections.abc import Iterator, Mapping, Sequence

from common.record.steps import ExchangedSteps
from common.uneven.guards.losses import (
    few_counted_problem,
    first_loss_problem,
    held_out_count_problem,
    held_out_loss_problem,
)


def not_finite_lines(steps: ExchangedSteps, skips: bool) -> Iterator[str]:
    """Whose samples have given a loss that is not finite, and which steps are skipped; else the run ends after one."""
    losses, norms = (~steps.by_rank[name].isfinite() for name in ("loss", "grad_norm"))  # (ranks, steps)
    wrong = losses | norms if skips else losses
    for index in wrong.any(dim=0).nonzero().flatten().tolist():
        ranks = losses[:, index].nonzero().flatten().tolist()
        what = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient"
        ending = ": this step changes no weight (--on-nan skip)" if skips else ""
        yield f"step {steps.done[index].step}: {what} is not finite{ending}"
        if not skips:
            return


def first_step_lines(steps: ExchangedSteps, samples: int, untrained_loss: float | None) -> Iterator[str]:
    """What is suspicious about the loss of step 1, of `samples` samples."""
    if problem := few_counted_problem(float(steps.by_rank["count"][0, 0]), samples):
        yield problem
    if untrained_loss and (problem := first_loss_problem(steps.done[0].loss, untrained_loss)):
        yield problem


def evaluation_lines(
    numbers: Mapping[str, float], held_out: Sequence[int], world_size: int, training_loss: float
) -> Iterator[str]:
    """What is suspicious about the first evaluation, of sets of `held_out` samples."""
    if problem := held_out_count_problem(numbers.get("count", 0), held_out, world_size):
        yield problem
    if problem := held_out_loss_problem(numbers.get("loss", 0.0), training_loss):
        yield problem
