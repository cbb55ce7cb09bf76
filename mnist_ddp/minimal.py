"""MNIST under torchrun on uneven nodes, with the losses of one process: torch, torchvision and common.uneven alone.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 3 --master-addr HOST minimal.py     # 3 processes on this node

The other node: --node-rank 1 --nproc-per-node 1. Augmentation is the same too. Run again, it goes on from minimal.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not needed where common is installed
from common.uneven import ddp
from common.uneven.global_batches import GlobalBatchLoader

DATA, CHECKPOINT, PART, EPOCHS = "data", Path("minimal.pt"), Path("minimal.pt.part"), 3


def compute_loss(model: nn.Module, micro: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(micro[0]), micro[1], reduction="sum")


device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else None  # the CPU
torch.cuda.set_device(device or -1)  # where NCCL exchanges objects; -1 changes nothing
dist.init_process_group(device_id=device)
if dist.get_node_local_rank() == 0:  # one process of each node downloads
    datasets.MNIST(DATA, download=True)
dist.barrier()
augment = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), transforms.ToTensor()])
train_set = datasets.MNIST(DATA, transform=augment)
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
saved: list = [torch.load(CHECKPOINT, "cpu") if CHECKPOINT.exists() else {"step": 0}]
dist.broadcast_object_list(saved)  # rank 0's: the nodes need no shared disk
if step := saved[0]["step"]:
    net.load_state_dict(saved[0]["net"])
    optimizer.load_state_dict(saved[0]["optimizer"])
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
    if dist.get_rank() == 0:
        print(f"step {batches.step} loss {loss.item()!r}", flush=True)
        if batches.step % batches.steps_per_epoch == 0:
            torch.save({"step": batches.step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, PART)
            PART.replace(CHECKPOINT)  # a whole file or none
dist.destroy_process_group()
