"""What must be the same on every rank: model, data, and after each step the weights."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.uneven.guards.fingerprint import fingerprint

SAME_MODEL = "every rank must build the same model and read the same data"
SAME = 1e-9  # relative: processors of different kinds may round an exponential differently
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def require_same(values: Mapping[str, object], fix: str = SAME_MODEL) -> None:
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
                    f"{name} is {there} on rank {rank}, but {here} on rank 0: {fix}", same_on_every_rank=True
                )


def require_same_numbers(numbers: Mapping[str, float], what: str) -> None:
    """Raise the same UserError on every rank unless `what` has found the same on all. Every rank must call this."""
    if len(set(_gathered(fingerprint({name: float(value) for name, value in numbers.items()})))) == 1:
        return
    first, *others = _gathered({name: float(value) for name, value in numbers.items()})
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            here, there = first.get(name, math.inf), other.get(name, math.inf)
            both_nan = math.isnan(here) and math.isnan(there)
            if not both_nan and not math.isclose(here, there, rel_tol=SAME, abs_tol=SAME):
                raise UserError(
                    f"{what} has found {name} {there} on rank {rank}, but {here} on rank 0: it must be that of all "
                    "ranks. Add up sums and counts over the ranks (Sums.reduce() of common.uneven.sums), and divide "
                    "afterwards; give every rank its own samples (run.evaluation_loader)",
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
    numbers = (f"{name}={value}" for name, value in vars(module).items() if isinstance(value, float))
    return f"{type(module).__name__}({', '.join(filter(None, [module.extra_repr(), *numbers]))})"


def ranks_that_differ(trees: Mapping[str, Any], device: torch.device) -> dict[str, list[int]]:
    """By name, the ranks on which a tree's tensors and numbers are not bit by bit those of most ranks; of two ranks,
    the later one. A tree is nested dicts, lists and tuples, such as a state_dict. Every rank must call this."""
    mine = torch.stack([_checksum(tree, device) for tree in trees.values()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    found: dict[str, list[int]] = {}
    for name, sums in zip(trees, torch.stack(everyone).T.tolist(), strict=True):
        usual = max(sums, key=lambda one: (sums.count(one), -sums.index(one)))
        if ranks := [rank for rank, one in enumerate(sums) if one != usual]:
            found[name] = ranks
    return found


def _checksum(tree: Any, device: torch.device) -> torch.Tensor:
    """An int64 of the bits of all tensors, without waiting for the device, and of all numbers."""
    tensors, numbers = [], []
    for leaf in _leaves(tree):
        if isinstance(leaf, torch.Tensor):
            dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            tensors.append(real.contiguous().view(BITS[real.element_size()]).sum(dtype=torch.int64).to(device))
        else:
            numbers.append(leaf if leaf == leaf else 0)  # the hash of NaN differs from process to process
    sums = torch.stack([torch.full((), hash(tuple(numbers)), device=device), *tensors])
    odd = torch.arange(1, 2 * len(sums), 2, device=device)  # it matters which tensor has which sum
    return (sums * odd).sum()


def _leaves(tree: Any) -> Iterator[torch.Tensor | int | float]:
    if isinstance(tree, torch.Tensor | int | float):
        yield tree
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)


def collectives() -> int:
    """How many collectives this rank has begun in the group of all ranks."""
    if not dist.is_initialized():
        return 0
    group: Any = dist.distributed_c10d._get_default_group()
    return group._get_sequence_number_for_group()


def require_same_network(number: int, device: torch.device, ranks: Any = None) -> None:
    """Raise UserError on every rank of the process group `ranks` unless all exchange the gradients of the network with
    this number next."""
    mine = torch.tensor([number], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(everyone, mine, ranks)
    first, *others = torch.cat(everyone).tolist()
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise UserError(
                f"rank {rank} is about to exchange the gradients of network {other}, but rank 0 those of network "
                f"{first}, in the order of their wrap(): each must run in the same steps on all ranks. Where a "
                "rank's samples have nothing for a network, run it on an empty batch",
                same_on_every_rank=True,
            )
