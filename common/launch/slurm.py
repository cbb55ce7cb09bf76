"""srun with several tasks: this process is one of them.

Only a task of a step has SLURM_STEP_ID. A plain `python` in a batch script also has SLURM_PROCID and SLURM_NTASKS, but
is the only process. Sizes are read from the step's variables, because the job's may describe another part of a
heterogeneous job.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from common.errors import UserError
from common.launch.addresses import job_port, meeting
from common.launch.launched import launched_layout
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import number, refuse_half_set

MOST_HOSTS = 100_000  # of a list, which a variable may give in a few characters


def from_slurm(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """The layout of a task of a step; None outside of a step, and for a step of one task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    refuse_half_set(environ, ("SLURM_PROCID", size, "SLURM_LOCALID"), "srun")
    if environ[size] == "1":
        return None  # one task, such as an interactive shell: the flags typed there decide
    port = job_port(number(environ, "SLURM_JOB_ID", default=0), number(environ, "SLURM_STEP_ID", default=0))
    named = flags.master_addr or flags.distributed_init_method or environ.get("MASTER_ADDR")
    return launched_layout(
        flags,
        environ,
        "srun",
        one_terminal=True,
        names=("SLURM_PROCID", size, "SLURM_LOCALID", ""),
        local_world_size=_tasks_here(environ),
        node_rank=number(environ, "SLURM_NODEID", default=0),
        nodes=number(environ, "SLURM_STEP_NUM_NODES", default=0),
        init_method=meeting(flags, environ, host="" if named else _host_of_rank_0(environ), port=port),
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """How many tasks of this step run on this node: SLURM_GTIDS has their ranks, such as 0,2,3."""
    if "SLURM_GTIDS" in environ:
        return len(environ["SLURM_GTIDS"].split(","))
    sizes = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    node = number(environ, "SLURM_NODEID", default=0)
    if not node < len(sizes):
        raise UserError("SLURM_GTIDS and SLURM_STEP_TASKS_PER_NODE are not set: start the tasks with srun")
    return sizes[node]


def _host_of_rank_0(environ: Mapping[str, str]) -> str:
    """The host that has rank 0: usually the step's first, but not with a host file or heterogeneous parts."""
    here = environ.get("SLURMD_NODENAME", "")
    ranks_here = environ.get("SLURM_GTIDS", "").split(",")
    if "0" in ranks_here and here:
        return here
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        hosts = _first_of_host_file(environ.get("SLURM_HOSTFILE", ""))
    for part in range(number(environ, "SLURM_HET_SIZE", default=0)):
        listed = environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{part}") or environ.get(
            f"SLURM_JOB_NODELIST_PACK_GROUP_{part}", ""
        )
        if in_step := [host for host in expand_hosts(listed) if host in hosts]:
            hosts = in_step
            break
    if not hosts or (hosts[0] == here and ranks_here != [""]):
        raise UserError(
            f"Slurm's variables on {here or 'this node'} do not say where rank 0 is "
            f"(SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION', '')}): give --master-addr HOST, the host of rank 0"
        )
    return hosts[0]


def _first_of_host_file(path: str) -> list[str]:
    """The first host of a file as Slurm reads it: lists of hosts, such as n[1-4] or n1*4; comments begin with #."""
    try:
        lines = [line.partition("#")[0] for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    return [host for word in " ".join(lines).split()[:1] for host in expand_hosts(word.partition("*")[0])[:1]]


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
            if not (bounds := re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)):
                raise UserError(f"Slurm's list of hosts {text!r} has the part [{part}]: give --master-addr HOST")
            first, last = bounds.groups()
            numbers = range(int(first), int(last or first) + 1)[:MOST_HOSTS]
            names = [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
            hosts += [host for name in names for host in expand_hosts(name)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of a number for each node: '2(x3),1' -> 2, 2, 2, 1."""
    parts = re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", text)
    return [int(number) for number, times in parts for _ in range(min(int(times or 1), MOST_HOSTS))]
