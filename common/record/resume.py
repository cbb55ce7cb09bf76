"""`--resume`: load a checkpoint on every rank. Rank 0 reads it, so the nodes need no shared disk."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.console import say
from common.errors import UserError
from common.join.members import Members
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record.checkpoint import Checkpoint, find, latest_name, point_latest
from common.record.lock import lock
from common.state import Stateful, broadcast_tree, fill
from common.uneven.options.local_sgd import LocalSGD


def resume(
    group: Group,
    members: Members,
    options: RunOptions,
    folder: Path,
    model: torch.nn.Module,
    states: dict[str, Stateful],
    data_fingerprint: dict[str, Any],
    config: dict[str, Any],
) -> int:
    """Load the checkpoint that --resume asks for on every rank. Returns its optimizer steps, or 0 if there is none.

    Rank 0 reads the checkpoint, checks that it was written with the same data (`data_fingerprint`) and the same flags
    (`config`, which --eval-only does not need), and sends `states` to the other ranks; these are
    the same as in `checkpoint.save`. The weights stay on rank 0:
    DistributedDataParallel sends them when it wraps the model. Every rank must call this. Raises UserError on every
    rank, also for a state that the checkpoint lacks, or that only the checkpoint has.
    """
    _require_all_optimizers(model, states)
    _require_all_schedulers(states)
    if (step := members.restore(folder, model, states)) is not None:
        return step
    if options.resume is None:
        members.keep(folder, 0, model, states)
        return 0
    found: Checkpoint | None = None
    with group.others_wait("rank 0, which reads the checkpoint"):
        if group.worker.is_main:
            found = _find_wanted(options.resume, folder)
            if found:
                found.require(data_fingerprint)
                if not options.eval_only:
                    found.require(config, prefix="--")
                found.load_model(model)
                found.load_training(may_have_more=options.eval_only, **states)
                if not options.eval_only:
                    _go_back_to(found, folder / "checkpoints")
                say(f"resuming from {found.path}", rank=0)
            else:
                say(f"--resume: there is no checkpoint in {folder} yet: starting from the beginning", rank=0)
    state = {"step": 0, "states": {}}
    if found:
        state = {"step": found.state["step"], "states": {name: one.state_dict() for name, one in states.items()}}
    received = broadcast_tree(state, group.device)
    for buffer in model.buffers():  # not every version of torch sends them when DDP wraps the model
        dist.broadcast(buffer, src=0)
    if not group.worker.is_main:
        for name, saved in received["states"].items():
            fill(states[name], saved)
    members.keep(folder, received["step"], model, states)
    return received["step"]


def _require_all_optimizers(model: torch.nn.Module, states: dict[str, Any]) -> None:
    """Raise UserError unless the optimizers among the parts hold the trainable parameters of the model, and no more.

    DDP does not reduce the gradients of others, and no checkpoint would have them.
    """
    optimizers = {name: part for name, part in states.items() if isinstance(part, torch.optim.Optimizer)}
    held = {
        id(one): name for name, part in optimizers.items() for group in part.param_groups for one in group["params"]
    }
    missing = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in held]
    if optimizers and missing:
        raise UserError(
            f"no optimizer among the parts of a checkpoint holds {missing[0]}: give every optimizer to resume(), "
            "or freeze what is not trained with requires_grad_(False)",
            same_on_every_rank=True,
        )
    known = {id(one) for one in model.parameters()}
    if strangers := [name for key, name in held.items() if key not in known]:
        raise UserError(
            f"the part {strangers[0]} of a checkpoint trains a parameter that is not in the model, so its gradient "
            "would not be summed over the ranks, and it would not be saved: make it an nn.Parameter of the module that "
            "resume() and wrap() get",
            same_on_every_rank=True,
        )


def _require_all_schedulers(states: dict[str, Any]) -> None:
    """Raise UserError if an optimizer has a schedule of learning rates that is not among the parts.

    A scheduler of torch notes `initial_lr` in the optimizer that it changes. A part of an unknown class may hold it.
    """
    known = torch.optim.Optimizer | torch.amp.GradScaler | torch.nn.Module | LocalSGD
    others = [part for part in states.values() if not isinstance(part, known)]
    for name, part in states.items():
        scheduled = isinstance(part, torch.optim.Optimizer) and any("initial_lr" in one for one in part.param_groups)
        if scheduled and not any(getattr(other, "optimizer", part) is part for other in others):
            raise UserError(
                f"the part {name} of a checkpoint has a schedule of learning rates, but no part is its scheduler, so "
                "a resumed run would begin the schedule anew: give the scheduler to resume() too",
                same_on_every_rank=True,
            )


def _find_wanted(wanted: str, folder: Path) -> Checkpoint | None:
    if wanted == "auto":
        return find(folder)
    if not Path(wanted).is_dir():
        raise UserError(f"--resume {wanted}: there is no such directory: name a checkpoint, or a run's --out-dir")
    found = find(Path(wanted))
    if found is None:
        raise UserError(f"--resume {wanted}: there is no checkpoint in it: name a checkpoint, or a run's --out-dir")
    return found


def _go_back_to(found: Checkpoint, folder: Path) -> None:
    """Point `latest` to the checkpoint that this run continues from. If the run is killed before its next save, newer
    checkpoints in its folder do not count."""
    if found.path.parent.resolve() == folder.resolve() and found.path.name != latest_name(folder):
        try:
            with lock(folder.parent):  # a run that is still writing there keeps its own `latest`
                point_latest(folder, found.path.name)
        except OSError as error:
            raise UserError(
                f"--resume: {folder} cannot be written: {error.strerror}", same_on_every_rank=True
            ) from None
