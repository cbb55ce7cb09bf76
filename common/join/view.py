"""A *view*: what one rank believes about the job and about itself, as plain JSON. Views are compared by rank 0."""

import json
import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

import torch

from common.launch.cli import shown
from common.launch.layout import Layout, Worker
from common.launch.options import JoinOptions
from common.version import versions

LAYOUT_FIELDS = {"gpus_per_node": "-g/--gpus", "world_size": "world size", "nodes": "-n/--nodes"}
RESUME = "--resume"  # a flag of the start alone
COMPARED = ("versions", "layout", "backend", "flags")  # sections, in the order in which a difference is reported


def view_of(
    worker: Worker, options: JoinOptions, device: torch.device, backend: str, addresses: dict[str, str], problem: str
) -> dict:
    """This rank's view. `problem` is a mistake that only this rank can see, or an empty string."""
    on_gpu = device.type == "cuda"
    flags = dict(options.agreed_flags or {})
    if worker.membership:  # in a run that goes on, nothing is loaded
        flags.pop(RESUME, None)
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "original": worker.membership.original.rank if worker.membership else worker.rank,
        "nodes": worker.layout.nodes,
        "node_rank": worker.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_space": _pid_space(),
        "process": process_name(os.getpid()),
        "device": f"{device} ({torch.cuda.get_device_name(device) if on_gpu else 'CPU'})",
        "gpu": gpu_of(device, options),
        "source": worker.layout.source,
        "addresses": addresses,
        "layout": layout_of(worker.layout),
        "versions": versions(),
        "backend": {"--backend": backend},
        "flags": flags,
        "problem": problem,
        "nonce": secrets.token_hex(8),  # new in each view, so that no earlier verdict fits it
    }


def gpu_of(device: torch.device, options: JoinOptions) -> str:
    """The UUID of a GPU that no other rank may have; empty for a CPU, and where ranks may share GPUs."""
    is_own = device.type == "cuda" and not options.oversubscribe
    return str(torch.cuda.get_device_properties(device).uuid) if is_own else ""


def read_view(content: str) -> dict | None:
    """The view that was posted, or None for what is none: anyone who reaches the store can write into it."""
    try:
        view = json.loads(content)
        texts = [view[name] for name in ("host", "source", "gpu", "problem", "device", "pid_space", "process", "nonce")]
        numbers = [view[name] for name in ("rank", "local_rank", "original", "node_rank", "nodes", "pid", "entry")]
        sections = [view["addresses"], *(view[section] for section in COMPARED)]
        is_right = all(isinstance(one, str) for one in texts) and all(type(one) is int for one in numbers)
        is_right = is_right and all(isinstance(one, str) for section in sections for one in section.values())
        return view if is_right and {"own", "master"} <= view["addresses"].keys() and _size(view) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _size(view: dict) -> bool:
    """Whether the view has a world size, and a rank below it."""
    size = view["layout"]["world size"]
    return size.isascii() and size.isdigit() and len(size) < 9 and 0 <= view["rank"] < int(size)


def process_name(pid: int) -> str:
    """Tells the process of this pid here from one of the same pid on another machine or in another container."""
    return f"{socket.gethostname()} {_namespace()} {pid}"


def _pid_space() -> str:
    """The same on two ranks if each can look up the other by its pid: containers on one machine may not."""
    # A sandbox may show the /proc of another space, where this process has another number: nobody is looked up.
    proc = Path("/proc/self")
    is_foreign = proc.exists() and proc.readlink() != Path(str(os.getpid()))
    return f"{_namespace()} {secrets.token_hex(8)}" if is_foreign else _namespace()


def _namespace() -> str:
    """In which pids are unique: a container's, or the machine's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def layout_of(layout: Layout) -> dict[str, str]:
    return {label: shown(getattr(layout, name)) for name, label in LAYOUT_FIELDS.items()}


def node_of(view: dict) -> tuple[int, str]:
    """What tells one node from another: hosts may share a name, and not every launcher numbers the nodes."""
    return view["node_rank"], view["host"]


def place(view: dict) -> str:
    """Where a rank is, for messages: "node 1 (nodeb, rank 8)"."""
    if view["rank"] < 0:  # it has no number yet (--join)
        return view["host"]
    if view["nodes"] == 0:  # the launcher does not number the nodes
        return f"{view['host']} (rank {view['rank']})"
    return f"node {view['node_rank']} ({view['host']}, rank {view['rank']})"


def places(views: Iterable[dict], joint: str = "and") -> str:
    """Where several ranks are, by node: "ranks 3 to 4, node 1 (nodeb)"."""
    nodes: dict[tuple[int, str], list[dict]] = {}
    for view in views:
        nodes.setdefault(node_of(view), []).append(view)
    named = []
    for (node_rank, host), here in nodes.items():
        ranks = f"rank{'s' * (len(here) > 1)} {ranges([view['rank'] for view in here])}"
        named.append(f"{ranks}, node {node_rank} ({host})" if here[0]["nodes"] else f"{ranks} on {host}")
    return f" {joint} ".join(named)


def difference(first: dict, other: dict, sections: tuple[str, ...] = COMPARED) -> str | None:
    """The first field in which two views differ, as a sentence with both nodes and both values."""
    for section in sections:
        for name in first[section] | other[section]:
            mine, theirs = (view[section].get(name, "not given") for view in (first, other))
            if mine != theirs:
                places = f"{place(other)} has {name} {theirs}, but {place(first)} has {mine}"
                return f"{places}: make them the same on every node"
    return None


def claimed_twice(first: dict, second: dict) -> str:
    """The message for two processes that both say that they are this rank."""
    places = " and ".join(f"{view['host']} (pid {view['pid']}, {view['source']})" for view in (first, second))
    return (
        f"rank {first['rank']} is claimed twice, by {places}: give every node a number of its own "
        "(-i/--node-rank, or --distributed-rank)"
    )


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0 to 2, 5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
