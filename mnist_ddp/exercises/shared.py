"""What the exercises share: digits, a small network, and the parts of a batch. There is no mistake in here."""

import torch
from sklearn.datasets import load_digits

GLOBAL_BATCH, SEED = 256, 0
SHARES = [80, 80, 80, 16]  # of a batch, by rank: rank 3 is alone on the second node, and slow
TRAINING_SAMPLES = 1438  # the other 359 are for evaluation


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 64) in float64, from 0 to 1, and labels (1797,)."""
    found = load_digits()
    return torch.tensor(found.data) / 16, torch.tensor(found.target)


def network() -> torch.nn.Sequential:
    """The same weights on each call."""
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()


def order(epoch: int) -> torch.Tensor:
    """The training samples, in the order of this epoch."""
    return torch.randperm(TRAINING_SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))


def part(batch: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The samples of a batch that this rank trains on; with one rank, all of them."""
    shares = SHARES[:ranks]
    ends = [len(batch) * sum(shares[:upto]) // sum(shares) for upto in range(ranks + 1)]
    return batch[ends[rank] : ends[rank + 1]]
