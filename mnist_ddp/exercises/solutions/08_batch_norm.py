"""BatchNorm normalises with the mean of the samples that a rank holds. LayerNorm and GroupNorm look at one sample
alone. (Or let the ranks exchange the sums: common/uneven/options/global_batch.py.)"""

import torch
import torch.distributed as dist
from shared import GLOBAL_BATCH, digits, order, part
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
images, labels = digits()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)).double()
model = DistributedDataParallel(net)
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
