"""The greeting of every rank, gathered over the backend itself."""

import socket
from argparse import Namespace

import torch.distributed as dist

from common.console import say
from common.join.process_group import process_group
from common.launch import cli
from common.launch.layout import Worker


def greet(worker: Worker, args: Namespace) -> None:
    """Gather the greetings of all ranks and print those that belong on this terminal. Every rank must call this."""
    with process_group(worker, cli.join_options(args)) as group:
        greeting = f"hello from [{socket.gethostname()}:{group.backend}] process {worker.rank}/{worker.world_size}"
        gathered = [("", (0, ""), "")] * worker.world_size  # by rank: address, node, greeting
        dist.all_gather_object(gathered, (group.address, (worker.node_rank, socket.gethostname()), greeting))
        address, here = gathered[0][0], gathered[worker.rank][1]
        on_this_terminal = [
            (rank, text) for rank, (_, node, text) in enumerate(gathered) if worker.layout.one_terminal or node == here
        ]
        first_rank = on_this_terminal[0][0]
        if worker.rank == first_rank:
            say("\n".join(f"[{address}] {text}" for _, text in on_this_terminal))
