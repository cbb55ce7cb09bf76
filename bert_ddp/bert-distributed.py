#!/usr/bin/env python3
"""Pretrain BERT on text, on one process or on nodes with different numbers of GPUs.

    bert-distributed.py                             # all GPUs of this machine, or its CPU; Python's docs as text
    bert-distributed.py -n 2 -g 8,2 -i 0 --corpus books         # 2 nodes with 8 and 2 GPUs; this is node 0, the master
    bert-distributed.py -n 2 -g 8,2 -i 1 --corpus books --master-addr NODE0      # this is node 1; node 0 prints this
    torchrun --nproc-per-node 4 bert-distributed.py                              # any launcher

The loss of every step and the held-out loss do not depend on which of these was typed. (A model with dropout draws
other noise on another layout; everything else stays the same.)
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

if not __package__:  # started by its path: runs from any folder, without being installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_ddp.text.flags import PATHS, SETTINGS, add_corpus_flags
from common.launch import cli, start, values


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=256)
    cli.add_link_flags(parser)
    training = cli.add_training_flags(parser, epochs=40, lr=1e-4, decayed="matrices")
    cli.add_warmup_flag(training, default="0")
    training.add_argument("--decay-power", type=values.positive_float, default=1.0, metavar="X", help="1: linear to 0")
    training.add_argument(
        "--mask-probability", type=values.probability, default=0.15, metavar="P", help="part of the tokens to mask"
    )
    training.add_argument("--whole-words", action="store_true", help="mask all tokens of a word together")
    training.add_argument(
        "--eval-every", type=values.positive_int, metavar="S", help="steps between evaluations (each epoch)"
    )
    training.add_argument("--checkpoint-activations", action="store_true", help="recompute activations to save memory")
    model = parser.add_argument_group("model")
    names = ("tiny", "mini", "small", "base", "large")
    model.add_argument("--preset", choices=names, default="base", help="sizes of Google's BERT models")
    model.add_argument("--config-file", type=Path, metavar="JSON", help="a bert_config.json instead of --preset")
    model.add_argument("--dropout", type=values.probability, metavar="P", help="instead of the config's 0.1")
    model.add_argument("--init-from", metavar="MODEL", help="folder, run or hub name to begin from, as phase 2 does")
    data_flags = add_corpus_flags(parser)
    data_flags.add_argument(
        "--data-workers",
        type=values.natural_int,
        default=0,
        metavar="N",
        help="processes of each rank that make batches, N for training and N for evaluation; 0: the rank makes them",
    )
    cli.add_output_flags(parser)
    cli.may_differ(parser, *PATHS, "data_workers", "init_from", "config_file")  # between nodes
    cli.may_change(parser, *SETTINGS, "preset", "eval_every", "checkpoint_activations")  # in a resumed run
    parser.set_defaults(unit="rows", eval_batch=64)
    return parser


def main() -> None:
    start.main(flags(), "bert_ddp.pretrain.train:train", cli.check_training)


if __name__ == "__main__":
    main()
