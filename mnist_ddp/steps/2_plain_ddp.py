"""Step 2: the same on several processes, with DistributedDataParallel.

torchrun --nproc-per-node 4 mnist_ddp/steps/2_plain_ddp.py
"""

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model = DistributedDataParallel(net)

step = 0
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    for batch in order[: len(order) // GLOBAL_BATCH * GLOBAL_BATCH].split(GLOBAL_BATCH):  # without the last 5 of 1,797
        mine = batch.tensor_split(ranks)[rank]
        loss = cross_entropy(model(images[mine]), labels[mine])
        loss.backward()  # DDP averages the gradients over the ranks
        dist.all_reduce(loss := loss.detach() / ranks)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.16f}")
dist.destroy_process_group()
time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort
