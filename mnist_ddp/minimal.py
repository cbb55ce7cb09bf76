"""MNIST with nothing but torch, torchvision's data set and common.uneven, under torchrun, on uneven nodes.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 3 --master-addr HOST minimal.py      # 3 processes on this node
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr HOST minimal.py      # 1 on the other

The losses are those of one process, augmentation included. Run it again and it continues from minimal.pt.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not needed where common is installed
from common.uneven import ddp
from common.uneven.global_batches import GlobalBatchLoader

DATA, CHECKPOINT, EPOCHS = "data", Path("minimal.pt"), 3

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if cuda := device if device.type == "cuda" else None:
    torch.cuda.set_device(cuda)  # where NCCL exchanges objects
dist.init_process_group(device_id=cuda)
is_main = dist.get_rank() == 0
if os.environ["LOCAL_RANK"] == "0":  # one process of each node downloads
    datasets.MNIST(DATA, download=True)
dist.barrier()
augment = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), transforms.ToTensor()])
train_set = datasets.MNIST(DATA, transform=augment)
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
saved: list = [torch.load(CHECKPOINT) if is_main and CHECKPOINT.exists() else {"step": 0}]
dist.broadcast_object_list(saved)  # the nodes need no shared disk
if step := saved[0]["step"]:
    net.load_state_dict(saved[0]["net"])
    optimizer.load_state_dict(saved[0]["optimizer"])


def compute_loss(model: nn.Module, micro: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(micro[0]), micro[1], reduction="sum")


batches = GlobalBatchLoader(train_set, 256, seed=0, micro_batch=64, epochs=EPOCHS, step=step, device=device)
model = ddp.wrap(net, batches, compute_loss)
for batch in batches:  # this rank's part of each global batch
    loss = torch.zeros((), device=device)
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
        if batches.step % batches.steps_per_epoch == 0:
            state = {"step": batches.step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, CHECKPOINT.with_suffix(".tmp"))
            CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)  # a whole file or none
dist.destroy_process_group()
