"""The facts of one node, as plain JSON: versions, GPUs, driver, interfaces, disk, settings. diagnosis.py judges them.

A fact that cannot be found is None: a broken driver must not keep the doctor from reporting the rest.
"""

import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from common.join import network
from common.version import versions

ASK_SECONDS = 5.0  # nvidia-smi hangs where a GPU has fallen off the bus
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "MASTER_", "OMP_NUM_THREADS", "UCX_", "FI_")


def collect() -> dict:
    """The facts of this machine. Sizes are in GB (10^9 bytes), rates in Mbit/s."""
    memory = psutil.virtual_memory()
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "driver": _first_line(_ask_nvidia_smi("--query-gpu=driver_version")) or _driver_version(),
        "backends": [name for name in BACKENDS if dist.is_backend_available(name)],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _gb(memory.total),
        "free_memory_gb": _gb(memory.available),
        "gpus": gpus(),
        "gpu_processes": gpu_processes(),
        "interfaces": interfaces(),
        "disk": {"path": str(Path.cwd()), "free_gb": _gb(shutil.disk_usage(Path.cwd()).free)},
        "shm": _shared_memory(),
        "open_files": _open_files(),
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
    }


def gpus() -> list[dict]:
    """The GPUs that CUDA sees here: index, name, memory in GB and compute capability."""
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "index": index,
                    "name": properties.name,
                    "memory_gb": _gb(properties.total_memory),
                    "capability": f"{properties.major}.{properties.minor}",
                }
            )
    except (RuntimeError, AssertionError) as error:  # an AssertionError: torch was built without CUDA
        found.append({"index": len(found), "name": f"unusable: {str(error).splitlines()[0]}", "memory_gb": None})
    return found


def gpu_processes() -> list[dict]:
    """The processes on the GPUs of this machine: pid, name and memory in MB."""
    lines = _ask_nvidia_smi("--query-compute-apps=pid,used_memory,process_name") or ""
    return parse_processes(lines)


def parse_processes(lines: str) -> list[dict]:
    """The rows of `nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv,noheader,nounits`."""
    found = []
    for line in lines.splitlines():
        pid, _, rest = line.partition(",")
        used, _, name = rest.partition(",")
        if pid.strip().isdigit():
            used = used.strip()
            found.append({"pid": int(pid), "memory_mb": int(used) if used.isdigit() else None, "name": name.strip()})
    return found


def interfaces() -> list[dict]:
    """The network interfaces that are up, with their addresses; speed in Mbit/s where the driver reports it."""
    states = psutil.net_if_stats()
    return [
        {
            "name": name,
            "addresses": addresses,
            "mbit_per_second": states[name].speed or None,
            "mtu": states[name].mtu,
        }
        for name, addresses in network.local_addresses().items()
        if name in states
    ]


def _ask_nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(text: str | None) -> str | None:
    return text.strip().splitlines()[0].strip() if text and text.strip() else None


def _driver_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _nccl_version() -> str | None:
    """Of the NCCL that torch brings, also on a machine without a GPU."""
    if not dist.is_nccl_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError, OSError):
        return None


def _shared_memory() -> dict | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None  # no such folder outside Linux
    return {"free_gb": _gb(usage.free), "total_gb": _gb(usage.total)}


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _gb(size: int) -> float:
    return round(size / 1e9, 2)
