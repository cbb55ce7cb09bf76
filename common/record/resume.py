"""`--resume`: load a checkpoint on every rank. Rank 0 reads it, so the nodes need no shared disk."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from common.console import say
from common.errors import UserError
from common.files import reading
from common.join.members import Members
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record.checkpoint import Checkpoint, find, point_latest
from common.record.latest import latest_name
from common.record.lock import lock
from common.state import Stateful, broadcast_tree, fill


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
    (`config`, which --eval-only does not need), and sends `states` to the other ranks; these are the same as in
    `checkpoint.save`. The weights stay on rank 0: DistributedDataParallel sends them when it wraps the model. Every
    rank must call this. Raises UserError on every rank, also for a state that only the checkpoint has, or lacks.
    """
    _require_all_optimizers(model, states)
    if not members.generation:
        require_all_schedulers(states)
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
                found.require({} if options.eval_only else config, prefix="--")
                found.load_model(model)
                found.load_training(may_have_more=options.eval_only, **states)
                if not options.eval_only:
                    _go_back_to(found, folder / "checkpoints")
                before, now = found.state.get("precision"), options.flags.get("precision")
                other = f", which was trained in {before}, in {now}" * (before not in (None, now))
                apart = ": all nodes begin with rank 0's state of the optimizer" * bool(config.get("sync_every"))
                say(f"resuming from {found.path}{other}{apart}", rank=0)
            else:
                say(f"--resume: there is no checkpoint in {folder} yet: starting from the beginning", rank=0)
    saved = {name: one.state_dict() for name, one in states.items()} if found else {}
    received = broadcast_tree({"step": found.state["step"] if found else 0, "states": saved}, group.device)
    for buffer in model.buffers():  # not every version of torch sends them when DDP wraps the model
        dist.broadcast(buffer, src=0)
    if not group.worker.is_main:
        for name, state in received["states"].items():
            fill(states[name], state)
    members.keep(folder, received["step"], model, states)
    return received["step"]


def _require_all_optimizers(model: torch.nn.Module, states: dict[str, Any]) -> None:
    """Raise UserError unless the optimizers among the parts hold the trainable parameters of the model, and no more.

    DDP does not reduce the gradients of others, and no checkpoint would have them.
    """
    optimizers = {name: part for name, part in states.items() if isinstance(part, torch.optim.Optimizer)}
    groups = [(name, group["params"]) for name, part in optimizers.items() for group in part.param_groups]
    held = {id(one): name for name, parameters in groups for one in parameters}
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
            f"the part {strangers[0]} of a checkpoint trains a parameter that is not in the model, so its "
            "gradient would not be summed over the ranks, and it would not be saved: make it an nn.Parameter of the "
            "module that resume() and wrap() get",
            same_on_every_rank=True,
        )


def require_all_schedulers(states: dict[str, Stateful]) -> None:
    """Raise UserError for a scheduler of torch that changes one of the optimizers, and is neither among the states nor
    an attribute of one: a resumed run would begin it anew."""
    for optimizer in [one for one in states.values() if isinstance(one, torch.optim.Optimizer)]:
        for referrer in gc.get_referrers(optimizer):
            for one in gc.get_referrers(referrer) if type(referrer) is dict else [referrer]:
                if isinstance(one, LRScheduler) and one.optimizer is optimizer:
                    require_given(one, states)


class Averages:
    """Averages of the weights of `net` by torch's AveragedModel, as they are after the first step. Others cannot be
    seen."""

    def __init__(self, net: torch.nn.Module):
        shapes = [one.shape for one in net.parameters()]
        found = [one for one in gc.get_objects() if issubclass(type(one), AveragedModel)]
        alike = [one for one in found if [own.shape for own in one.parameters()] == shapes]
        # One that has been updated more than once belongs to another training.
        self.known = [weakref.ref(one) for one in alike if int(one.n_averaged) <= 1]

    def require_given(self, states: dict[str, Stateful]) -> None:
        """Raise UserError for one that has begun, and is neither among the states nor an attribute of one."""
        for average in [one() for one in self.known]:
            if average is not None and int(average.n_averaged):
                require_given(average, states)


def require_given(found: object, states: dict[str, Stateful]) -> None:
    """Raise UserError for what a step changes, and is neither among the states nor an attribute of one."""
    if not any(_reaches(one, found) for one in states.values()):
        raise UserError(
            f"{type(found).__name__} changes from step to step, but run.resume() was not given it, so a resumed "
            "run would begin it anew: give it too, by any name, as in run.resume(net, optimizer=optimizer, "
            "scheduler=scheduler)"
        )


def _reaches(one: Any, wanted: object) -> bool:
    """Whether this is the object, or has it as an attribute, also within lists, dicts and schedulers. A scheduler's
    optimizer is none of its state."""
    own = "optimizer" if isinstance(one, LRScheduler) else None
    attributes = [value for name, value in getattr(one, "__dict__", {}).items() if name != own]
    attributes += itertools.chain(*(value for value in attributes if isinstance(value, list | tuple)))
    attributes += itertools.chain(*(value.values() for value in attributes if isinstance(value, dict)))
    inner = (value for value in attributes if isinstance(value, LRScheduler))
    return any(value is wanted for value in [one, *attributes]) or any(_reaches(value, wanted) for value in inner)


def _find_wanted(wanted: str, folder: Path) -> Checkpoint | None:
    if wanted == "auto":
        return find(folder)
    with reading(Path(wanted), f"--resume {wanted}"):
        if not Path(wanted).is_dir():
            raise UserError(f"--resume {wanted}: there is no such directory: name a checkpoint, or a run's --out-dir")
        found = find(Path(wanted))
    if found is None:
        raise UserError(f"--resume {wanted}: there is no checkpoint in it: name a checkpoint, or a run's --out-dir")
    return found


def _go_back_to(found: Checkpoint, folder: Path) -> None:
    """Point `latest` to the checkpoint that this run continues from. If the run is killed before its next save, newer
    checkpoints in its folder do not count."""
    name = f"step-{found.state['step']:08d}"  # `latest` may be a copy of it
    if found.path.parent.resolve() == folder.resolve() and name != latest_name(folder):
        try:
            with lock(folder.parent):  # a run that is still writing there keeps its own `latest`
                point_latest(folder, name)
        except OSError as error:
            raise UserError(
                f"--resume: {folder} cannot be written: {error.strerror}", same_on_every_rank=True
            ) from None
