"""This project's own flags, `-n 2 -g 8,2 -i 0`, and no flags at all."""

import secrets
from collections.abc import Mapping

from common.errors import UserError
from common.launch.addresses import DEFAULT_MASTER_PORT, free_port, tcp_address
from common.launch.gpus import devices_for, places_here
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import HETSEQ_FLAGS, NODE_FLAGS, count, number, typed


def from_join(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """`--join HOST:PORT -g 4`: this command starts the processes of a machine that joins a run under way."""
    if not flags.join:
        return None
    others = {**NODE_FLAGS, **HETSEQ_FLAGS, "master_addr": "--master-addr", "master_port": "--master-port"}
    if other := [word for word in typed(flags, others) if not word.startswith("-g")]:
        raise UserError(f"--join {flags.join} with {other[0]}: the run gives this machine its place: leave that out")
    if flags.gpus and len(flags.gpus) > 1:
        raise UserError(f"-g/--gpus is {','.join(map(str, flags.gpus))}: with --join give one number, this machine's")
    if any(environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        raise UserError(f"--join {flags.join} under a launcher, which starts it several times: type it once, with -g")
    size = flags.gpus[0] if flags.gpus else places_here(flags, environ)
    device_type, devices = devices_for(flags, environ, size, f"-g {size}")
    return Layout(
        source=f"--join {flags.join} -g {size}",
        world_size=size,
        first_rank=0,
        local_world_size=size,
        init_method=f"tcp://{flags.join}",
        device_type=device_type,
        devices=devices,
        joins=secrets.token_hex(8),
    )


def from_node_flags(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """`-n 2 -g 8,2 -i 0`: this command starts one node's processes."""
    if not typed(flags, NODE_FLAGS):
        return None
    gpus = flags.gpus or (1,)
    nodes = len(gpus) if flags.nodes is None else flags.nodes
    named = ",".join(map(str, gpus))
    if flags.gpus is None:
        raise UserError(f"-n/--nodes is {nodes}, but -g/--gpus is missing: name each node's GPUs, such as -g 8,2")
    if len(gpus) != nodes:
        each = "one number for each node" if nodes > 1 else "one number"
        raise UserError(f"-g/--gpus is {named}, which names {count(len(gpus), 'node')}, but -n is {nodes}: give {each}")
    if flags.node_rank is None and nodes > 1:
        raise UserError(f"-i/--node-rank is missing: -g {named} names nodes {_names(nodes)}; say which one this is")
    node_rank = flags.node_rank or 0
    if not node_rank < nodes:
        allowed = "0" if nodes == 1 else f"{_names(nodes, 'or')}"
        raise UserError(
            f"-i/--node-rank is {node_rank}, but -g {named} names node{'s' * (nodes > 1)} {_names(nodes)}: "
            f"use {allowed}"
        )
    device_type, devices = devices_for(flags, environ, gpus[node_rank], f"-g {named} for node {node_rank}")
    return Layout(
        source=f"-n {nodes} -g {named} -i {node_rank}",
        world_size=sum(gpus),
        first_rank=sum(gpus[:node_rank]),
        local_world_size=gpus[node_rank],
        node_rank=node_rank,
        nodes=nodes,
        gpus_per_node=gpus,
        init_method=_master(flags, environ, nodes, node_rank),
        device_type=device_type,
        devices=devices,
    )


def from_nothing(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout:
    """No flag and no launcher: all GPUs of this machine, or one process on its CPU."""
    gpus = places_here(flags, environ)
    device_type, devices = devices_for(flags, environ, gpus, "this machine")
    in_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    no_flags = "no layout flags, not started by srun" if in_batch_script else "no layout flags"
    return Layout(
        source=f"{no_flags}: what this machine has",
        world_size=gpus,
        first_rank=0,
        local_world_size=gpus,
        gpus_per_node=(gpus,),
        init_method=tcp_address("127.0.0.1", free_port()),
        device_type=device_type,
        devices=devices,
    )


def _master(flags: LayoutFlags, environ: Mapping[str, str], nodes: int, node_rank: int) -> str:
    """Where the nodes meet. Node 0 is the master and finds its own address; a single node meets on loopback."""
    port = flags.master_port or number(environ, "MASTER_PORT", default=0)
    address = flags.master_addr or environ.get("MASTER_ADDR", "")
    if nodes == 1:
        return tcp_address("127.0.0.1", port or free_port())
    if not address and node_rank > 0:
        raise UserError(
            f"--master-addr is missing: node {node_rank} must know where node 0 is; "
            "start node 0 first, it prints the exact command for this node (or set MASTER_ADDR)"
        )
    if node_rank == 0 and address.partition(":")[0] == "localhost":  # it means another machine on each node
        address = ""
    return tcp_address(address or "0.0.0.0", port or DEFAULT_MASTER_PORT)


def _names(nodes: int, word: str = "and") -> str:
    """3 -> '0, 1 and 2'; 100 -> '0 to 99'."""
    if nodes > 4:
        return f"0 to {nodes - 1}"
    numbers = [str(node) for node in range(nodes)]
    return f" {word} ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
