"""How a run begins once its model is there: the model is wrapped, the files are opened, and what is due is found."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from common.launch import cli
from common.run.checkpointer import Checkpointer
from common.run.ending import Ending
from common.run.log import StepLog
from common.run.micro_batches import largest_micro_batches
from common.run.schedule import find_due, wants_evaluation
from common.uneven import ddp
from common.uneven.guards.fingerprint import fingerprint
from common.uneven.guards.same import description, require_same
from common.uneven.options.balance import Balancer

if TYPE_CHECKING:
    from common.run.run import Run


def wrap_model(
    run: "Run", net: torch.nn.Module, compute_loss: Callable[[torch.nn.Module, Any], Any], dynamic: bool, **of_wrap: Any
) -> ddp.UnevenDistributedDataParallel:
    """`net` wrapped as the flags ask for, with the micro-batches of each rank. Every rank must call this."""
    args, batches, given = run.args, run.batches, cli.micro_batches(run.args, run.worker.world_size)
    if run.members.may_change:
        run.members.have_loaded(_loaded(run, net, of_wrap))
    run.micro_batches = given or largest_micro_batches(run, net, compute_loss)
    batches.micro_batch = run.micro_batches[run.worker.rank]
    compiled = "dynamic" if args.compile and dynamic else args.compile
    links = {"compress": args.compress, "nodes": run.nodes}
    require_same(_held_out(run, of_wrap), "every rank must read the same data, in the same order")
    model = ddp.wrap(net, batches, compute_loss, compiled=compiled, **links, **of_wrap)
    run.balancer = Balancer(batches.plan, batches.sampler, batches.timer, model, on=args.balance == "auto")
    return model


def open_files(run: "Run", untrained_loss: float | None) -> None:
    """Open the log and the checkpoints, and find what is due before the first step. Every rank must call this."""
    run.log = StepLog(run, untrained_loss)
    if run.args.eval_only:
        run.evaluation_is_due, run.total_steps = True, run.step
        return
    facts = {"micro_batches": run.micro_batches, **run.facts}
    has_checkpoints = run.log.open_together(run.folder, run.step, run.total_steps, facts)
    goes_on = run.step > 0 and run.members.generation > 0
    run.checkpointer = Checkpointer(run, wants_one=goes_on and not has_checkpoints)
    run.ending = Ending(run.group, run.members)
    run.log.asks = lambda: bool(run.ending.signal or run.members.newcomers_wait)
    if goes_on:  # what was due after the last step may not have been done
        find_due(run, wants_evaluation(run, run.step))


def _held_out(run: "Run", of_wrap: dict[str, Any]) -> dict[str, str]:
    """What tells the held-out sets, which every rank must have read alike."""
    if "the data" in of_wrap.get("layout_dependent", ()):
        return {}
    return {f"held-out set {number}": one.data_fingerprint() for number, one in enumerate(run.held_out, 1)}


def _loaded(run: "Run", net: torch.nn.Module, of_wrap: dict[str, Any]) -> dict[str, str]:
    """What a process must have loaded too that is let in."""
    loaded = {**run.data_fingerprint, **_held_out(run, of_wrap), "the model": fingerprint(description(net))}
    if "the data" not in of_wrap.get("layout_dependent", ()):
        loaded["the training set"] = run.batches.data_fingerprint()
    return {name: str(value) for name, value in loaded.items()}
