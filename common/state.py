"""What has a state: parts of a training that a checkpoint, or another rank, brings to where they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open


class Stateful(Protocol):
    """What a run goes on with besides the weights: an optimizer, a scheduler, a scaler, an average of the weights.

    `state_dict()` returns a dict of tensors, numbers, text, None, and lists, tuples and dicts of these.
    `load_state_dict` takes it again, with all tensors on the CPU, and makes the object what it was, bit for bit. Both
    are local. The state must be the same on every rank, because only that of rank 0 is saved; ranks compare theirs.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def not_finite(model: torch.nn.Module) -> str:
    """The name of the first parameter with a NaN or an infinity in it; empty where all are finite."""
    return next((name for name, one in model.named_parameters() if not one.isfinite().all()), "")


def not_floating(weights: Path) -> dict[str, str]:
    """Name -> type of the tensors in a safetensors file that are no floating-point numbers of 16 bits or more."""
    with safe_open(weights, "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return {name: kind for name, kind in types.items() if kind not in ("BF16", "F16", "F32", "F64")}


def fill(stateful: Stateful, state: dict[str, Any]) -> None:
    """Load `state`, unless it is empty: the scaler of a run that was not in fp16 has none."""
    if state:
        stateful.load_state_dict(state)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Nested dicts, lists and tuples with `function(tensor)` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def on_cpu(tree: Any) -> Any:
    """Nested dicts, lists and tuples with their tensors on the CPU."""
    return map_tensors(tree, torch.Tensor.cpu)


def copied(tree: Any) -> Any:
    """As `on_cpu`, all of them copies; a tensor that is there twice, such as a tied embedding, is copied once."""
    known: dict[tuple, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        if place not in known or not tensor.numel():
            known[place] = tensor.detach().to("cpu", copy=True)
        return known[place]

    return map_tensors(tree, copy)


def broadcast_tree(tree: Any, device: torch.device, source: int = 0) -> Any:
    """One rank's nested dicts, lists, tuples and tensors on every rank. Every rank must call this.

    Tensors are sent one at a time, so that no rank needs twice the memory, and arrive on the CPU.
    """
    tensors: list[torch.Tensor] = []

    def strip(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)

    def receive(meta: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(meta, device=device)
        dist.broadcast(tensor, src=source)
        return tensor.cpu()

    skeleton = [map_tensors(tree, strip)]
    dist.broadcast_object_list(skeleton, src=source)
    if dist.get_rank() != source:
        return map_tensors(skeleton[0], receive)
    for tensor in tensors:
        dist.broadcast(tensor.to(device).contiguous(), src=source)
    return tree
