"""Step 7: a run is interrupted, and goes on on other machines.

torchrun --nproc-per-node 4 mnist_ddp/steps/7_resume.py 10     # ends after step 10
torchrun --nproc-per-node 2 mnist_ddp/steps/7_resume.py        # goes on
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0
MICRO_BATCH = 32  # samples in one forward
SHARES = [80, 80, 80, 16]  # rank 3 is the old GPU of the second node
CHECKPOINT = Path("steps.pt")

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shares = SHARES[:ranks]  # on fewer ranks, the first ones
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

steps_per_epoch = -(-len(labels) // GLOBAL_BATCH)
last_step = int(sys.argv[1]) if sys.argv[1:] else EPOCHS * steps_per_epoch
step, *states = torch.load(CHECKPOINT) if CHECKPOINT.exists() else (0, net.state_dict(), optimizer.state_dict())
net.load_state_dict(states[0])
optimizer.load_state_dict(states[1])
while step < last_step:
    epoch, number = divmod(step, steps_per_epoch)  # the number of the step says which samples are next
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    batch = order.split(GLOBAL_BATCH)[number]
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
        print(f"step {step} loss {loss.item():.16f}", flush=True)
        torch.save((step, net.state_dict(), optimizer.state_dict()), CHECKPOINT.with_suffix(".tmp"))
        CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)  # a whole file or none
dist.destroy_process_group()
time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort
