"""From flags and environment to a `Layout` (one node's view) and its `Worker`s (one process's place).

Pure and frozen: nothing here starts, opens or imports anything heavy, so a wrong flag is answered in a tenth
of a second. This is the only module that reads launchers' variables.

    argv, environ -> Namespace -> layout_from() -> Layout -> .workers() -> Worker

The sources are tried in the order of `SOURCES`; each is one function that returns a Layout, or None when it
does not apply, or raises UserError when it applies but is wrong.
"""

import os
import re
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
    nodes: int = 1  # 0 where nobody tells
    gpus_per_node: tuple[int, ...] | None = None  # (8, 2); None where a launcher does not tell
    spawn: bool = True  # start local_world_size processes; False: this process is the only worker here
    launched: bool = False  # by an outer launcher: this process is one of its workers and ends with it
    one_terminal: bool = False  # the launcher shows the lines of all nodes in one place
    init_method: str = ""  # tcp://host:port or file:///path
    meeting: tuple[str, str] = ("--master-addr", "--master-port")  # who said host and port, for messages
    problem: str = ""  # known on this node alone: the join tells it to every node, and nobody waits
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
    """torchrun, torch.distributed.launch, accelerate launch, and whatever else sets RANK, WORLD_SIZE and so on."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE, ...)"
    meets_elsewhere = bool(flags.distributed_init_method or flags.master_addr)
    address = () if meets_elsewhere else ("MASTER_ADDR", "MASTER_PORT")
    _refuse_half_set(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", *address), "torchrun")
    if environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        raise UserError("TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes: unset it")
    _refuse_another_rank(environ)
    return _launched(
        flags,
        environ,
        name,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        node_rank=_number(environ, "GROUP_RANK", default=0),
        nodes=_number(environ, "GROUP_WORLD_SIZE", default=0),
        init_method=_meeting(flags, environ, host="", port=DEFAULT_MASTER_PORT),
        hosts_store=meets_elsewhere or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        meeting=("MASTER_ADDR", "MASTER_PORT"),
    )


def from_openmpi(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """mpirun of Open MPI: this process is one of its tasks."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    names = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    _refuse_half_set(environ, names, "mpirun")
    job = "".join(filter(str.isdigit, environ.get("PMIX_NAMESPACE", ""))) or "0"
    init_method = _meeting_of_mpi(flags, environ, names, "-x MASTER_ADDR=HOST", _job_port(int(job)))
    return _launched(flags, environ, "Open MPI's mpirun", names, init_method=init_method, one_terminal=True)


