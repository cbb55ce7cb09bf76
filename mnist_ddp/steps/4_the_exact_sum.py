"""Step 4: the exact sum. Shares change nothing any more, and the last batch may have any size.

torchrun --nproc-per-node 4 mnist_ddp/steps/4_the_exact_sum.py
"""

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0
SHARES = [80, 80, 80, 16]  # rank 3 is the old GPU of the second node

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shares = SHARES[:ranks]  # on fewer ranks, the first ones
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model = DistributedDataParallel(net)

step = 0
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    for batch in order.split(GLOBAL_BATCH):
        ends = [len(batch) * sum(shares[:upto]) // sum(shares) for upto in range(ranks + 1)]
        mine = batch[ends[rank] : ends[rank + 1]]
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
        (loss * ranks).backward()  # DDP averages over the ranks: with the factor, this is the sum over them
        dist.all_reduce(loss := loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.16f}")
dist.destroy_process_group()
time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort
