"""The layout of a process that an outer launcher has started, from environment variables."""

from collections.abc import Mapping
from typing import Any

from common.errors import UserError
from common.launch.gpus import devices_for, has_one_device_of_its_own
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import HETSEQ_FLAGS, NODE_FLAGS, number, typed


def launched_layout(
    flags: LayoutFlags,
    environ: Mapping[str, str],
    launcher: str,
    names: tuple[str, str, str, str],
    local_world_size: int | None = None,
    nodes: int = 0,
    **fields: Any,
) -> Layout:
    """The layout of a process that `launcher` has started.

    `names` are the variables that hold its rank, world size, local rank and local world size. `fields` are further
    fields of the Layout. If a device is missing on one of several nodes, the error becomes `Layout.problem`, which the
    join reports on every node. The other nodes would otherwise wait for this one.
    """
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, world_size = number(environ, rank_name), number(environ, size_name, minimum=1)
    local_rank = number(environ, local_rank_name)
    if local_world_size is None:
        local_world_size = number(environ, local_size_name, default=local_rank + 1, minimum=1)
    _refuse_own_flags(flags, launcher, local_rank_name, local_rank)
    if not rank < world_size:
        raise UserError(f"{rank_name} is {rank}, but {size_name}={world_size} allows 0 to {world_size - 1}")
    if not local_rank < local_world_size <= world_size:
        raise UserError(
            f"{local_rank_name} is {local_rank} of {local_world_size} here, but {size_name} is {world_size}: "
            "the local rank must be below the number of processes here, which must be at most the world size"
        )
    alone = local_world_size == world_size
    problem, first_device = "", local_rank
    try:
        if has_one_device_of_its_own(flags, environ, local_world_size):
            device_type, devices, first_device = "cuda", local_world_size, 0
        else:
            device_type, devices = devices_for(
                flags, environ, local_world_size, f"{launcher} with {local_world_size} here"
            )
    except UserError as error:
        if alone:
            raise
        device_type, devices, problem = "cpu", 0, str(error)
    return Layout(
        source=launcher,
        world_size=world_size,
        first_rank=rank,
        local_world_size=local_world_size,
        first_local_rank=local_rank,
        nodes=1 if alone else nodes,
        spawn=False,
        launched=True,
        device_type=device_type,
        first_device=first_device,
        devices=devices,
        problem=problem,
        **fields,
    )


def _refuse_own_flags(flags: LayoutFlags, launcher: str, local_rank_name: str, local_rank: int) -> None:
    """Refuse flags that would start the workers a second time.

    Two are allowed: `--distributed-init-method` only says where to meet, and torch.distributed.launch itself passes
    --local-rank (our --device-id).
    """
    names = NODE_FLAGS | HETSEQ_FLAGS
    del names["distributed_init_method"], names["device_id"]
    if given := typed(flags, names):
        raise UserError(
            f"{given[0]} is given, but {launcher} has already started this process and says its rank: "
            f"leave out {given[0].split()[0]} here, or start without {launcher}"
        )
    if flags.device_id not in (None, local_rank):
        raise UserError(
            f"--device-id/--local-rank is {flags.device_id}, but {launcher} says {local_rank_name}={local_rank}: "
            "leave it out"
        )
