#!/usr/bin/env python3
"""Our MNIST trainer with the stock recipe's model in place of its own: the same loop, another network."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from common.launch import start

MNIST = Path(__file__).resolve().parents[1] / "mnist_ddp" / "mnist-distributed.py"

if __name__ == "__main__":
    start.main(start.flags_of(MNIST))

from stock_mnist import StockNet

trainer = start.load(str(MNIST))
trainer.ConvNet = StockNet
train = trainer.train
