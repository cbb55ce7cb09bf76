"""The state of the optimisation in a rank's memory, from which a run goes on when its members change (--elastic)."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import RunError
from common.join.process_group import Group
from common.state import Stateful, broadcast_tree, fill, on_cpu
from common.uneven.guards.fingerprint import fingerprint
from common.uneven.kept import CPU, Place, attributes, is_on_cpu, is_plain, moved, version


@dataclass
class InMemoryState:
    """What a rank has after each optimizer step: everything that the next one needs. Of the plain attributes of layers
    it knows those that have changed before the last exchange of steps."""

    folder: Path  # of the run's files
    step: int  # optimizer steps done
    model: torch.nn.Module
    states: dict[str, Stateful]
    exchanged: list[Any] = field(default_factory=list)  # LocalSteps that rank 0 may not have written
    noted: list[Any] = field(default_factory=list)  # LocalSteps since then
    unwritten: list[Any] = field(default_factory=list)  # GlobalSteps of the last generation, for rank 0 to write
    saved_at: float = field(default_factory=time.perf_counter)  # when the last checkpoint was written
    attributes: dict[Place, Any] = field(default_factory=dict)  # of layers, those that training has changed
    is_torn: bool = False  # an optimizer has changed weights since `step`, and its step is not done

    def __post_init__(self) -> None:
        # What forward changes, such as BatchNorm's buffers or a counter, as it was after the last step that is done: of
        # one that could not be finished, it has had a part.
        layers = self.model.named_modules()
        self.owners = [(f"{name}.".lstrip("."), layer) for name, layer in layers if layer._buffers]
        self.buffers: dict[str, torch.Tensor] = {}
        self.seen: dict[Any, tuple[Any, Any]] = {}  # the buffer or attribute itself, and its version
        for place, value in attributes(self.model).items():
            self._has_changed(place, value)
        self.find_changing()
        self.note_step(self.step, self.noted)

    def find_changing(self) -> None:
        """Find the plain attributes that training changes. Once in each exchange: to look at all of a large model in
        each step would take longer than small steps do."""
        layers = dict(self.model.named_modules())
        for place, value in attributes(self.model).items():
            if self._has_changed(place, value):
                self.attributes[place] = moved(value)
        self.changing = [(place, vars(layers[place[0]])) for place in self.attributes if place[0] in layers]

    def note_step(self, step: int, noted: list[Any]) -> None:
        """Optimizer step `step` is done; `noted` are the LocalSteps since the last exchange."""
        self.step, self.noted, self.is_torn = step, noted, False
        for prefix, layer in self.owners:
            for name, buffer in layer._buffers.items():
                if buffer is not None and self._has_changed(prefix + name, buffer):
                    self.buffers[prefix + name] = buffer.detach().clone()
        for place, where in self.changing:
            value = where.get(place[1])
            if is_plain(value) and self._has_changed(place, value):
                self.attributes[place] = moved(value)

    def _has_changed(self, name: Any, value: Any) -> bool:
        before, version_before = self.seen.get(name, (self, None))
        now = version(value)
        self.seen[name] = value, now
        return value is not before or now != version_before

    def last_steps(self) -> list[Any]:
        """The last steps as all ranks know them: their losses are summed over the ranks with the gradients."""
        steps = [step.as_global() for step in [*self.exchanged, *self.noted]]
        return self.unwritten + [step for step in steps if step]


def restore_from_members(
    group: Group, mine: InMemoryState | None, folder: Path, model: torch.nn.Module, states: dict[str, Stateful]
) -> InMemoryState | None:
    """Fill `model` and `states` with what the members of the last generation have in memory; `mine` is this rank's.
    None where the first generation had not begun. Every rank must call this.

    A rank that was lost in the middle of a step's exchange may leave one rank a step ahead of another: the first rank
    that is ahead sends its state to all, as it does where a rank has come that has none. One that has taken a part of a
    step, such as the critic's of two networks, has none either. Raises RunError where all have.
    """
    was_torn = mine is not None and mine.is_torn
    mine = None if was_torn else mine
    everyone: list[Any] = [None] * group.worker.world_size
    kept = {place: fingerprint(value) for place, value in mine.attributes.items()} if mine else {}
    dist.all_gather_object(everyone, (mine.step if mine else -1, kept, was_torn))
    known = [steps for steps, *_ in everyone]
    step = max(known)
    if step < 0 and any(torn for *_, torn in everyone):
        raise RunError(
            "a rank was lost after run.optimizer_step(), where the others waited for it before run.end_step(): a part "
            "of that step is done, and it cannot be taken back. Go on from the last checkpoint with --resume",
            same_on_every_rank=True,
        )
    if step < 0:
        return None
    ahead = known.index(step)
    of_ahead = [attributes for steps, attributes, _ in everyone if steps == step]
    if mine and mine.step == step:
        model.load_state_dict(mine.model.state_dict())
        _fill_buffers(model, mine.buffers)
        for name, stateful in states.items():
            fill(stateful, on_cpu(mine.states[name].state_dict()))
    if min(known) < step:
        _send(model, states, ahead, group)
    rest: list[Any] = [None, None]  # steps; by place, (value on the CPU, whether it was there)
    if mine and group.worker.rank == ahead:
        # What ranks do not have alike is made of each one's own samples, and none of the optimisation's state.
        alike = [place for place, mark in kept.items() if all(one.get(place) == mark for one in of_ahead)]
        values = {place: mine.attributes[place] for place in alike}
        rest = [mine.last_steps(), {place: (moved(one, CPU), is_on_cpu(one)) for place, one in values.items()}]
    dist.broadcast_object_list(rest, src=ahead)
    layers = dict(model.named_modules())
    restored = {place: moved(value, CPU if stays else group.device) for place, (value, stays) in rest[1].items()}
    for (layer_name, name), value in restored.items():
        if layer_name in layers:  # else a forward will make that layer
            layers[layer_name].__dict__[name] = moved(value)
    saved_at = mine.saved_at if mine else time.perf_counter()
    return InMemoryState(folder, step, model, states, unwritten=rest[0], saved_at=saved_at, attributes=restored)


def _send(model: torch.nn.Module, states: dict[str, Stateful], source: int, group: Group) -> None:
    """Send one rank's weights and states to all. Every rank must call this."""
    is_source = group.worker.rank == source
    buffers = dict(model.named_buffers())
    state = {
        "model": model.state_dict(),
        "buffers": buffers,
        "states": {name: one.state_dict() for name, one in states.items()},
    }
    received = broadcast_tree(state if is_source else {}, group.device, source)
    if not is_source:
        model.load_state_dict(received["model"])
        _fill_buffers(model, received["buffers"])
        for name, saved in received["states"].items():
            fill(states[name], saved)


@torch.no_grad()
def _fill_buffers(model: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Copy these buffers, also those that no state_dict has, into a model of the same code."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
