"""MNIST with nothing but torch, torchvision's data set and common.uneven, under torchrun, on uneven nodes.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 3 --master-addr HOST minimal.py      # 3 processes on this node
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr HOST minimal.py      # 1 on the other

The losses are those of one process, augmentation included. Run it again and it continues from minimal.pt.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not needed where common is installed
from common.uneven import ddp
from common.uneven.batches import micro_batches, move
from common.uneven.batching import plan_batches
from common.uneven.loading import part_loader
from common.uneven.sampling import UnevenDistributedSampler
from common.uneven.timer import StepTimer

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="data")
parser.add_argument("--checkpoint", type=Path, default="minimal.pt")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
args = parser.parse_args()
local_rank, dtype = int(os.environ["LOCAL_RANK"]), getattr(torch, args.dtype)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if cuda := device if device.type == "cuda" else None:
    torch.cuda.set_device(cuda)  # where NCCL exchanges objects
dist.init_process_group(device_id=cuda, timeout=timedelta(minutes=10))  # no rank waits longer for another
rank = dist.get_rank()
if local_rank == 0:  # one process of each node downloads
    datasets.MNIST(args.data_dir, download=True)
dist.barrier()
augment = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), transforms.ToTensor()])
train_set = datasets.MNIST(args.data_dir, transform=augment)
plan = plan_batches(len(train_set), global_batch=256, world_size=dist.get_world_size())
sampler = UnevenDistributedSampler(plan, rank, seed=0)
loader = part_loader(train_set, sampler, seed=0)
torch.manual_seed(0)
layers = [torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
net = torch.nn.Sequential(*layers).to(device, dtype)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
step, saved = 0, [torch.load(args.checkpoint) if rank == 0 and args.checkpoint.exists() else None]
dist.broadcast_object_list(saved)  # the nodes need no shared disk
if saved[0]:
    step = saved[0]["step"]
    net.load_state_dict(saved[0]["net"])
    optimizer.load_state_dict(saved[0]["optimizer"])

timer = StepTimer(device)
model = ddp.wrap(net, plan, timer, lambda model: model(torch.zeros(0, 784, dtype=dtype, device=device)).sum())
for epoch in range(step // plan.steps_per_epoch, args.epochs):
    sampler.set_epoch(epoch, skip_steps=step % plan.steps_per_epoch)
    for part in timer.steps(loader, plan.steps_per_epoch - step % plan.steps_per_epoch):  # part of a global batch
        loss_sum = torch.zeros((), dtype=dtype, device=device)
        for (images, labels), is_last in micro_batches(move(part, device, dtype), plan.part(step, rank), 64):
            with ddp.reduce_gradients_if(is_last, model, timer):
                loss = cross_entropy(model(images), labels, reduction="sum")
                (loss / plan.global_count(step)).backward()  # the all-reduce sums over the ranks
            loss_sum += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss_sum.item() / plan.global_count(step - 1)!r}", flush=True)
            if step % 100 == 0 or step % plan.steps_per_epoch == 0:
                state = {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, args.checkpoint.with_suffix(".tmp"))
                args.checkpoint.with_suffix(".tmp").replace(args.checkpoint)  # a whole file or none
dist.destroy_process_group()
