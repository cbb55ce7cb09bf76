"""From flags and environment to a `Layout` (one node's view) and its `Worker`s (one process's place).

Pure and frozen: nothing here starts, opens or imports anything heavy, so a wrong flag is answered in a tenth
of a second. This is the only module that reads launchers' variables.

    argv, environ -> Namespace -> layout_from() -> Layout -> .workers() -> Worker

The sources are tried in the order of `SOURCES`; each is one function that returns a Layout, or None when it
does not apply, or raises UserError when it applies but is wrong.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True)
class Layout:
    """One node's view of the job: how many processes there are, which of them run here, where they meet."""

    source: str  # what decided, for the log: "-n 2 -g 8,2 -i 0", "torchrun", ...
    world_size: int  # processes in the whole job
    first_rank: int  # of the processes that this command runs
    local_world_size: int  # processes on this node
    first_local_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    gpus_per_node: tuple[int, ...] | None = None  # (8, 2); None where a launcher does not tell
    spawn: bool = True  # start local_world_size processes; False: this process is the only worker here
    init_method: str = ""  # tcp://host:port or file:///path
    hosts_store: bool = True  # rank 0 opens the store; False: the launcher has opened it
    device_type: str = "cpu"  # cuda or cpu
    first_device: int = 0  # device index of the first worker here
    devices: int = 0  # devices that this node may use; workers share them under --oversubscribe

    def __post_init__(self) -> None:
        assert 0 <= self.first_rank < self.world_size, self
        assert 1 <= self.local_world_size <= self.world_size, self
        assert self.gpus_per_node is None or sum(self.gpus_per_node) == self.world_size, self

    def workers(self) -> list["Worker"]:
        """The places of the processes that this command runs: all of a node's, or just this one."""
        return [self._worker(index) for index in range(self.local_world_size if self.spawn else 1)]

    def _worker(self, index: int) -> "Worker":
        device = self.first_device + index
        return Worker(
            layout=self,
            rank=self.first_rank + index,
            local_rank=self.first_local_rank + index,
            device_index=device % self.devices if self.devices else 0,
        )


@dataclass(frozen=True)
class Worker:
    """One process's place in the job. Read `rank` from here; never compute it again."""

    layout: Layout
    rank: int
    local_rank: int
    device_index: int

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def local_world_size(self) -> int:
        return self.layout.local_world_size

    @property
    def node_rank(self) -> int:
        return self.layout.node_rank

    @property
    def device_type(self) -> str:
        return self.layout.device_type

    @property
    def is_main(self) -> bool:
        """True on one process of the whole job. (`local_rank == 0` is true once on every node.)"""
        return self.rank == 0


def layout_from(flags: Namespace, environ: Mapping[str, str] = os.environ) -> Layout:
    """The layout that flags and environment ask for.

    Raises UserError in the form *flag, value, what is allowed, how to mend it*, before any process is started.
    """
    for source in SOURCES:
        layout = source(flags, environ)
        if layout is not None:
            return layout
    raise AssertionError("the last source always answers")


# --- the sources, one function each -----------------------------------------------------------------------------


