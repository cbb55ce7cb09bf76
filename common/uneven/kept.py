"""What a model keeps besides its parameters: buffers, and what its layers have as plain attributes."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

Place = tuple[str, str]  # the names of a layer and of its attribute
OF_EVERY_LAYER = vars(torch.nn.Module()).keys()
MOST_NUMBERS = 1 << 24  # in a tensor: more are what a forward has made, such as an attention that is looked at
MOST_VALUES = 100  # in a list
CPU = torch.device("cpu")


def attributes(net: torch.nn.Module) -> dict[Place, Any]:
    """What layers keep as plain attributes: numbers, None, small dense tensors, and short lists and tuples of these.
    What belongs to the graph of a forward is none of it: it goes with the graph."""
    return {
        (layer_name, name): value
        for layer_name, layer in net.named_modules()
        for name, value in vars(layer).items()
        if name not in OF_EVERY_LAYER and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Whether a value is of a kind that `attributes` returns."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and value.layout == torch.strided and value.numel() <= MOST_NUMBERS
    if type(value) in (list, tuple):
        return len(value) <= MOST_VALUES and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float)


def moved(value: Any, device: torch.device | None = None) -> Any:
    """A copy of what `attributes` has, its tensors on `device`, or where they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return type(value)(moved(one, device) for one in value) if type(value) in (list, tuple) else value


def is_on_cpu(value: Any) -> bool:
    """Whether all tensors of what `attributes` has are on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.device == CPU
    return all(map(is_on_cpu, value)) if type(value) in (list, tuple) else True


def version(value: Any) -> Any:
    """Something else after a change of what `attributes` has, where it is the same object."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else value._version  # tensors of torch.inference_mode() do not change
    return [(id(one), version(one)) for one in value] if type(value) in (list, tuple) else value


@contextlib.contextmanager
def unchanged(net: torch.nn.Module) -> Iterator[None]:
    """What the body changes in a model besides parameters and submodules is put back: its layers have the same buffers
    and attributes as before, and lists, deques and dense tensors among these the same content."""
    owned = [(own, own.copy()) for layer in net.modules() for own in (vars(layer), layer._buffers)]
    values: list[Any] = [value for _, before in owned for value in before.values()]
    lists = [(one, one.copy()) for one in values if type(one) in (list, deque)]
    dense = {id(one): one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided}
    tensors = [
        (one, one.detach().to(CPU, copy=True)) for one in dense.values() if not (one.requires_grad or one.is_meta)
    ]
    try:
        yield
    finally:
        for own, before in owned:
            own.clear()
            own.update(before)
        for one, items in lists:
            one.clear()
            one.extend(items)
        for tensor, content in tensors:
            if not torch.equal(tensor.detach().to(CPU), content):
                tensor.data.copy_(content)  # a guard has seen that it was written to, and need not see this
