"""HetSeq's and fairseq's flags: `--distributed-init-method tcp://... --distributed-world-size 16 ...`."""

from collections.abc import Mapping

from common.errors import UserError
from common.launch.addresses import meeting
from common.launch.gpus import devices_for, places_here
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import HETSEQ_FLAGS, NODE_FLAGS, typed


def from_hetseq_flags(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """The layout that these flags ask for; None where none of them is given."""
    given = typed(flags, HETSEQ_FLAGS)
    if not given:
        return None
    if own := typed(flags, NODE_FLAGS):
        raise UserError(
            f"{own[0]} and {given[0]} are two ways to say one thing: "
            "use either -n, -g and -i, or HetSeq's --distributed-*"
        )
    if flags.distributed_world_size is None:
        raise UserError(
            f"{given[0]} is given, but --distributed-world-size is missing: add it, the processes of all nodes"
        )
    world_size = flags.distributed_world_size
    count, in_place = _counts(flags, world_size, environ)
    first_rank = _first_rank(flags, world_size, count, in_place)
    alone = world_size == 1 or (count == world_size and not in_place)
    device_id = flags.device_id
    if device_id is not None and not in_place:
        raise UserError(
            f"--device-id is {device_id}, but {count} processes start here, each on a GPU of its own: leave it out, or "
            "start one process for each GPU with --distributed-no-spawn"
        )
    asked_by = f"{count} of --distributed-world-size {world_size}" if device_id is None else f"--device-id {device_id}"
    device_type, devices = devices_for(flags, environ, count if device_id is None else device_id + 1, asked_by)
    return Layout(
        source=" ".join(given),
        world_size=world_size,
        first_rank=first_rank,
        local_world_size=count,
        nodes=1 if alone else 0,
        gpus_per_node=(world_size,) if alone else None,
        spawn=not in_place,
        init_method=meeting(flags, environ, host="127.0.0.1", port=0),
        meeting=("--distributed-init-method", "--distributed-init-method: port"),
        device_type=device_type,
        first_device=device_id or 0,
        devices=devices,
    )


def _counts(flags: LayoutFlags, world_size: int, environ: Mapping[str, str]) -> tuple[int, bool]:
    """(number of processes on this node, whether this process is itself the worker)."""
    elsewhere = flags.distributed_init_method or flags.master_addr or flags.distributed_rank
    count = flags.distributed_gpus
    if count is None and flags.distributed_no_spawn:
        count = 1
    if count is None:
        count = min(places_here(flags, environ), world_size) if elsewhere else world_size
    if count > world_size:
        raise UserError(
            f"--distributed-gpus is {count}, but --distributed-world-size is {world_size}: "
            f"at most {world_size} can start here"
        )
    in_place = count == 1 or flags.distributed_no_spawn
    started = 1 if in_place else count
    if started < world_size and not (flags.distributed_init_method or flags.master_addr):
        raise UserError(
            f"--distributed-init-method is missing: {started} of {world_size} processes start here, and must know "
            "where the others are: give tcp://HOST:PORT of rank 0, or file:///SHARED/FILE"
        )
    return count, bool(in_place)


def _first_rank(flags: LayoutFlags, world_size: int, count: int, in_place: bool) -> int:
    started = 1 if in_place else count
    if flags.distributed_rank is None and started < world_size:
        raise UserError(
            f"--distributed-rank is missing: {started} of {world_size} processes start here; give the first one's rank"
        )
    first_rank = flags.distributed_rank or 0
    if first_rank + started > world_size:
        raise UserError(
            f"--distributed-rank is {first_rank}, but with {started} started here "
            f"--distributed-world-size {world_size} allows 0 to {world_size - started}"
        )
    return first_rank
