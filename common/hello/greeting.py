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
        here = worker.node_rank, socket.gethostname()
        greeting = f"hello from [{here[1]}:{group.backend}] process {worker.rank}/{worker.world_size}"
        gathered = [("", here, "")] * worker.world_size  # by rank: address, node, greeting
        dist.all_gather_object(gathered, (group.address, here, greeting))
        all_here = worker.layout.one_terminal
        shown = {rank: text for rank, (_, node, text) in enumerate(gathered) if all_here or node == here}
        if worker.rank == min(shown):
            say("\n".join(f"[{gathered[0][0]}] {text}" for text in shown.values()))
