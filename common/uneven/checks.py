"""What would make the result depend on the layout, or wrong on all layouts, is refused by name.

`ddp.wrap` and `no_sync` of its model run these checks; `first_loss_problem` is for a trainer to print.
"""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from common.errors import UserError
from common.uneven.fingerprint import fingerprint
from common.uneven.global_batch import GlobalBatchNorm, needs_whole_parts
from common.uneven.precision import IS_SUMMED

HOOKED_STEPS = 3
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
SHOWN = 3  # names in a message
NEAR = 1.3  # a first loss is within this factor of a guess's


def require_same(values: Mapping[str, object]) -> None:
    """Raise the same UserError on every rank unless `values` are the same on all. Every rank must call this."""
    mine = {name: str(value) for name, value in values.items()}
    if len(set(_gathered(fingerprint(mine)))) == 1:
        return
    first, *others = _gathered(mine)  # only now, because they are large
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            here, there = first.get(name, "missing"), other.get(name, "missing")
            if here != there:
                raise UserError(
                    f"{name} is {there} on rank {rank}, but {here} on rank 0: every rank must build the same model "
                    "and read the same data",
                    same_on_every_rank=True,
                )


def _gathered(value: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def description(net: torch.nn.Module) -> dict[str, str]:
    """What must be the same on every rank for their gradients to match: modules, parameters and buffers, by name."""
    modules = {f"module {name or 'model'}": _class_and_settings(module) for name, module in net.named_modules()}
    parameters = {
        f"parameter {name}": f"{tuple(one.shape)} {one.dtype}" + ("" if one.requires_grad else ", frozen")
        for name, one in net.named_parameters()
    }
    buffers = {f"buffer {name}": f"{tuple(one.shape)} {one.dtype}" for name, one in net.named_buffers()}
    return parameters | buffers | modules


def _class_and_settings(module: torch.nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def refuse_batch_norm(net: torch.nn.Module, layout_dependent: Collection[str] = ()) -> None:
    """Raise UserError for layers whose statistics would be those of one rank's samples, except those named."""
    found = [
        f"{name} ({type(layer).__name__})"
        for name, layer in net.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, GlobalBatchNorm)
        if (layer.training or not layer.track_running_stats) and not _is_named(name, layout_dependent)
    ]
    if found:
        raise UserError(
            f"{_shown(found)} would compute statistics of this rank's samples, or with SyncBatchNorm of those of one "
            "micro-batch, so the result would depend on the layout: use GroupNorm, or global_batch_norm(model) of "
            "common.uneven.global_batch before the optimizer is made; or freeze the layers with .eval(), or name them "
            "in wrap(..., layout_dependent=[...])",
            same_on_every_rank=True,
        )


class Guard:
    """Checks a step after its last backward: every parameter has its gradient, and no buffer has changed."""

    def __init__(self, net: torch.nn.Module, layout_dependent: Collection[str] = (), whole_parts: bool = False):
        self.net = net
        # Listed once: to walk through BERT-base takes Python 0.2 ms, and each step needs them several times.
        self.parameters, self.layers = list(net.named_parameters()), list(net.named_modules())
        self.needs_whole_parts = whole_parts or needs_whole_parts(net)
        self.may_change = {
            f"{name}.{buffer}".lstrip(".")
            for name, layer in self.layers
            for buffer, _ in layer.named_buffers(recurse=False)
            if isinstance(layer, GlobalBatchNorm) or _is_named(f"{name}.{buffer}".lstrip("."), layout_dependent)
        }
        self.versions = dict(self._buffer_versions())
        self.noted: dict[str, tuple[int, int]] = {}  # gradients after the last micro-batch, within a step
        # As backward has left them. The first steps suffice: who changes gradients there does so in every step.
        self.left: dict[str, tuple[int, int]] = {}
        self.hooks = [
            one.register_post_accumulate_grad_hook(partial(self._note_left, name))
            for name, one in self.parameters
            if one.requires_grad
        ]
        self.hooked_steps = HOOKED_STEPS

    def _buffer_versions(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer_name, layer in self.layers:
            for own_name, buffer in layer._buffers.items():  # named_buffers() takes five times as long
                name = f"{layer_name}.{own_name}".lstrip(".")
                if buffer is not None and name not in self.may_change:
                    yield name, (id(buffer), buffer._version)

    def require_whole_part(self, is_last: bool) -> None:
        """Raise UserError if a part is cut into micro-batches, and a layer needs the statistics of the whole."""
        if self.needs_whole_parts and not is_last:
            raise UserError(
                "statistics or a loss over the global batch need this rank's whole part in one forward: leave out "
                "--micro-batch, or, if it is BatchNorm's statistics, use GroupNorm"
            )

    def require_all_reached(self, all_reduced: bool, same_on_every_rank: bool = False) -> None:
        """Raise UserError if backward has not reached a trainable parameter.

        `all_reduced` says whether DDP has exchanged all gradients, which it does only when all of them are there.
        """
        missing = [name for name, one in self.parameters if one.requires_grad and one.grad is None]
        if missing or not all_reduced:
            where = "; so must the function that wrap() was given" if same_on_every_rank else ""
            raise UserError(
                f"backward did not reach {_shown(missing) or 'some parameters in the last micro-batch'}, and the other "
                "ranks would wait for the gradients: let every forward use all parameters on every rank, add "
                "`0.0 * parameter.sum()` to the loss where one is not used, or freeze it with requires_grad_(False); "
                f"networks that have losses of their own each need a wrap(){where}",
                same_on_every_rank=same_on_every_rank,
            )

    def gradients(self) -> dict[str, tuple[int, int]]:
        """By name of a parameter, which tensor its gradient is, and how often that has been written."""
        return {name: (id(one.grad), one.grad._version) for name, one in self.parameters if one.grad is not None}

    def _note_left(self, name: str, one: torch.Tensor) -> None:
        if one.grad is not None:
            self.left[name] = id(one.grad), one.grad._version

    def note_gradients(self, is_last: bool) -> None:
        """Note the gradients after a micro-batch, for `require_noted_gradients`; the step's last one ends that. Raises
        UserError if they are not those that backward has left."""
        self.noted = {} if is_last else self.gradients()
        if self.hooks and not is_last and any(self.noted.get(name) != left for name, left in self.left.items()):
            raise _changed_gradients()
        self.hooked_steps -= is_last
        if self.hooked_steps <= 0:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []

    def require_noted_gradients(self) -> None:
        """Raise UserError if a gradient has changed since the last micro-batch of this step. Call it before each."""
        self.left.clear()
        if self.noted and self.noted != self.gradients():
            raise _changed_gradients()

    def require_untouched(self, before: dict[str, tuple[int, int]]) -> None:
        """Raise UserError if the gradients are not those that `gradients` found: another network's loss went through
        this one, and no rank exchanges what that left here."""
        after = self.gradients()
        if changed := [name for name in after if before.get(name) != after[name]]:
            raise UserError(
                f"the backward of one wrapped network has left gradients in {_shown(changed)} of another one (a "
                f"{type(self.net).__name__}), which "
                "are not summed over the ranks: freeze that one with requires_grad_(False) meanwhile, or, if one loss "
                "trains both, make them one module and wrap that"
            )

    def require_same_buffers(self) -> None:
        """Raise UserError if training has changed a buffer since `wrap`."""
        changed = [name for name, version in self._buffer_versions() if self.versions.get(name) != version]
        if changed:
            raise UserError(
                f"training changes the buffer {_shown(changed)}, on each rank by its own samples, so the result would "
                "depend on the layout, and a checkpoint would have rank 0's: compute it from the global batch (see "
                "common.uneven.global_batch), or name it in wrap(..., layout_dependent=[...]) if that does not matter"
            )


def _changed_gradients() -> UserError:
    return UserError(
        "a gradient has changed between two micro-batches of a step, before it was summed over the ranks: clip or "
        "scale gradients, step and zero_grad after the last one, in which each network must run"
    )


class UnsummedGradients:
    """Called before each step of any optimizer: says in the first one if its gradients are those of one rank."""

    def __init__(self) -> None:
        self.seen: WeakSet[torch.optim.Optimizer] = WeakSet()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self.seen:
            return
        self.seen.add(optimizer)
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if unsummed := [str(tuple(one.shape)) for one in trained if not hasattr(one, IS_SUMMED)]:
            warnings.warn(
                f"an optimizer trains parameters of shape {_shown(unsummed)} that no wrap() has: their gradients are "
                "not summed over the ranks, so each rank trains a copy of its own; or, with plain DDP, they are "
                "averages over ranks, though these have different numbers of samples. Give their network a wrap() and "
                "a no_sync, unless that is what you want",
                stacklevel=3,
            )


def say_noise(net: torch.nn.Module, *_: Any) -> None:
    """A hook before forward: says if an evaluation runs in training mode, with dropout or BatchNorm."""
    if torch.is_grad_enabled() or not net.training:
        return
    for name, layer in net.named_modules():
        if layer.training and (isinstance(layer, _BatchNorm) or (isinstance(layer, _DropoutNd) and layer.p > 0)):
            warnings.warn(
                f"a forward without gradients while {name} ({type(layer).__name__}) is in training mode: if this is an "
                "evaluation, call net.eval() before it and net.train() after it",
                stacklevel=2,
            )
            return


def ranks_that_differ(net: torch.nn.Module) -> list[int]:
    """The ranks whose weights are not bit by bit those of most ranks; of two ranks, the later one. Every rank must call
    this."""
    total = torch.zeros((), dtype=torch.int64, device=next(net.parameters()).device)
    for one in net.parameters():
        numbers = torch.view_as_real(one.detach()) if one.is_complex() else one.detach()
        bits = numbers.view(BITS[numbers.element_size()])
        total = total * 31 + bits.sum(dtype=torch.int64)  # wraps around
    everyone = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, total)
    sums = torch.stack(everyone).tolist()
    usual = max(sums, key=lambda one: (sums.count(one), -sums.index(one)))
    return [rank for rank, one in enumerate(sums) if one != usual]


def first_loss_problem(loss: float, expected: float) -> str:
    """What to print if the first loss of untrained weights is far from what it must be, else an empty string.

    Over C classes an untrained model is about right with probability 1/C, so its cross entropy is about ln(C). A loss
    that is not summed, or a wrong count, is wrong by a factor, and looks the same on every layout.
    """
    if not math.isfinite(loss) or expected / NEAR < loss < expected * NEAR:
        return ""
    return (
        f"warning: the first loss is {loss:.4g}, but an untrained model should begin near {expected:.4g}. "
        'Is it summed over the samples (reduction="sum"), and divided by the global count of what it is a mean over? '
        "Or are the initial weights too large, such as those of an nn.Embedding that is also the output layer?"
    )


def few_counted_problem(count: float, samples: int) -> str:
    """What to print if a loss is divided by less than the samples of its global batch, else an empty string."""
    if count >= samples:
        return ""
    return (
        f"warning: the loss of step 1 is divided by {count:g}, but its global batch has {samples} samples. Sum the "
        "loss over samples or tokens, and divide by their count over all ranks, not by the number of ranks or batches"
    )


def _is_named(name: str, allowed: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
