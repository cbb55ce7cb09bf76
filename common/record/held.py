"""The state of the optimisation in a rank's memory, from which a run goes on when its members change (--elastic)."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.join.process_group import Group
from common.record.checkpoint import Part, fill
from common.record.steps import Done, Noted


@dataclass
class Held:
    """What a rank holds after each optimizer step: everything that the next one needs."""

    folder: Path  # of the run's files
    step: int  # optimizer steps done
    model: torch.nn.Module
    parts: dict[str, Part]
    recent: list[Noted] = field(default_factory=list)  # steps of the last exchange, which rank 0 may not have written
    noted: list[Noted] = field(default_factory=list)  # steps since then
    unwritten: list[Done] = field(default_factory=list)  # of the last generation, for rank 0 to write
    saved_at: float = field(default_factory=time.perf_counter)  # when the last checkpoint was written

    def done(self) -> list[Done]:
        """The last steps as all ranks know them: their losses are summed over the ranks beside the gradients."""
        return self.unwritten + [
            Done(one.step, float(one.global_loss), float(one.lr), float(one.grad_norm))
            for one in [*self.recent, *self.noted]
            if one.global_loss is not None
        ]


def take_over(group: Group, folder: Path, model: torch.nn.Module, parts: dict[str, Part]) -> int | None:
    """Fill `model` and `parts` with the state that the members hold, and hold them from now on. Returns the optimizer
    steps done; None where this generation is the first. Every rank must call this.

    A rank that was lost in the middle of a step's exchange may leave one rank a step ahead of another: the first rank
    that is ahead sends its state to all, as it does where a rank has come that has none.
    """
    if not group.members or not group.members.generation:
        return None
    mine = group.members.held
    known: list[Any] = [None] * group.worker.world_size
    dist.all_gather_object(known, mine.step if mine else -1)
    step = max(known)
    if step < 0:  # the first generation had not begun
        return None
    ahead = known.index(step)
    if mine and mine.step == step:
        model.load_state_dict(mine.model.state_dict())
        for name, part in parts.items():
            fill(part, on_cpu(mine.parts[name].state_dict()))
    if min(known) < step:
        send(model, parts, ahead, group)
    rest: list[Any] = [mine.done() if mine and group.worker.rank == ahead else None]
    dist.broadcast_object_list(rest, src=ahead)
    saved_at = mine.saved_at if mine else time.perf_counter()
    group.members.held = Held(folder, step, model, parts, unwritten=rest[0], saved_at=saved_at)
    return step


def hold(group: Group, folder: Path, step: int, model: torch.nn.Module, parts: dict[str, Part]) -> None:
    """Hold this state from now on, where members may change."""
    if group.members:
        group.members.held = Held(folder, step, model, parts)


def folder_of(group: Group) -> Path | None:
    """The folder of a run that goes on; None for one that begins. Every rank must call this."""
    if not group.members or not group.members.generation:
        return None
    known: list[Any] = [None] * group.worker.world_size
    dist.all_gather_object(known, group.members.held and group.members.held.folder)
    return next(filter(None, known), None)


def send(model: torch.nn.Module, parts: dict[str, Part], source: int, group: Group) -> None:
    """Send one rank's weights and parts to all. Every rank must call this."""
    is_source = group.worker.rank == source
    state = {"model": model.state_dict(), "parts": {name: part.state_dict() for name, part in parts.items()}}
    received = broadcast_tree(state if is_source else {}, group.device, source)
    if not is_source:
        model.load_state_dict(received["model"])
        for name, saved in received["parts"].items():
            fill(parts[name], saved)


def on_cpu(tree: Any) -> Any:
    """Nested dicts, lists and tuples with their tensors on the CPU, as a part takes them."""
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: on_cpu(value) for key, value in tree.items()}
    return type(tree)(map(on_cpu, tree)) if type(tree) in (list, tuple) else tree


def broadcast_tree(tree: Any, device: torch.device, source: int = 0) -> Any:
    """One rank's nested dicts, lists, tuples and tensors on every rank. Every rank must call this.

    Tensors are sent one at a time, so that no rank needs twice the memory, and arrive on the CPU.
    """
    tensors: list[torch.Tensor] = []

    def strip(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            tensors.append(node)
            return torch.empty_like(node, device="meta", memory_format=torch.contiguous_format)
        if isinstance(node, dict):
            return {key: strip(value) for key, value in node.items()}
        return type(node)(map(strip, node)) if type(node) in (list, tuple) else node

    def rebuild(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            tensor = torch.empty_like(node, device=device)
            dist.broadcast(tensor, src=source)
            return tensor.cpu()
        if isinstance(node, dict):
            return {key: rebuild(value) for key, value in node.items()}
        return type(node)(map(rebuild, node)) if type(node) in (list, tuple) else node

    skeleton = [strip(tree)]
    dist.broadcast_object_list(skeleton, src=source)
    if dist.get_rank() != source:
        return rebuild(skeleton[0])
    for tensor in tensors:
        dist.broadcast(tensor.to(device).contiguous(), src=source)
    return tree
