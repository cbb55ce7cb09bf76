"""Which device a worker computes on, over which backend it talks, and how it uses a CPU well."""

import ctypes
import os
import socket
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from common import network
from common.errors import UserError
from common.layout import Worker

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def choose_device(worker: Worker) -> torch.device:
    """This worker's CPU or GPU, made the current one. Raises UserError where CUDA does not see that GPU."""
    if worker.device_type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, _usable_cores() // worker.local_world_size))
        _keep_freed_memory()
        return torch.device("cpu")
    present = torch.cuda.device_count()
    if worker.device_index >= present:
        raise UserError(
            f"rank {worker.rank} needs GPU {worker.device_index}, but CUDA sees {present} here although the "
            f"driver lists {worker.layout.devices}: has one fallen off the bus? See `nvidia-smi`, or lower -g"
        )
    device = torch.device("cuda", worker.device_index)
    torch.cuda.set_device(device)
    return device


def choose_backend(worker: Worker, args: Namespace) -> str:
    """nccl where each rank has a GPU of its own, gloo elsewhere. Raises UserError for a --backend that cannot work."""
    on_gpus = worker.device_type == "cuda"
    shared = on_gpus and worker.local_world_size > worker.layout.devices
    if args.backend == "auto":
        return "nccl" if on_gpus and not shared and dist.is_nccl_available() else "gloo"
    mend = "use --backend gloo, or leave it out"
    if not dist.is_backend_available(args.backend):
        raise UserError(f"--backend is {args.backend}, but torch {torch.__version__} was built without it: {mend}")
    if args.backend == "nccl" and (not on_gpus or shared):
        why = "ranks share a GPU" if shared else "this node's workers run on the CPU"
        raise UserError(f"--backend is nccl, which needs a GPU for each rank, but {why}: {mend}")
    return args.backend


def check_interface(args: Namespace) -> None:
    if args.interface and args.interface not in network.local_addresses():
        names = ", ".join(network.local_addresses())
        raise UserError(f"--interface is {args.interface}, but {socket.gethostname()} has {names}: name one of these")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_freed_memory() -> None:
    """Let glibc keep the large blocks that torch frees, for the next tensors of that size.

    By default each goes back to the kernel, and the next step fetches it anew, page by page: a tenth to a fifth of a
    step's time (docs/benchmarks.md). On GPUs torch has a cache of its own for this.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):  # the user has chosen
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc has it, musl has not
        libc.mallopt(M_MMAP_MAX, 0)  # no block outside of the heap ...
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # ... which does not shrink
