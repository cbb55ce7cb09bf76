"""The precision that the model computes in, and the loss scaling that fp16 needs."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.errors import RunError, UserError
from common.uneven.guards.gradients import IS_REDUCED

MOST_SKIPPED = 10  # steps in a row
SMALL = 2**17  # numbers of all parameters together
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp32; bf16 and fp16 as autocast over fp32 weights; fp64 for proofs.

    `dtype` is the type of weights, gradients and inputs. With `on_nan="skip"`, a step whose loss or gradient is not
    finite changes nothing; on a GPU that costs a wait for the device in each step. Otherwise `require_finite` ends the
    run.
    """

    def __init__(self, name: str, device: torch.device, on_nan: str = "stop"):
        self.name, self.device = name, device
        self.skips, self.skipped = on_nan == "skip", 0
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        # Gradients below 6e-8 vanish in fp16: scale the loss up for backward, and the gradients down before a step.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        # The losses that backward has had since `take_losses`: a number on a CPU, elsewhere a tensor, so nobody waits.
        self.backpropagated: float | torch.Tensor | None = None
        # Once backward has returned: their sum over all ranks, and how many of these ask for an exchange of steps.
        self.summed: torch.Tensor | None = None
        # The model and the optimizers of the last step, the round in which they were looked at, and the parameters.
        self.norm: Callable[[list[torch.Tensor]], torch.Tensor] = get_total_norm
        self.known: tuple[list[Any], int, list[torch.nn.Parameter]] = [], 0, []

    def autocast(self) -> AbstractContextManager:
        """Use around the forward pass only; backward uses the types that forward chose."""
        return torch.autocast(self.device.type, AUTOCAST[self.name]) if self.name in AUTOCAST else nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, scaled up under fp16."""
        mine = loss.detach()
        if mine.dim() or not mine.is_cpu:
            mine = mine.to(torch.float64, copy=True).sum()  # a copy, because the trainer may change its own
        number = mine.item() if mine.is_cpu else mine  # a tensor operation more would take longer
        self.backpropagated = number if self.backpropagated is None else self.backpropagated + number
        if self.skips:  # an infinite loss may have a finite gradient, with which no rank may take the step either
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
        self.scaler.scale(loss).backward(**options)

    def reduce_with_gradients(self, asks: bool) -> torch.Tensor:
        """What backward has had so far, for `StepTimer.at_exchange`. So every rank knows the loss of a step before it
        takes the step, and a rank that is lost afterwards takes nothing with it. This rank `asks` for an exchange of
        steps right after this one, or not."""
        self.summed = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.backpropagated is not None:
            self.summed[0] = self.backpropagated
        self.summed[1] = asks
        return self.summed

    def take_losses(self) -> tuple[float | torch.Tensor, torch.Tensor | None, bool]:
        """The sum of the losses that `backward` has had since the last call, here and, where it was summed beside the
        gradients, on all ranks; and whether a rank asks for an exchange of steps. There must have been one."""
        assert self.backpropagated is not None
        summed = self.summed
        everywhere, asked = (None, False) if summed is None else (summed[0], bool(summed[1] > 0))
        taken = self.backpropagated, everywhere, asked
        self.backpropagated = self.summed = None
        return taken

    def step(
        self, model: torch.nn.Module, clip_norm: float, *optimizers: torch.optim.Optimizer, round_of_checks: int = 0
    ) -> torch.Tensor:
        """Clip the gradients to a norm of `clip_norm` (infinity: not at all) and take a step of each optimizer.

        `model` must have the parameters that the optimizers train, and no others: they are clipped by their common
        norm. Raises UserError where it has not, and where a gradient is not summed over the ranks: that is looked at
        once in each `round_of_checks`.

        Returns the norm before clipping, a scalar on the device. Gradients are the same on every rank by now, so all
        ranks clip alike and, under fp16, skip the same steps.
        """
        known, checked_in, parameters = self.known
        if checked_in != round_of_checks or known != [model, *optimizers]:
            _require_summed_gradients(model, optimizers)
            parameters = list(model.parameters())
            self.known = [model, *optimizers], round_of_checks, parameters
            self.norm = norm_for(parameters)
        for one in optimizers:
            self.scaler.unscale_(one)
        gradients = [one.grad for one in parameters if one.grad is not None]
        norm = self.norm(gradients) if gradients else torch.zeros((), device=self.device)
        if math.isfinite(clip_norm):  # otherwise it would multiply all gradients by 1
            clip_grads_with_norm_(parameters, clip_norm, norm)
        if self.skips and self.name != "fp16" and self._is_skipped(norm):  # fp16's scaler skips such steps itself
            return norm
        for one in optimizers:
            self.scaler.step(one)
        self.scaler.update()
        return norm

    def _is_skipped(self, norm: torch.Tensor) -> bool:
        """Whether this step is left out: the same on every rank, because the gradient is. Raises RunError for many."""
        self.skipped = 0 if math.isfinite(norm.item()) else self.skipped + 1
        if self.skipped > MOST_SKIPPED:
            raise RunError(
                f"the gradient was not finite in {self.skipped} steps in a row (--on-nan skip): the checkpoint before "
                "them may be good; lower --lr, set --clip-norm, or look at the data",
                same_on_every_rank=True,
            )
        return bool(self.skipped)

    def require_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise RunError unless loss and gradient are finite. Under fp16 the scaler skips steps whose gradients
        overflow and lowers its scale, so only the loss counts there; with `on_nan="skip"`, nothing does."""
        if self.skips or (math.isfinite(loss) and (math.isfinite(grad_norm) or self.name == "fp16")):
            return
        what = f"gradient of step {step} is {grad_norm}" if math.isfinite(loss) else f"loss of step {step} is {loss}"
        fix = "lower --lr, set --clip-norm, or look at the data around that step: is the count that it is divided by 0?"
        if not math.isfinite(loss):
            fix += ' (a loss with reduction="mean" is not a number on a rank whose part is empty: sum it)'
        raise RunError(f"the {what}: {fix}; the checkpoints before it are intact", same_on_every_rank=True)


def norm_for(parameters: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """A function of gradients that returns their common norm, a scalar. It does what get_total_norm does, which first
    sorts them by their types; those of few numbers it puts into one vector, which takes a quarter of the time."""
    kinds = {(one.dtype, one.device) for one in parameters}
    if len(kinds) > 1:
        return get_total_norm
    if sum(one.numel() for one in parameters) > SMALL:
        return lambda gradients: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return lambda gradients: torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]))


def _require_summed_gradients(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    names = {id(one): name.removeprefix("module.") for name, one in model.named_parameters()}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(one): one for one in itertools.chain(*groups) if one.grad is not None}
    for key, one in trained.items():
        if key not in names:
            raise UserError(
                f"an optimizer trains a parameter {tuple(one.shape)} that the model of this step lacks, so it would "
                "not be clipped: give run.optimizer_step(..., model=) the module that has all of them, such as an "
                "nn.ModuleDict of both networks"
            )
        if not hasattr(one, IS_REDUCED):
            raise UserError(
                f"the gradient of {names[key]} is not summed over the ranks, so each rank would train its own copy: "
                "its network needs a wrap(), and its forward and backward a no_sync"
            )
    if left := [one for one in model.parameters() if one.grad is not None and id(one) not in trained]:
        raise UserError(
            f"run.optimizer_step was given no optimizer that trains {names[id(left[0])]}: give it all optimizers of "
            "this model, run.optimizer_step(one, other, clip_norm=...), or model=, a module that has no more than they "
            "train; freeze with requires_grad_(False) before wrap() what nothing trains"
        )
