#!/usr/bin/env python3
"""The stock recipe for MNIST, as pytorch/examples publishes it, with a clock: the peer in benchmarks/mnist.py.

Two 3x3 convolutions of 32 and 64 channels, dropout, a dense layer of 128; Adadelta with lr 1.0, batch 64, the rate
times 0.7 after each epoch; a DataLoader that turns every image into a normalised tensor on its own. Written
again from that description. Prints one JSON line an epoch: its seconds of training and the test accuracy.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class StockNet(nn.Module):
    """Images (batch, 1, 28, 28) -> log-probabilities (batch, 10)."""

    def __init__(self, side: int = 28, classes: int = 10):
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3)
        self.second = nn.Conv2d(32, 64, 3)
        self.dense = nn.Linear(64 * 12 * 12, 128)
        self.last = nn.Linear(128, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(images))))
        hidden = functional.max_pool2d(hidden, 2)
        hidden = functional.dropout(hidden, 0.25, self.training).flatten(1)
        hidden = functional.dropout(functional.relu(self.dense(hidden)), 0.5, self.training)
        return functional.log_softmax(self.last(hidden), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--max-steps", type=int, help="stop in the first epoch and print images per second")
    parser.add_argument("--target-accuracy", type=float, default=99.0)
    args = parser.parse_args()
    torch.manual_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    test_set = datasets.MNIST(args.data_dir, train=False, transform=transform)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    model = StockNet()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    seconds = 0.0
    for epoch in range(args.epochs):
        began = time.perf_counter()
        model.train()
        for step, (images, labels) in enumerate(loader, start=1):
            optimizer.zero_grad()
            functional.nll_loss(model(images), labels).backward()
            optimizer.step()
            if step == args.max_steps:
                print(json.dumps({"images_per_second": 64 * step / (time.perf_counter() - began)}), flush=True)
                return
        scheduler.step()
        seconds += time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(images).argmax(dim=1) == labels).sum()) for images, labels in test_loader)
        accuracy = correct / len(test_set)
        print(json.dumps({"epoch": epoch + 1, "training_seconds": seconds, "accuracy": accuracy}), flush=True)
        if accuracy * 100 >= args.target_accuracy:
            return


if __name__ == "__main__":
    main()
