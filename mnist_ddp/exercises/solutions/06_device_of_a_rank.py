"""The launcher counts the processes of each node: that is the number of the GPU."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
rank, node, local_rank = dist.get_rank(), int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}"
print(f"rank {rank} takes {device} of node {node}")  # torch.cuda.set_device(device)
dist.barrier()
dist.destroy_process_group()
