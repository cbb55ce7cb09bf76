"""How a run leaves its loop: what is not yet written or saved is, and rank 0 draws the curves."""

import contextlib
from typing import TYPE_CHECKING

from common.run.schedule import find_due

if TYPE_CHECKING:
    from common.run.run import Run


def leave(run: "Run") -> None:
    """End a run whose loop has ended without an error. Every rank must call this."""
    all_here = run.group.all_come("the end of the loop")
    if run.log.noted or run.checkpointer.saved_step != run.step:  # the loop has ended before its last step
        if all_here:
            _write_last_step(run)
        else:
            run.line(f"note: ranks end the loop at different times: not all of step {run.step} is written or saved")
    run.finish_saving()
    run.ending.interrupts.close()
    # The others would take rank 0 for one that is still in the loop, if it drew for long.
    waits = run.group.run_independently("rank 0, which draws curves.png")
    with waits if all_here else contextlib.nullcontext():
        run.log.summary(run.step, **run.summary)


def _write_last_step(run: "Run") -> None:
    find_due(run, evaluates=False, ends=True)
    if run.nodes.is_synchronized:
        run.save(write_extra=run.checkpointer.write_extra)
    else:
        run.line(f"note: step {run.step} is not saved: it is between two exchanges of --sync-every")