def from_torchrun(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """torchrun, and whatever else sets its variables: this process is one worker, already started."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE, ...)"
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [variable for variable in needed if variable not in environ]:
        found = ", ".join(f"{variable}={environ[variable]}" for variable in needed if variable in environ)
        raise UserError(
            f"{found} is set, but {', '.join(missing)} is not: set all of {', '.join(needed)}, as torchrun does, or none"
        )
    _refuse_own_flags(flags, name)
    if environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        raise UserError("TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes: unset it")
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", minimum=1)
    local_rank = _number(environ, "LOCAL_RANK")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=local_rank + 1, minimum=1)
    if not rank < world_size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE={world_size} allows 0 to {world_size - 1}")
    if not local_rank < local_world_size:
        raise UserError(f"LOCAL_RANK is {local_rank}, but LOCAL_WORLD_SIZE={local_world_size} allows less than that")
    device_type, devices = _devices(flags, environ, local_world_size, f"LOCAL_WORLD_SIZE={local_world_size}")
    return Layout(
        source=name,
        world_size=world_size,
        first_rank=rank,
        local_world_size=local_world_size,
        first_local_rank=local_rank,
        node_rank=_number(environ, "GROUP_RANK", default=0),
        nodes=_number(environ, "GROUP_WORLD_SIZE", default=1, minimum=1),
        spawn=False,
        init_method=tcp_address(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", minimum=1)),
        hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        device_type=device_type,
        first_device=local_rank,
        devices=devices,
    )


def from_node_flags(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """`-n 2 -g 8,2 -i 0`: this command starts one node's processes."""
    if flags.nodes is None and flags.gpus is None and flags.node_rank is None:
        return None
    gpus = flags.gpus or (1,)
    nodes = len(gpus) if flags.nodes is None else flags.nodes
    named = ",".join(map(str, gpus))
    if flags.gpus is None:
        raise UserError(f"-n/--nodes is {nodes}, but -g/--gpus is missing: name each node's GPUs, such as -g 8,2")
    if len(gpus) != nodes:
        each = "one number for each node" if nodes > 1 else "one number"
        raise UserError(
            f"-g/--gpus is {named}, which names {_count(len(gpus), 'node')}, but -n is {nodes}: give {each}"
        )
    if flags.node_rank is None and nodes > 1:
        raise UserError(f"-i/--node-rank is missing: -g {named} names nodes {_names(nodes)}; say which one this is")
    node_rank = flags.node_rank or 0
    if not node_rank < nodes:
        allowed = "0" if nodes == 1 else f"{_names(nodes, 'or')}"
        raise UserError(
            f"-i/--node-rank is {node_rank}, but -g {named} names node{'s' * (nodes > 1)} {_names(nodes)}: use {allowed}"
        )
    device_type, devices = _devices(flags, environ, gpus[node_rank], f"-g {named} for node {node_rank}")
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


def from_nothing(flags: Namespace, environ: Mapping[str, str]) -> Layout:
    """No flag and no launcher: all GPUs of this machine, or one process on its CPU."""
    gpus = 1 if flags.device == "cpu" else max(1, visible_gpus(environ))
    device_type, devices = _devices(flags, environ, gpus, "this machine")
    return Layout(
        source="no layout flags: what this machine has",
        world_size=gpus,
        first_rank=0,
        local_world_size=gpus,
        gpus_per_node=(gpus,),
        init_method=tcp_address("127.0.0.1", free_port()),
        device_type=device_type,
        devices=devices,
    )


SOURCES = (from_torchrun, from_node_flags, from_nothing)


# --- addresses --------------------------------------------------------------------------------------------------


def tcp_address(host: str, port: int) -> str:
    """tcp://host:port, with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(init_method: str) -> tuple[str, int]:
    """The reverse of `tcp_address`."""
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _master(flags: Namespace, environ: Mapping[str, str], nodes: int, node_rank: int) -> str:
    """Where the nodes meet. Node 0 is itself the master and needs no address; one node alone needs none at all."""
    port = flags.master_port or _number(environ, "MASTER_PORT", default=0)
    address = flags.master_addr or environ.get("MASTER_ADDR", "")
    if nodes == 1:
        return tcp_address("127.0.0.1", port or free_port())
    if not address and node_rank > 0:
        raise UserError(
            f"--master-addr is missing: node {node_rank} must know where node 0 is; "
            "start node 0 first, it prints the exact command for this node (or set MASTER_ADDR)"
        )
    return tcp_address(address or "0.0.0.0", port or DEFAULT_MASTER_PORT)


# --- devices ----------------------------------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many CUDA devices a process here would see, found without importing torch.

    NVIDIA's driver lists its devices under /proc; `CUDA_VISIBLE_DEVICES` can only take some away.
    """
    present = _driver_gpus()
    named = _cuda_visible_devices(environ)
    return present if named is None else min(present, len(named))


def _driver_gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def _cuda_visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return names[: names.index("-1")] if "-1" in names else [name for name in names if name]


def _devices(flags: Namespace, environ: Mapping[str, str], wanted: int, asked_by: str) -> tuple[str, int]:
    """The device type of this node's workers and how many devices they have, checked against `wanted`."""
    present = visible_gpus(environ)
    if flags.device == "cpu" or (flags.device == "auto" and present == 0):
        return "cpu", 0
    if present == 0:
        raise UserError("--device is cuda, but this node has no visible GPU: use --device cpu, or see `nvidia-smi`")
    if wanted > present and not flags.oversubscribe:
        limit = environ.get("CUDA_VISIBLE_DEVICES")
        reason = f" (CUDA_VISIBLE_DEVICES={limit})" if limit is not None else ""
        raise UserError(
            f"{asked_by} asks for {_count(wanted, 'GPU')}, but this node has {present}{reason}: ask for at most {present}, "
            "or share them with --oversubscribe, or use --device cpu"
        )
    return "cuda", present


# --- small helpers ----------------------------------------------------------------------------------------------


def _refuse_own_flags(flags: Namespace, launcher: str) -> None:
    """A launcher has started this process already; our own layout flags would start the workers once more."""
    for name, value in (("-n/--nodes", flags.nodes), ("-g/--gpus", flags.gpus), ("-i/--node-rank", flags.node_rank)):
        if value is not None:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(
                f"{name} is {shown}, but {launcher} has already started this process and says its rank: "
                f"leave out -n, -g and -i here, or start without {launcher}"
            )


def _number(environ: Mapping[str, str], name: str, default: int | None = None, minimum: int = 0) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {text!r} in the environment, which is no whole number") from None
    if value < minimum:
        raise UserError(f"{name} is {value} in the environment: it must be {minimum} or more")
    return value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _names(count: int, word: str = "and") -> str:
    """0, 1, 2 -> '0, 1 and 2'; long lists as '0 to 99'."""
    if count > 4:
        return f"0 to {count - 1}"
    numbers = [str(number) for number in range(count)]
    return f" {word} ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
