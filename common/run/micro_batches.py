"""--micro-batch auto: the largest micro-batch of each rank, found by trying."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from common.uneven import ddp
from common.uneven.options.memory import fitting_micro_batches

if TYPE_CHECKING:
    from common.run.run import Run


def largest_micro_batches(
    run: "Run", net: torch.nn.Module, compute_loss: Callable[[torch.nn.Module, Any], Any]
) -> list[int]:
    """The rows in one forward of each rank. Every rank must call this."""

    def trial(rows: int) -> None:
        with run.autocast():
            loss = ddp.loss_of(compute_loss(net, run.batches.sample_batch(rows)))
        loss.backward()

    plan = run.batches.plan
    most = plan.global_batch if run.args.balance == "auto" else plan.shares[run.worker.rank]
    return fitting_micro_batches(net, trial, most, run.group.run_independently("the largest micro-batch of each rank"))
