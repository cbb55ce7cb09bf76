"""Gradients that a step would leave out, or use before they are summed."""

import warnings
from collections.abc import Collection
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from common.errors import GuardWarning, UserError
from common.uneven.guards.gradient_watch import GradientWatch, Versions
from common.uneven.guards.same import require_same_network
from common.uneven.guards.state import ModelState
from common.uneven.guards.words import shown
from common.uneven.options.global_batch import needs_whole_parts
from common.uneven.options.memory import wanted_memory
from common.uneven.options.timer import StepTimer

IS_REDUCED = "is_summed_over_ranks"  # an attribute that `ddp.wrap` gives the parameters whose gradients it sums


class Guard:
    """Checks each micro-batch of a wrapped model, and each step after its last backward.

    What a step cannot do without is checked in each: that its gradients are there, and summed once. What would go on
    being wrong is looked for in the first steps, and then once in each round of the timer's.
    """

    def __init__(self, net: torch.nn.Module, layout_dependent: Collection[str] = (), whole_parts: bool = False):
        self.net = net
        # Listed once: to walk through BERT-base takes Python 0.2 ms, and each step needs them several times.
        self.parameters, self.layers = list(net.named_parameters()), list(net.named_modules())
        self.round = 0  # of the timer's, in which all was looked at last
        self.needs_whole_parts = whole_parts or needs_whole_parts(net)
        self.state = ModelState(self.layers, layout_dependent)
        self.in_micro_batch = False  # within the model's `no_sync`
        self.exchanges = 0  # within a micro-batch
        self.reduced_item = 0  # the number of the loader's item whose gradients were summed last
        self.begun_item = 0  # of which some micro-batches have run, and not the last
        self.has_trained = False  # in training mode

    def watch(self, timer: StepTimer, ranks: Any) -> None:
        """Begin, once DDP has sent rank 0's buffers. `ranks` is the process group that gradients are summed over."""
        self.timer, self.ranks, self.models = timer, ranks, timer.models
        self.number = len(self.models) + 1  # in the order of `wrap`
        self.state.begin()
        self.trained = {name: one for name, one in self.parameters if one.requires_grad}
        self.watched = GradientWatch(self.parameters)

    @property
    def looks(self) -> bool:
        """Whether this step is one in which all is looked at."""
        return self.round != self.timer.round or self.watched.hooked_steps > 0

    def begin_micro_batch(self, is_last: bool) -> None:
        """Call before forward and backward of a micro-batch."""
        self.require_whole_part(is_last)
        self.say_no_training()
        self.others: list[tuple[Guard, Versions]] = []
        if self.looks:
            self.watched.begin_micro_batch()
            self.others = [(one.guard, one.guard.watched.versions()) for one in self.models if one.guard is not self]
        if is_last and len(self.models) > 1 and dist.get_world_size() > 1:
            # A rank that skips one would add to another's sums.
            require_same_network(self.number, self.timer.device, self.ranks)
        self.exchanges = 0

    def end_micro_batch(self, is_last: bool) -> None:
        """Call after forward and backward of a micro-batch."""
        if self.exchanges > 1:
            raise _summed_twice()
        self.watched.end_backward()
        for guard, before in self.others:
            guard.watched.require_untouched(before, guard.net)
        self.watched.end_micro_batch(is_last, self.looks)
        if is_last:
            self.require_complete(all_reduced=self.timer.is_marked("ready"))

    def require_not_summed(self) -> None:
        """Raise UserError before a backward where the gradients of this micro-batch have been summed already."""
        if self.exchanges:
            raise _summed_twice()

    def too_large(self, error: Exception) -> UserError:
        """What to say of a micro-batch that does not fit."""
        return UserError(
            f"a micro-batch does not fit into the memory of {self.timer.device} ({wanted_memory(error)}): give a "
            "smaller --micro-batch, one for each rank (8x64,2x16), or auto, which measures before the first step; the "
            "result stays the same"
        )

    def require_complete(self, all_reduced: bool) -> None:
        """Raise UserError after a step's last backward unless every parameter has its gradient, and no buffer has
        changed."""
        self.require_all_reached(all_reduced)
        if self.looks:
            self.require_still_frozen()
            self.state.require_same_buffers()
        if self.watched.hooked_steps >= 0:
            self.state.say_changed_tensors(is_last_look=self.watched.hooked_steps == 0)
        self.round = self.timer.round

    def require_still_frozen(self) -> None:
        """Raise UserError for a gradient of a parameter that was frozen when `wrap` was called."""
        more = [one for one in self.parameters if one[0] not in self.trained and one[1].requires_grad]
        if found := [name for name, one in more if one.grad is not None and not hasattr(one, IS_REDUCED)]:
            raise UserError(
                f"{shown(found)} was frozen at wrap() and trains now, but its gradient is not summed over the ranks, "
                "so each would train its own copy: do not freeze it, and train it with a learning rate of 0 until "
                "then, or save, end, and go on with --resume in a script that does not freeze it"
            )

    def require_no_gradients(self, same_step: bool) -> None:
        """Raise UserError if there are gradients, which have been summed over the ranks already: in the same step, or
        in the one before, as far as no micro-batch of this one has run. Of the latter the first steps suffice."""
        if not same_step and (self.watched.noted or self.watched.hooked_steps <= 0):
            return
        if any(one.grad is not None and one.grad.any() for _, one in self.parameters):
            if same_step:
                raise _summed_twice()
            raise UserError(
                "the gradients of the step before are still there, and would be summed over the ranks once more: call "
                "optimizer.zero_grad() at the end of each step"
            )

    def say_no_training(self) -> None:
        """Warn once of a model that has trained in training mode, and now does not."""
        if self.has_trained and not self.net.training:
            warnings.warn(
                "the model trains in evaluation mode, without dropout: call net.train() after an evaluation",
                GuardWarning,
                stacklevel=2,
            )
        self.has_trained = self.net.training

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
        if not all_reduced or any(one.grad is None and one.requires_grad for one in self.trained.values()):
            missing = [name for name, one in self.trained.items() if one.requires_grad and one.grad is None]
            frozen = [name for name, one in self.parameters if name in self.trained and not one.requires_grad]
            if frozen:
                raise UserError(
                    f"{shown(frozen)} was frozen after wrap(), and the ranks wait for its gradient: freeze before "
                    "wrap(), or from now on train it with a learning rate of 0, or save, end, and go on with --resume "
                    "in a script that freezes it before wrap()"
                )
            where = "; so must the function that wrap() was given" if same_on_every_rank else ""
            if missing == list(self.trained) and not same_on_every_rank:
                raise UserError(
                    "no backward has run within this `with model.no_sync(enabled=not is_last):`: put forward and "
                    "backward of each micro-batch into it, also of an empty one"
                )
            names = shown(missing) or (
                "some parameters in the last micro-batch (did the loss call the module itself, and not what wrap() "
                "returned?)"
            )
            names += " with an empty batch" if same_on_every_rank else ""  # that `wrap` tries
            raise UserError(
                f"backward did not reach {names}, and the other ranks would wait for the gradients: let every forward "
                "use all parameters on every rank, add "
                "`0.0 * parameter.sum()` to the loss where one is not used, or freeze it with requires_grad_(False); "
                f"networks that have losses of their own each need a wrap(){where}",
                same_on_every_rank=same_on_every_rank,
            )


def _summed_twice() -> UserError:
    return UserError(
        "the gradients of this step would be summed over the ranks twice: add up the losses of a micro-batch and call "
        "backward once; write `enabled=not is_last` in the `with model.no_sync` around it; or give all of its "
        "backwards but the last a `with model.no_sync():` of their own, without enabled="
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
        if unsummed := [str(tuple(one.shape)) for one in trained if not hasattr(one, IS_REDUCED)]:
            warnings.warn(
                f"an optimizer trains parameters of shape {shown(unsummed)} that no wrap() has: their gradients are "
                "not summed over the ranks, so each rank trains a copy of its own; or, with plain DDP, they are "
                "averages over ranks, though these have different numbers of samples. Give their network a wrap() and "
                "a no_sync, unless that is what you want",
                GuardWarning,
                stacklevel=3,
            )
