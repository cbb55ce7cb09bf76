"""The facts of one node, as plain JSON: versions, GPUs, driver, interfaces, disk, settings. diagnosis.py judges them.

A fact that cannot be found is None: a broken driver must not keep the doctor from reporting the rest.
"""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from common.join import network
from common.version import versions

ASK_SECONDS = 5.0  # nvidia-smi hangs where a GPU has fallen off the bus
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "MASTER_", "OMP_NUM_THREADS", "UCX_", "FI_")
Fact = TypeVar("Fact")


def collect() -> dict:
    """The facts of this machine. Sizes are in GB (10^9 bytes), rates in Mbit/s."""
    memory, driver = psutil.virtual_memory(), _ask_nvidia_smi("--query-gpu=driver_version").strip()
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "cuda": torch.version.cuda,
        "nccl": _or_none(_nccl_version),
        "driver": driver.split("\n")[0].strip() or _or_none(_driver_version),
        "backends": [name for name in BACKENDS if dist.is_backend_available(name)],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _gb(memory.total),
        "free_memory_gb": _gb(memory.available),
        "gpus": gpus(),
        "gpu_processes": parse_processes(_ask_nvidia_smi("--query-compute-apps=pid,used_memory,process_name")),
        "interfaces": interfaces(),
        "disk": {"path": str(Path.cwd()), "free_gb": _gb(shutil.disk_usage(Path.cwd()).free)},
        "shm": _or_none(_shared_memory),
        "open_files": _or_none(_open_files),
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
    }


def gpus() -> list[dict]:
    """The GPUs that CUDA sees here: index, name, memory in GB and compute capability."""
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory, capability = _gb(properties.total_memory), f"{properties.major}.{properties.minor}"
            found.append({"index": index, "name": properties.name, "memory_gb": memory, "capability": capability})
    except (RuntimeError, AssertionError) as error:  # an AssertionError: torch was built without CUDA
        found.append({"index": len(found), "name": f"unusable: {str(error).splitlines()[0]}", "memory_gb": None})
    return found


def parse_processes(lines: str) -> list[dict]:
    """pid, name and memory in MB of each process on the GPUs, from the rows of
    `nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv,noheader,nounits`."""
    found = []
    for line in lines.splitlines():
        pid, used, name = (part.strip() for part in [*line.split(",", 2), "", ""][:3])
        if pid.isdigit():
            found.append({"pid": int(pid), "memory_mb": int(used) if used.isdigit() else None, "name": name})
    return found


def interfaces() -> list[dict]:
    """The network interfaces that are up, with their addresses; speed in Mbit/s where the driver reports it."""
    states = psutil.net_if_stats()
    return [
        {"name": name, "addresses": own, "mbit_per_second": states[name].speed or None, "mtu": states[name].mtu}
        for name, own in network.local_addresses().items()
        if name in states
    ]


def _ask_nvidia_smi(query: str) -> str:
    """What it prints; an empty string where it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _or_none(fact: Callable[[], Fact]) -> Fact | None:
    try:
        return fact()
    except (OSError, RuntimeError, AttributeError, ImportError):
        return None


def _driver_version() -> str | None:
    words = Path("/proc/driver/nvidia/version").read_text().split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _nccl_version() -> str | None:
    """Of the NCCL that torch brings, also on a machine without a GPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def _shared_memory() -> dict:
    usage = shutil.disk_usage("/dev/shm")  # no such folder outside Linux
    return {"free_gb": _gb(usage.free), "total_gb": _gb(usage.total)}


def _open_files() -> int | None:
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _gb(size: int) -> float:
    return round(size / 1e9, 2)
