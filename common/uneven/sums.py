"""Sums and counts that stay on the device and are added up over all ranks once."""

import math
from typing import Any

import torch
import torch.distributed as dist


class Sums:
    """Named sums of one rank, such as the loss and the number of correct answers of an evaluation.

    `shapes` are those of sums that are tensors, such as confusion=(10, 10); the others are numbers.
    """

    def __init__(self, *names: str, device: torch.device, **shapes: tuple[int, ...]):
        self.shapes = {**dict.fromkeys(names, ()), **shapes}
        sizes = map(math.prod, self.shapes.values())
        # float64 is exact for counts up to 2**53, and keeps digits that a float32 sum over a whole data set would lose
        self.values = torch.zeros(sum(sizes), dtype=torch.float64, device=device)

    def add(self, *amounts: torch.Tensor | float) -> None:
        """Add one amount to each sum, in the order of the names. Does not wait for the device."""
        shaped = zip(map(self._as_double, amounts), self.shapes.values(), strict=True)
        self.values += torch.cat([amount.reshape(shape).flatten() for amount, shape in shaped])

    def _as_double(self, amount: torch.Tensor | float) -> torch.Tensor:
        if isinstance(amount, torch.Tensor):
            return amount.detach().to(self.values)
        return self.values.new_tensor(amount)  # torch.as_tensor would round it to float32

    def reduce(self) -> dict[str, Any]:
        """The sums over all ranks, the same on each: numbers, and tensors on the CPU. Every rank must call this."""
        dist.all_reduce(self.values)
        parts = self.values.cpu().split([math.prod(shape) for shape in self.shapes.values()])
        reduced = {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}
        return {name: total if self.shapes[name] else total.item() for name, total in reduced.items()}
