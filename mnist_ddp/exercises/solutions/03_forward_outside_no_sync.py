"""DDP decides in forward, so forward and backward both run inside of `no_sync`."""

from contextlib import nullcontext

import torch
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
    total, micros = torch.zeros((), dtype=torch.float64), part(batch, rank, ranks).split(32)
    for number, micro in enumerate(micros, start=1):
        with nullcontext() if number == len(micros) else model.no_sync():
            loss = cross_entropy(model(images[micro]), labels[micro], reduction="sum") / len(batch)
            (loss * ranks).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item():.12f}")
dist.destroy_process_group()
