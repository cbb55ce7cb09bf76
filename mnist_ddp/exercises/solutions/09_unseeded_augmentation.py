"""The noise of an image is drawn from the seed, the epoch and the image, whoever draws it."""

import torch
import torch.distributed as dist
from shared import GLOBAL_BATCH, SEED, digits, network, order, part
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
images, labels = digits()
model = DistributedDataParallel(network())
optimizer = SGD(model.parameters(), lr=0.5)


def augmented(sample: int, epoch: int) -> torch.Tensor:
    """An image (64,) with noise."""
    generator = torch.Generator().manual_seed(SEED + 1_000_003 * epoch + sample)
    return images[sample] + 0.1 * torch.randn(64, dtype=torch.float64, generator=generator)


for epoch in range(2):
    for batch in order(epoch).split(GLOBAL_BATCH):
        mine = part(batch, rank, ranks)
        inputs = torch.stack([augmented(sample, epoch) for sample in mine.tolist()])
        loss = cross_entropy(model(inputs), labels[mine], reduction="sum") / len(batch)
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"loss {loss.item():.12f}")
if rank == 0:
    noises = torch.stack([augmented(sample, epoch) - images[sample] for sample in range(4) for epoch in range(2)])
    print(f"noises of 4 images in 2 epochs: {len(noises.round(decimals=9).unique(dim=0))} are different")
dist.destroy_process_group()
