"""Step 6: without DistributedDataParallel. What it does is one sum.

torchrun --nproc-per-node 4 mnist_ddp/steps/6_by_hand.py
"""

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0
MICRO_BATCH = 32  # samples in one forward
SHARES = [80, 80, 80, 16]  # rank 3 is the old GPU of the second node

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shares = SHARES[:ranks]  # on fewer ranks, the first ones
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

step = 0
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    for batch in order.split(GLOBAL_BATCH):
        ends = [len(batch) * sum(shares[:upto]) // sum(shares) for upto in range(ranks + 1)]
        mine = batch[ends[rank] : ends[rank + 1]]
        loss, micros = torch.zeros((), dtype=torch.float64), mine.split(MICRO_BATCH)  # at least one, maybe empty
        for micro in micros:
            micro_loss = cross_entropy(net(images[micro]), labels[micro], reduction="sum") / len(batch)
            micro_loss.backward()
            loss += micro_loss.detach()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # the sum over the ranks; DDP does it while the backward still runs
        dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.16f}")
dist.destroy_process_group()
time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort
