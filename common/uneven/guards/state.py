"""What training must leave alone in a model: its buffers, and what it keeps outside of parameters and buffers."""

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator

import torch

from common.errors import GuardWarning, UserError
from common.uneven.guards.words import is_named, shown
from common.uneven.kept import version as version_of
from common.uneven.options.global_batch import GlobalBatchNorm


class ModelState:
    """The buffers and other tensors of a wrapped model, whose layers are listed by name."""

    def __init__(self, layers: list[tuple[str, torch.nn.Module]], layout_dependent: Collection[str]):
        self.layers, self.may_keep = layers, layout_dependent
        self.may_change = {
            f"{name}.{buffer}".lstrip(".")
            for name, layer in layers
            for buffer, _ in layer.named_buffers(recurse=False)
            if isinstance(layer, GlobalBatchNorm) or is_named(f"{name}.{buffer}".lstrip("."), layout_dependent)
        }
        self.kept: dict[str, tuple[torch.Tensor | None, float]] = {}  # that the model keeps, after the last step
        self.changed: set[str] = set()  # those of them that this step has changed
        self.has_warned = False

    def begin(self) -> None:
        """From now on no buffer may change."""
        # The buffers themselves: the number of one that was replaced may be that of the next.
        self.buffers = {name: (buffer, version) for name, buffer, version in self._buffer_versions()}

    def require_same_buffers(self) -> None:
        """Raise UserError if training has changed a buffer since `wrap`."""
        changed = []
        for name, buffer, version in self._buffer_versions():
            before, version_before = self.buffers.get(name, (None, 0))
            if buffer is not before or version != version_before:
                changed.append(name)
        if changed:
            raise UserError(
                f"training changes the buffer {shown(changed)}: by each rank's own samples, the result would depend on "
                "the layout, and a checkpoint would have rank 0's. Compute it from the global batch (by "
                "batch.sum_over_ranks, or see common.uneven.options.global_batch), and if that is done, or does not "
                "matter, name it in wrap(..., layout_dependent=[...])"
            )

    def say_changed_tensors(self, is_last_look: bool) -> None:
        """Warn once of a tensor or number that the model keeps, no buffer, where two steps in a row have changed it.
        Call it after each of the first steps."""
        if self.has_warned:
            return
        kept = {name: (one, number) for name, one, number in _kept(self.layers, self.may_keep)}
        before = {name: self.kept.get(name, (None, 0)) for name in kept}
        changed = {name for name in kept if kept[name][0] is not before[name][0] or kept[name][1] != before[name][1]}
        if found := sorted(changed & self.changed):
            warnings.warn(
                f"training changes {shown(found)}, which the model keeps outside of its parameters and buffers: no "
                "checkpoint has it, and what each rank makes of its own samples depends on the layout. If it is only "
                "looked at, name it in wrap(..., layout_dependent=[...])",
                GuardWarning,
                stacklevel=2,
            )
            self.has_warned = True
        self.kept, self.changed = ({}, set()) if is_last_look or self.has_warned else (kept, changed)

    def layout_dependent(self) -> list[torch.Tensor]:
        """The buffers that ranks may have in different ways."""
        named = [
            (f"{where}.{name}".lstrip("."), one) for where, layer in self.layers for name, one in layer._buffers.items()
        ]
        return [one for name, one in named if one is not None and is_named(name, self.may_keep)]

    def _buffer_versions(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        for layer_name, layer in self.layers:
            for own_name, buffer in layer._buffers.items():  # named_buffers() takes five times as long
                name = f"{layer_name}.{own_name}".lstrip(".")
                if buffer is not None and name not in self.may_change:
                    yield name, buffer, buffer._version


def _kept(
    layers: Iterable[tuple[str, torch.nn.Module]], may_keep: Collection[str]
) -> Iterator[tuple[str, torch.Tensor | None, float]]:
    """(name, tensor, version) of what layers keep as plain attributes, alone or in tuples, lists and deques; of a
    number, None and the number itself; of a container, None and its length. What belongs to the graph of a forward is
    none: it goes with it."""
    for layer_name, layer in layers:
        for own_name, value in vars(layer).items():
            whole = f"{layer_name}.{own_name}".lstrip(".")
            if is_named(whole, may_keep):
                continue
            if isinstance(value, list | deque):  # a dict is a cache, or one of every layer's own
                yield f"the length of {whole}", None, len(value)
            for number, one in enumerate(value if isinstance(value, tuple | list | deque) else [value]):
                name = whole if one is value else f"{whole}[{number}]"
                if isinstance(one, torch.Tensor) and not one.requires_grad:
                    yield name, one, version_of(one)
                elif type(one) in (int, float):
                    yield name, None, one
