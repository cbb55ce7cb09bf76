"""Step 1: a network learns digits, on one process.

python mnist_ddp/steps/1_one_process.py
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

GLOBAL_BATCH, EPOCHS, SEED = 256, 3, 0

digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)  # (1797, 64) in float64, and (1797,)
torch.manual_seed(SEED)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

step = 0
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    for batch in order[: len(order) // GLOBAL_BATCH * GLOBAL_BATCH].split(GLOBAL_BATCH):  # without the last 5 of 1,797
        loss = cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step} loss {loss.item():.16f}")
