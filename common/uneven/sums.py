"""Sums and counts that stay on the device and are added up over all ranks once."""

import torch
import torch.distributed as dist


class Sums:
    """Named sums of one rank, such as the loss and the number of correct answers of an evaluation."""

    def __init__(self, *names: str, device: torch.device):
        self.names = names
        # float64 is exact for counts up to 2**53, and keeps digits that a float32 sum over a whole data set would lose
        self.values = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, *amounts: torch.Tensor | float) -> None:
        """Add one amount to each sum, in the order of the names. Does not wait for the device."""
        self.values += torch.stack([self._as_double(amount) for amount in amounts])

    def _as_double(self, amount: torch.Tensor | float) -> torch.Tensor:
        if isinstance(amount, torch.Tensor):
            return amount.detach().to(self.values)
        return self.values.new_tensor(amount)  # torch.as_tensor would round it to float32

    def reduce(self) -> dict[str, float]:
        """The sums over all ranks, the same on each. Every rank must call this."""
        dist.all_reduce(self.values)
        return dict(zip(self.names, self.values.tolist(), strict=True))