def from_mpich(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """mpiexec of MPICH, or of another MPI whose tasks Hydra starts, such as Intel's."""
    by_srun = "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ  # srun --mpi=pmi2
    if "PMI_RANK" not in environ or by_srun:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    _refuse_half_set(environ, names, "mpiexec")
    init_method = _meeting_of_mpi(flags, environ, names, "-genv MASTER_ADDR HOST", DEFAULT_MASTER_PORT)
    return _launched(flags, environ, "MPICH's mpiexec", names, init_method=init_method, one_terminal=True)


def from_slurm(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """srun with several tasks: this process is one of them.

    Only a task of a step has SLURM_STEP_ID: a plain `python` in a batch script has SLURM_PROCID and SLURM_NTASKS
    too, but is alone. Sizes are the step's, for those of the job may be another heterogeneous part's.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _refuse_half_set(environ, ("SLURM_PROCID", size, "SLURM_LOCALID"), "srun")
    if environ[size] == "1":
        return None  # one task, such as an interactive shell: what is typed there decides
    port = _job_port(_number(environ, "SLURM_JOB_ID", default=0), _number(environ, "SLURM_STEP_ID", default=0))
    named = flags.master_addr or flags.distributed_init_method or environ.get("MASTER_ADDR")
    return _launched(
        flags,
        environ,
        "srun",
        one_terminal=True,
        names=("SLURM_PROCID", size, "SLURM_LOCALID", ""),
        local_world_size=_slurm_tasks_here(environ),
        node_rank=_number(environ, "SLURM_NODEID", default=0),
        nodes=_number(environ, "SLURM_STEP_NUM_NODES", default=0),
        init_method=_meeting(flags, environ, host="" if named else _slurm_host_of_rank_0(environ), port=port),
    )


def from_hetseq_flags(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """HetSeq's and fairseq's flags: `--distributed-init-method tcp://... --distributed-world-size 16 ...`."""
    given = _given(flags, HETSEQ_FLAGS)
    if not given:
        return None
    if own := _given(flags, NODE_LAYOUT_FLAGS):
        raise UserError(
            f"{own[0]} and {given[0]} are two ways to say one thing: "
            "use either -n, -g and -i, or HetSeq's --distributed-*"
        )
    if flags.distributed_world_size is None:
        raise UserError(
            f"{given[0]} is given, but --distributed-world-size is missing: add it, the processes of all nodes"
        )
    world_size, count, in_place = _hetseq_counts(flags, environ)
    first_rank = _hetseq_first_rank(flags, world_size, count, in_place)
    alone = world_size == 1 or (count == world_size and not in_place)
    device_id = flags.device_id
    if device_id is not None and not in_place:
        raise UserError(
            f"--device-id is {device_id}, but {count} processes start here, each on a GPU of its own: leave it out, or "
            "start one process for each GPU with --distributed-no-spawn"
        )
    asked_by = f"{count} of --distributed-world-size {world_size}" if device_id is None else f"--device-id {device_id}"
    device_type, devices = _devices(flags, environ, count if device_id is None else device_id + 1, asked_by)
    return Layout(
        source=" ".join(given),
        world_size=world_size,
        first_rank=first_rank,
        local_world_size=count,
        nodes=1 if alone else 0,
        gpus_per_node=(world_size,) if alone else None,
        spawn=not in_place,
        init_method=_meeting(flags, environ, host="127.0.0.1", port=0),
        meeting=("--distributed-init-method", "--distributed-init-method: port"),
        device_type=device_type,
        first_device=device_id or 0,
        devices=devices,
    )


def from_node_flags(flags: Namespace, environ: Mapping[str, str]) -> Layout | None:
    """`-n 2 -g 8,2 -i 0`: this command starts one node's processes."""
    if not _given(flags, NODE_LAYOUT_FLAGS):
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
            f"-i/--node-rank is {node_rank}, but -g {named} names node{'s' * (nodes > 1)} {_names(nodes)}: "
            f"use {allowed}"
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
    gpus = _gpus_here(flags, environ)
    device_type, devices = _devices(flags, environ, gpus, "this machine")
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


# Launchers first, the innermost before those that may have started it: torchrun under srun, mpirun under srun.
SOURCES = (
    from_torchrun,
    from_openmpi,
    from_mpich,
    from_slurm,
    from_hetseq_flags,
    from_node_flags,
    from_nothing,
)

NODE_LAYOUT_FLAGS = {"nodes": "-n/--nodes", "gpus": "-g/--gpus", "node_rank": "-i/--node-rank"}
HETSEQ_FLAGS = {
    "distributed_init_method": "--distributed-init-method",
    "distributed_world_size": "--distributed-world-size",
    "distributed_gpus": "--distributed-gpus",
    "distributed_rank": "--distributed-rank",
    "device_id": "--device-id",
    "distributed_no_spawn": "--distributed-no-spawn",
}


# --- parts of the sources ---------------------------------------------------------------------------------------


def _launched(
    flags: Namespace,
    environ: Mapping[str, str],
    launcher: str,
    names: tuple[str, str, str, str],
    local_world_size: int | None = None,
    nodes: int = 0,
    **fields: object,
) -> Layout:
    """The layout of a process that an outer launcher has started and told its place, in the variables `names`."""
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, world_size = _number(environ, rank_name), _number(environ, size_name, minimum=1)
    local_rank = _number(environ, local_rank_name)
    if local_world_size is None:
        local_world_size = _number(environ, local_size_name, default=local_rank + 1, minimum=1)
    _refuse_own_flags(flags, launcher, local_rank_name, local_rank)
    if not rank < world_size:
        raise UserError(f"{rank_name} is {rank}, but {size_name}={world_size} allows 0 to {world_size - 1}")
    if not local_rank < local_world_size <= world_size:
        raise UserError(
            f"{local_rank_name} is {local_rank} of {local_world_size} here, but {size_name} is {world_size}: "
            "a local rank is below the number of processes here, and that is not above the number of all"
        )
    alone = local_world_size == world_size
    problem, first_device = "", local_rank
    try:
        if _has_one_device_of_its_own(flags, environ, local_world_size):
            device_type, devices, first_device = "cuda", local_world_size, 0
        else:
            device_type, devices = _devices(
                flags, environ, local_world_size, f"{launcher} with {local_world_size} here"
            )
    except UserError as error:
        if alone:
            raise
        device_type, devices, problem = "cpu", 0, str(error)  # the other nodes would wait: the join tells them
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


def _hetseq_counts(flags: Namespace, environ: Mapping[str, str]) -> tuple[int, int, bool]:
    """World size, how many of its processes are this node's, and whether this very process is the one to work."""
    world_size = flags.distributed_world_size
    elsewhere = flags.distributed_init_method or flags.master_addr or flags.distributed_rank
    count = flags.distributed_gpus
    if count is None and flags.distributed_no_spawn:
        count = 1
    if count is None:
        count = min(_gpus_here(flags, environ), world_size) if elsewhere else world_size
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
    return world_size, count, in_place


def _hetseq_first_rank(flags: Namespace, world_size: int, count: int, in_place: bool) -> int:
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


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """How many tasks of this step run on this node: SLURM_GTIDS has their ranks, such as 0,2,3."""
    if "SLURM_GTIDS" in environ:
        return len(environ["SLURM_GTIDS"].split(","))
    sizes = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", default=0)
    if not node < len(sizes):
        raise UserError("SLURM_GTIDS and SLURM_STEP_TASKS_PER_NODE are not set: start the tasks with srun")
    return sizes[node]


def _slurm_host_of_rank_0(environ: Mapping[str, str]) -> str:
    """The host that has rank 0: mostly the first of the step's, but not with a host file or heterogeneous parts."""
    here = environ.get("SLURMD_NODENAME", "")
    ranks_here = environ.get("SLURM_GTIDS", "").split(",")
    if "0" in ranks_here and here:
        return here
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        hosts = _first_of_host_file(environ.get("SLURM_HOSTFILE", ""))
    for part in range(_number(environ, "SLURM_HET_SIZE", default=0)):
        listed = environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{part}") or environ.get(
            f"SLURM_JOB_NODELIST_PACK_GROUP_{part}", ""
        )
        if in_step := [host for host in expand_hosts(listed) if host in hosts]:
            hosts = in_step
            break
    if not hosts or (hosts[0] == here and ranks_here != [""]):
        raise UserError(
            f"Slurm's variables do not tell on {here or 'this node'} where rank 0 is "
            f"(SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION', '')}): give --master-addr HOST, the host of rank 0"
        )
    return hosts[0]


def _first_of_host_file(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()[:1]
    except OSError:
        return []


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of host names, in its order: 'gpu[01-02,7],login' -> gpu01, gpu02, gpu7, login."""
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
        if not found:
            hosts.append(name)
            continue
        prefix, ranges, suffix = found.groups()
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names = [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
            hosts += [host for name in names for host in expand_hosts(name)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of a number for each node: '2(x3),1' -> 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]


def _job_port(job: int, step: int = 0) -> int:
    """A port that the last thousand jobs, and the first 16 steps of each, do not share. Below the ephemeral ones."""
    return 15000 + (job * 16 + step) % 16381


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


def _meeting(flags: Namespace, environ: Mapping[str, str], host: str, port: int) -> str:
    """Where the processes meet: flags before environment before what the source knows itself (port 0: any free)."""
    url = flags.distributed_init_method
    if url:
        if address := _given(flags, {"master_addr": "--master-addr", "master_port": "--master-port"}):
            raise UserError(
                f"--distributed-init-method {url} and {address[0]} both say where to meet: give one of them"
            )
        return _meeting_of_url(url, environ)
    host = flags.master_addr or environ.get("MASTER_ADDR") or host
    port = flags.master_port or _number(environ, "MASTER_PORT", default=port)
    return tcp_address(host, port or free_port())


def _meeting_of_url(url: str, environ: Mapping[str, str]) -> str:
    """tcp://HOST:PORT or file:///PATH, checked; env:// is what MASTER_ADDR and MASTER_PORT say."""
    scheme, _, rest = url.partition("://")
    if scheme == "env" and not rest:
        _refuse_half_set(environ, ("MASTER_ADDR", "MASTER_PORT"), "a launcher", "--distributed-init-method env://")
        return tcp_address(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", minimum=1))
    if scheme == "file":
        if not rest.startswith("/") or rest.endswith("/"):
            raise UserError(
                f"--distributed-init-method is {url}: after file:// comes the whole path of a file that all nodes "
                "share, with its /: file:///SHARED/FILE"
            )
        return url
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 1 <= int(port) <= 65535 or "/" in host:
        raise UserError(
            f"--distributed-init-method is {url}: give tcp://HOST:PORT (an IPv6 address in brackets), file:///PATH or env://"
        )
    if ":" in host.strip("[]") and not (host.startswith("[") and host.endswith("]")):
        raise UserError(f"--distributed-init-method is {url}: an IPv6 address needs brackets, tcp://[{host}]:{port}")
    return url


def _meeting_of_mpi(
    flags: Namespace, environ: Mapping[str, str], names: tuple[str, str, str, str], option: str, port: int
) -> str:
    """MPI's launchers do not tell where rank 0 is: on one node that is here, on several it must be said."""
    alone = environ[names[3]] == environ[names[1]]
    if not (alone or flags.distributed_init_method or flags.master_addr or environ.get("MASTER_ADDR")):
        raise UserError(
            f"--master-addr is missing: {names[3]}={environ[names[3]]} of {names[1]}={environ[names[1]]} run here, "
            f"and MPI's launcher does not say where rank 0 is: add {option} to it, or --master-addr HOST here"
        )
    return _meeting(flags, environ, host="127.0.0.1", port=port)


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


def _gpus_here(flags: Namespace, environ: Mapping[str, str]) -> int:
    """How many processes this machine has room for: one for each GPU, or one on its CPU."""
    return 1 if flags.device == "cpu" else max(1, visible_gpus(environ))


def _has_one_device_of_its_own(flags: Namespace, environ: Mapping[str, str], local_world_size: int) -> bool:
    """Does this task see one GPU, its own, as with `srun --gpus-per-task=1`? Then its index is 0, not the local rank.

    The join finds tasks that see the same one.
    """
    named = _cuda_visible_devices(environ)
    one_named = named is not None and len(named) == 1 and visible_gpus(environ) == 1
    return one_named and local_world_size > 1 and flags.device != "cpu" and not flags.oversubscribe


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
            f"{asked_by} asks for {_count(wanted, 'GPU')}, but this node has {present}{reason}: "
            f"ask for at most {present}, or share them with --oversubscribe, or use --device cpu"
        )
    return "cuda", present


# --- small helpers ----------------------------------------------------------------------------------------------


def _given(flags: Namespace, names: Mapping[str, str]) -> list[str]:
    """Which of these flags are given, as a person would type them: '--distributed-rank 3'."""
    given = []
    for name, flag in names.items():
        value = getattr(flags, name)
        if value is True:
            given.append(flag)
        elif value is not None and value is not False:
            given.append(f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return given


def _refuse_own_flags(flags: Namespace, launcher: str, local_rank_name: str, local_rank: int) -> None:
    """A launcher has started this process already; our own layout flags would start the workers once more.

    `--distributed-init-method` alone only says where to meet. torch.distributed.launch hands --local-rank to us.
    """
    names = NODE_LAYOUT_FLAGS | HETSEQ_FLAGS
    del names["distributed_init_method"], names["device_id"]
    if given := _given(flags, names):
        raise UserError(
            f"{given[0]} is given, but {launcher} has already started this process and says its rank: "
            f"leave out {given[0].split()[0]} here, or start without {launcher}"
        )
    if flags.device_id not in (None, local_rank):
        raise UserError(
            f"--device-id/--local-rank is {flags.device_id}, but {launcher} says {local_rank_name}={local_rank}: "
            "leave it out"
        )


def _refuse_half_set(environ: Mapping[str, str], needed: tuple[str, ...], like: str, asked_by: str = "") -> None:
    missing = [variable for variable in needed if not environ.get(variable)]
    if not missing:
        return
    found = [f"{variable}={environ[variable]}" for variable in needed if environ.get(variable)]
    given = " and ".join(filter(None, [asked_by, ", ".join(found)])) or needed[0]
    raise UserError(
        f"{given} is set, but {', '.join(missing)} is not: set all of {', '.join(needed)}, as {like} does, or none"
    )


def _refuse_another_rank(environ: Mapping[str, str]) -> None:
    """RANK set by hand (not by torchrun) beside a launcher that says another rank: two sources at once."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return  # torchrun, itself started by srun or mpirun on each node
    several_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    others = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", *["SLURM_PROCID"] * several_tasks]
    for name in others:
        if environ.get(name, environ["RANK"]) != environ["RANK"]:
            raise UserError(
                f"RANK is {environ['RANK']}, but {name} is {environ[name]}: two launchers speak at once; unset RANK, "
                "WORLD_SIZE and LOCAL_RANK to take the place that the launcher gives"
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
