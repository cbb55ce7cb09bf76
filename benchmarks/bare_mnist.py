"""The least that a DDP script for MNIST needs, under torchrun: what against_bare.py compares the trainer with.

The same network, images, batches and optimizer as mnist_ddp/, equal parts, no report, no checkpoints, no checks. Prints
the seconds and the number of steps after the first 50.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist_ddp import data
from mnist_ddp.model import ConvNet

FIRST_STEPS = 50  # that do not count

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path)
parser.add_argument("--global-batch", type=int)
parser.add_argument("--max-steps", type=int)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
train_set, _, _ = data.load("mnist", args.data_dir, torch.float32, torch.device(args.device))
torch.manual_seed(0)
model = DistributedDataParallel(ConvNet().to(args.device))
optimizer = torch.optim.AdamW(model.parameters(), 8e-3, weight_decay=0.01, eps=1e-5, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=10_000)
step, began = 0, 0.0
while step < args.max_steps:
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(step))
    for batch in order.split(args.global_batch):  # the last one is smaller
        images, labels = train_set.get_batch(batch.chunk(ranks)[rank].tolist())
        cross_entropy(model(images), labels, label_smoothing=0.05).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step in (FIRST_STEPS, args.max_steps) and args.device != "cpu":
            torch.cuda.synchronize()
        if step == FIRST_STEPS:
            began = time.perf_counter()
        if step == args.max_steps:
            break
if rank == 0:
    print(f"seconds {time.perf_counter() - began:.4f} steps {step - FIRST_STEPS}", flush=True)
dist.barrier()
time.sleep(0.1)  # else it aborts now and then: see REST_SECONDS in common/uneven/ddp.py
dist.destroy_process_group()
