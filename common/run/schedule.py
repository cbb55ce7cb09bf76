"""What is due between two steps of a run: an exchange, an evaluation, a checkpoint. The same on every rank."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.run.run import Run


def epoch_ends(run: "Run") -> bool:
    return run.is_done or run.step % run.batches.steps_per_epoch == 0


def wants_evaluation(run: "Run") -> bool:
    """At the end of each epoch, and with --eval-every."""
    every = getattr(run.args, "eval_every", None)
    return epoch_ends(run) or bool(every and run.step % every == 0)


def find_due(run: "Run", evaluates: bool, ends: bool = False) -> tuple[bool, bool]:
    """Whether to evaluate, and whether to save. Before either, and every 1 to 5 seconds, and where the loop `ends`, the
    ranks exchange what they have noted. Every rank must call this."""
    saves = run.checkpointer.is_due(run.step, now=ends or epoch_ends(run) or run.ending.is_due)
    if (saves or evaluates or run.log.is_due) and (steps := run.log.exchange(run.ending.signal)):
        run.ending.agree(steps)
        run.checkpointer.agree(steps)
    return evaluates and run.log.evaluated_step != run.step, saves
