"""Gradients that change between two micro-batches of a step, other than by a backward of their own model."""

from collections.abc import Sequence
from functools import partial

import torch

from common.errors import UserError
from common.uneven.guards.words import shown

HOOKED_STEPS = 3
Versions = dict[str, tuple[int, int]]  # by name of a parameter: which tensor its gradient is, how often it was written


class GradientWatch:
    """Watches the gradients of one model's parameters."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]):
        self.parameters = parameters
        self.noted: Versions = {}  # after the last micro-batch, within a step
        # As backward has left them. The first steps suffice: who changes gradients there does so in every step.
        self.left: Versions = {}
        self.hooked_steps = HOOKED_STEPS
        self.hooks = [
            one.register_post_accumulate_grad_hook(partial(self._note_left, name))
            for name, one in parameters
            if one.requires_grad
        ]

    def versions(self) -> Versions:
        """The gradients as they are now."""
        return {name: (id(one.grad), one.grad._version) for name, one in self.parameters if one.grad is not None}

    def _note_left(self, name: str, one: torch.Tensor) -> None:
        if one.grad is not None:
            self.left[name] = id(one.grad), one.grad._version

    def begin_micro_batch(self) -> None:
        """Raise UserError if a gradient has changed since the last micro-batch of this step."""
        self.left.clear()
        if self.noted and self.noted != self.versions():
            raise _changed_gradients()

    def end_backward(self) -> None:
        """Raise UserError if backward has not added to what was there."""
        for name, (one, version) in self.noted.items():
            if name in self.left and (self.left[name][0] != one or self.left[name][1] <= version):
                raise _changed_gradients()

    def end_micro_batch(self, is_last: bool, looks: bool) -> None:
        """Note the gradients, unless this was the last micro-batch of a step. Raises UserError if they are not those
        that backward has left."""
        self.noted = self.versions() if looks and not is_last else {}
        if self.hooks and not is_last and any(self.noted.get(name) != left for name, left in self.left.items()):
            raise _changed_gradients()
        self.hooked_steps -= is_last
        if self.hooked_steps <= 0:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []

    def require_untouched(self, before: Versions, model: torch.nn.Module) -> None:
        """Raise UserError if the gradients of `model` are not those that `versions` found: another network's loss went
        through it, and no rank exchanges what that left here."""
        after = self.versions()
        if changed := [name for name in after if before.get(name) != after[name]]:
            raise UserError(
                f"the backward of one wrapped network has left gradients in {shown(changed)} of another one (a "
                f"{type(model).__name__}), which are not summed over the ranks: freeze that one with "
                "requires_grad_(False) meanwhile, or, if one loss trains both, make them one module and wrap that"
            )


def _changed_gradients() -> UserError:
    return UserError(
        "a gradient has changed between two micro-batches of a step, before it was summed over the ranks: clip or "
        "scale gradients, step and zero_grad after the last one, in which each network must run"
    )
