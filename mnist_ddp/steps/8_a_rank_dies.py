"""Step 8: a rank dies, and the others go on with what they hold in memory.

torchrun --nproc-per-node 4 mnist_ddp/steps/8_a_rank_dies.py
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0
MICRO_BATCH = 32  # samples in one forward
SHARES = [80, 80, 80, 16]  # rank 3 is the old GPU of the second node
TIMEOUT = timedelta(seconds=10)  # of an exchange: ranks that are no neighbours of a dead one notice it then

store, me, started = next(dist.rendezvous("env://"))  # the store of torchrun, where all ranks meet
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)


def survivors(generation: int, members: list[int]) -> list[int]:
    """Those that have come here. The first one waits for the others and decides, or they might not agree."""
    number = store.add(f"{generation}/count", 1)
    store.set(f"{generation}/{number}", str(me))
    deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
    while number == 1 and store.add(f"{generation}/count", 0) < len(members) - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    if number == 1:
        store.set(f"{generation}/decided", str(store.add(f"{generation}/count", 0)))
    count = int(store.get(f"{generation}/decided"))  # waits until it is there
    return sorted(int(store.get(f"{generation}/{one}")) for one in range(1, count + 1))


def join(generation: int, members: list[int], step: int) -> tuple[int, int, int]:
    """(rank, ranks, step) among these members. One may have done a step that the others could not finish: all take the
    state of the one that is furthest."""
    meeting, rank, ranks = dist.PrefixStore(f"{generation}", store), members.index(me), len(members)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks, timeout=TIMEOUT)
    steps = [step] * ranks
    dist.all_gather_object(steps, step)
    states = [max(steps), net.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(states, src=steps.index(max(steps)))
    net.load_state_dict(states[1])
    optimizer.load_state_dict(states[2])
    optimizer.zero_grad()
    return rank, ranks, states[0]


steps_per_epoch = -(-len(labels) // GLOBAL_BATCH)
generation, members = 0, list(range(started))
rank, ranks, step = join(generation, members, step=0)
while step < EPOCHS * steps_per_epoch:
    shares = [SHARES[member] for member in members]  # of a batch, in proportion: those that are left take it all
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
    if me == 2 and step == 12:
        os._exit(0)  # it dies; with another code, torchrun would end all ranks
    try:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # the sum over the ranks; DDP does it while the backward still runs
        dist.all_reduce(loss)
    except RuntimeError:  # a connection is closed
        dist.destroy_process_group()  # `join` makes another one
        generation, members = generation + 1, survivors(generation, members)
        print(f"rank {me}: after step {step} go on with ranks {members}", flush=True)
        rank, ranks, step = join(generation, members, step)
        continue
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if rank == 0:
        print(f"step {step} loss {loss.item():.16f}", flush=True)
dist.destroy_process_group()
time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort
