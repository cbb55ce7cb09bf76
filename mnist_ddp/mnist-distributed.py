#!/usr/bin/env python3
"""Train a small network on MNIST, on one process or on nodes with different numbers of GPUs.

    mnist-distributed.py                            # all GPUs of this machine, or its CPU
    mnist-distributed.py -n 2 -g 8,2 -i 0           # 2 nodes with 8 and 2 GPUs; this is node 0, the master
    mnist-distributed.py -n 2 -g 8,2 -i 1 --master-addr NODE0      # this is node 1; node 0 prints this line
    torchrun --nproc-per-node 4 mnist-distributed.py               # any launcher

The loss of every step and the accuracy, about 99.2 %, do not depend on which of these was typed. (A model with
dropout draws other noise on another layout; everything else stays the same.)
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

if not __package__:  # started by its path: runs from any folder, without being installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.launch import cli, start, values


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=256)
    cli.add_link_flags(parser)
    training = cli.add_training_flags(parser, epochs=3, lr=8e-3)
    training.add_argument("--label-smoothing", type=values.probability, default=0.05, help="in training")
    training.add_argument(
        "--target-accuracy", type=values.percent, metavar="P", help="stop at this test accuracy, in %%"
    )
    data_flags = parser.add_argument_group("data")
    names = ("mnist", "fashion-mnist", "kmnist", "digits")
    data_flags.add_argument("--dataset", choices=names, default="mnist", help="digits needs no download")
    data_flags.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where the data are, or are downloaded to"
    )
    cli.add_output_flags(parser)
    cli.may_differ(parser, "data_dir")  # between nodes
    cli.may_change(parser, "dataset", "target_accuracy")  # in a resumed run; its data have a fingerprint
    return parser


def main() -> None:
    start.main(flags(), "mnist_ddp.train:train", cli.check_training)


if __name__ == "__main__":
    main()
