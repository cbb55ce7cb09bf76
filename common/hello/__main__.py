#!/usr/bin/env python3
"""Every process of a job says who it is, in rank order: the smallest proof that a layout, a network and a backend work.

    python -m common.hello -n 2 -g 3,1 -i 0                      # on node 0; any other layout flags and launchers too
    [tcp://10.77.0.1:29500] hello from [nodea:gloo] process 0/4

Where a launcher has one terminal for all nodes (srun, mpirun), rank 0 prints all lines. Elsewhere each node prints its
own. From any folder: python common/hello/__main__.py, by its path.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

if not __package__:  # launchers may start this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.launch import cli, start


def flags() -> ArgumentParser:
    return cli.parser(__doc__)


if __name__ == "__main__":
    start.main(flags(), "common.hello.greeting:greet")
