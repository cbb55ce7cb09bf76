"""In which order a trainer calls a Run: what it has left out is named, and what to write."""

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.errors import UserError
from common.record.resume import require_given

if TYPE_CHECKING:
    from common.run.run import Run


def before_resume(run: "Run") -> None:
    if not hasattr(run, "batches"):
        raise UserError(
            "run.global_batches(train_set) is missing: call it before run.resume(). It makes the loader whose steps "
            "are trained, in place of a DataLoader"
        )


def before_wrap(run: "Run") -> None:
    if not hasattr(run, "net"):
        raise UserError(
            "run.resume(net, optimizer=..., scheduler=...) is missing: call it before run.wrap(), also where nothing "
            "is resumed"
        )
    if hasattr(run, "log"):
        raise UserError(
            "run.wrap() twice: a run has one model, wrapped once. Give a second network to "
            "common.uneven.ddp.wrap(net, batches, compute_loss), and freeze or add layers before wrap()"
        )


def watch_optimizers(run: "Run") -> None:
    """From now on, raise UserError where an optimizer that `resume` was not given takes a step of the model."""
    known = set(map(id, run.net.parameters()))

    def look(one: torch.optim.Optimizer, *_: Any) -> None:
        if one not in run.optimizers:
            if any(id(parameter) in known for group in one.param_groups for parameter in group["params"]):
                require_given(one, run.states)
            run.optimizers.add(one)

    run.group.at_end.callback(register_optimizer_step_pre_hook(look).remove)


def before_backward(run: "Run") -> None:
    if not hasattr(run, "model"):
        raise UserError("run.backward() before run.wrap(net, compute_loss), whose model is to be trained")
    if run.model.guard.in_micro_batch:
        run.model.guard.require_not_summed()


def before_optimizer_step(run: "Run", optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    if not hasattr(run, "model"):
        raise UserError("run.optimizer_step() before run.wrap(net, compute_loss), whose model is to be trained")
    if run.batches.last.step != run.step:
        raise UserError(f"step {run.step + 1} has had no run.end_step(): call it at the end of each step")
    groups = [group["params"] for one in optimizers for group in one.param_groups]
    if all(one.grad is None for one in itertools.chain(*groups)):
        _require_backward(run)


def _require_backward(run: "Run") -> None:
    if run.precision.backpropagated is None:
        raise UserError(
            "this step has had no run.backward(loss): write that in place of loss.backward(), of which the log and "
            "fp16 know nothing; and for an empty micro-batch too, with which its rank takes part in the exchange"
        )


def before_end_step(run: "Run") -> None:
    if not run.rates:
        raise UserError(
            "this step has had no run.optimizer_step(optimizer, clip_norm=...): write that in place of "
            "optimizer.step(), which knows nothing of --clip-norm, --on-nan and fp16"
        )
    _require_backward(run)


def before_save(run: "Run") -> None:
    if not hasattr(run, "checkpointer"):
        raise UserError(
            "--eval-only writes no checkpoint: call run.save() after a step, or where run.checkpoint_is_due"
        )
