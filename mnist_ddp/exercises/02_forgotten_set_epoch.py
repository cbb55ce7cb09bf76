"""Exercise 2. Every epoch shows the samples in the same order. A line is missing."""

import torch.distributed as dist
from shared import TRAINING_SAMPLES
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
sampler = DistributedSampler(range(TRAINING_SAMPLES), shuffle=True, seed=0)
loader = DataLoader(range(TRAINING_SAMPLES), batch_size=64, sampler=sampler)
for epoch in range(3):
    first = next(iter(loader))  # training on the batches is left out
    if rank == 0:
        print("first samples", epoch, first[:8].tolist())
dist.barrier()  # a rank that left now would fail those that still connect to it
dist.destroy_process_group()
