"""What is due between two steps of a run: an exchange, an evaluation, a checkpoint. The same on every rank."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.run.run import Run


def epoch_ends(run: "Run", step: int) -> bool:
    return step >= run.total_steps or step % run.batches.steps_per_epoch == 0


def wants_evaluation(run: "Run", step: int) -> bool:
    """After optimizer step `step`, counted from 1: at the end of each epoch, and with --eval-every."""
    every = getattr(run.args, "eval_every", None)
    return epoch_ends(run, step) or bool(every and step % every == 0)


def find_due(run: "Run", evaluates: bool, ends: bool = False) -> None:
    """Find whether an evaluation is due, which `evaluates` says, and a checkpoint. Before either, and every 1 to 5
    seconds, and where the loop `ends`, the ranks exchange what they have noted. Every rank must call this."""
    saves = run.checkpointer.is_due(run.step, now=ends or epoch_ends(run, run.step) or run.ending.is_due)
    exchanges = saves or evaluates or run.log.is_due
    if exchanges and (steps := run.log.exchange(run.ending.signal)):
        run.ending.agree(steps)
        run.checkpointer.agree(steps)
    # Guards look at everything in a step after which ranks exchange, so that what is wrong is found before. The step
    # after an exchange may be one, because an exchange tells whether to save.
    comes = run.log.is_due_next or wants_evaluation(run, run.step + 1) or run.checkpointer.saves(run.step + 1)
    waited = (run.checkpointer.wants_one or run.nodes.evaluation_is_due) and run.nodes.synchronizes_next
    if exchanges or comes or waited:
        run.batches.timer.begin_checks()
    run.evaluation_is_due, run.checkpoint_is_due = evaluates and run.log.evaluated_step != run.step, saves
    if run.evaluation_is_due:
        run.stopped_clock.enter_context(run.log.pause())  # its time does not count as training
