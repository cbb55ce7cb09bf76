"""Each rank sums, and divides by the samples of all ranks. DDP divides by the number of ranks, so that is undone. A
sample of rank 3 was divided by 16 and by 4, so by 64 in place of 256: it counted four times."""

import torch.distributed as dist
from shared import GLOBAL_BATCH, digits, network, order, part
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
images, labels = digits()
model = DistributedDataParallel(network())
optimizer = SGD(model.parameters(), lr=0.5)
for batch in order(epoch=0).split(GLOBAL_BATCH):
    mine = part(batch, rank, ranks)
    loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
    (loss * ranks).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"loss {loss.item():.12f}")
dist.destroy_process_group()
