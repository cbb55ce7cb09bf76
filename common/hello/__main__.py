"""Every process of a job says who it is, in rank order: the smallest proof that a layout, a network and a backend work.

    python -m common.hello -n 2 -g 3,1 -i 0                      # on node 0; any other layout flags and launchers too
    [tcp://10.77.0.1:29500] hello from [nodea:gloo] process 0/4

Where a launcher has one terminal for all (srun, mpirun), rank 0 says all lines; else each node says its own.
"""

import socket
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # launchers may start this file by its path

from common.launch import cli, start
from common.launch.layout import Worker


def flags() -> ArgumentParser:
    return cli.parser(__doc__)


if __name__ == "__main__":
    start.main(flags())

import torch.distributed as dist

from common.join.process_group import process_group
from common.record.report import say


def train(worker: Worker, args: Namespace) -> None:
    """Gather every rank's words over the backend itself, and say them. Every rank runs it."""
    with process_group(worker, args) as group:
        words = f"hello from [{socket.gethostname()}:{group.backend}] process {worker.rank}/{worker.world_size}"
        spoken = [("", "", "")] * worker.world_size
        dist.all_gather_object(spoken, (group.address, (worker.node_rank, socket.gethostname()), words))
        address, here = spoken[0][0], spoken[worker.rank][1]
        on_this_terminal = [
            (rank, text) for rank, (_, node, text) in enumerate(spoken) if worker.layout.one_terminal or node == here
        ]
        if worker.rank == on_this_terminal[0][0]:
            say(None, "\n".join(f"[{address}] {text}" for _, text in on_this_terminal))
