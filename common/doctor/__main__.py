#!/usr/bin/env python3
"""Is this cluster fit to train? Examines every node, link and rank, and says what is wrong and how to fix it.

    python -m common.doctor                                         # this machine alone
    python -m common.doctor -n 2 -g 8,2 -i 0                        # on each node, with the trainer's layout flags
    python -m common.doctor -n 2 -g 8,2 -i 1 --master-addr NODE0
    torchrun --nproc-per-node 4 -m common.doctor                    # any launcher

Node 0 prints the tables, every node the findings. Exit code 1 when something would break training, 2 for a wrong flag.
From any folder: python common/doctor/__main__.py, by its path.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

if not __package__:  # launchers may start this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.launch import cli, start, values


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    add = parser.add_argument_group("doctor").add_argument
    add("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    lowest = "lowest rate of a link in Mbit/s that is not an error"
    add("--min-rate", type=values.positive_float, default=500.0, metavar="MBIT", help=lowest)
    parser.set_defaults(join_timeout=15.0, timeout=10.0)
    cli.may_differ(parser, "json")  # between nodes
    return parser


if __name__ == "__main__":
    start.main(flags(), "common.doctor.examination:examine")
