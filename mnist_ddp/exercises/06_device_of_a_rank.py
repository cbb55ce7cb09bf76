"""Exercise 6. Node 0 has three GPUs and node 1 has one. Two ranks take the same GPU, and one GPU has nothing to do."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
node, nodes, local_rank = (int(os.environ[name]) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"))
gpus_per_node = ranks // nodes
device = f"cuda:{rank % gpus_per_node}"
print(f"rank {rank} takes {device} of node {node}")  # torch.cuda.set_device(device)
dist.barrier()
dist.destroy_process_group()
