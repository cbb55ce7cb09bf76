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
from common.uneven.global_batches import GlobalBatchLoader

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
is_main = dist.get_rank() == 0
if local_rank == 0:  # one process of each node downloads
    datasets.MNIST(args.data_dir, download=True)
dist.barrier()
augment = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), transforms.ToTensor()])
train_set = datasets.MNIST(args.data_dir, transform=augment)
torch.manual_seed(0)
layers = [torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
net = torch.nn.Sequential(*layers).to(device, dtype)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
step, saved = 0, [torch.load(args.checkpoint) if is_main and args.checkpoint.exists() else None]
dist.broadcast_object_list(saved)  # the nodes need no shared disk
if saved[0]:
    step = saved[0]["step"]
    net.load_state_dict(saved[0]["net"])
    optimizer.load_state_dict(saved[0]["optimizer"])


def compute_loss(model: torch.nn.Module, micro: list[torch.Tensor]) -> torch.Tensor:
    images, labels = micro
    return cross_entropy(model(images), labels, reduction="sum")


to = {"device": device, "dtype": dtype}
batches = GlobalBatchLoader(train_set, global_batch=256, seed=0, micro_batch=64, epochs=args.epochs, step=step, **to)
model = ddp.wrap(net, batches, compute_loss)
for batch in batches:  # this rank's part of each global batch
    loss = torch.zeros((), dtype=dtype, device=device)
    for micro, is_last in batch.micro_batches():
        with model.no_sync(enabled=not is_last):
            micro_loss = compute_loss(model, micro) / batch.global_count
            micro_loss.backward()  # the last one's all-reduce sums over the ranks
        loss += micro_loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    if is_main:
        print(f"step {batches.step} loss {loss.item()!r}", flush=True)
        if batches.step % 100 == 0 or batches.step % batches.steps_per_epoch == 0:
            state = {"step": batches.step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint.with_suffix(".tmp"))
            args.checkpoint.with_suffix(".tmp").replace(args.checkpoint)  # a whole file or none
dist.destroy_process_group()
