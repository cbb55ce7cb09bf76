"""What a model keeps besides its parameters: buffers, and what its layers have as plain attributes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

Place = tuple[str, str]  # the names of a layer and of its attribute


def attributes(net: torch.nn.Module) -> dict[Place, Any]:
    """What layers keep as plain attributes: numbers, None, tensors, and lists and tuples of these. What belongs to the
    graph of a forward is none of it: it goes with the graph."""
    return {
        (layer_name, name): value
        for layer_name, layer in net.named_modules()
        for name, value in vars(layer).items()
        if is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Whether a value is of a kind that `attributes` returns."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float)


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy of what `attributes` has, its tensors on `device`, or where they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return type(value)(copied(one, device) for one in value) if type(value) in (list, tuple) else value


def version(value: Any) -> Any:
    """Something else after a change of what `attributes` has, where it is the same object."""
    if isinstance(value, torch.Tensor):
        return value._version
    return [(id(one), version(one)) for one in value] if type(value) in (list, tuple) else value


@contextlib.contextmanager
def unchanged(net: torch.nn.Module) -> Iterator[None]:
    """What forwards in the body change besides parameters is put back: buffers and plain attributes."""
    buffers = [(one, one._version, one.clone()) for one in net.buffers()]
    before = {place: copied(value) for place, value in attributes(net).items()}
    try:
        yield
    finally:
        layers = dict(net.named_modules())
        for layer_name, name in attributes(net).keys() - before.keys():
            delattr(layers[layer_name], name)
        for (layer_name, name), value in before.items():
            layers[layer_name].__dict__[name] = value
        with torch.no_grad():
            for buffer, version, kept in buffers:
                if buffer._version != version:
                    buffer.copy_(kept)
