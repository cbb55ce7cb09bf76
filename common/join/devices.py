"""The device and the backend of a worker, and settings for CPUs."""

import ctypes
import os
import sys

import torch
import torch.distributed as dist

from common.console import say
from common.errors import UserError
from common.launch.layout import Worker

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def choose_device(worker: Worker) -> torch.device:
    """Return this worker's CPU or GPU, as the current device. Raises UserError if CUDA does not see that GPU."""
    if worker.device_type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, _usable_cores() // worker.local_world_size))
        _keep_freed_memory()
        _keep_no_record_of_collectives()
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


def choose_backend(worker: Worker, wanted: str = "auto") -> str:
    """nccl where each rank has a GPU of its own, gloo elsewhere. Raises UserError for a --backend that cannot work."""
    on_gpus = worker.device_type == "cuda"
    shared = on_gpus and worker.local_world_size > worker.layout.devices
    if wanted == "auto":
        return "nccl" if on_gpus and not shared and dist.is_nccl_available() else "gloo"
    fix = "use --backend gloo, or leave it out"
    if not dist.is_backend_available(wanted):
        raise UserError(f"--backend is {wanted}, but torch {torch.__version__} was built without it: {fix}")
    if wanted == "nccl" and (not on_gpus or shared):
        why = "ranks share a GPU" if shared else "this node's workers run on the CPU"
        raise UserError(f"--backend is nccl, which needs a GPU for each rank, but {why}: {fix}")
    return wanted


def spare_ddp(worker: Worker, backend: str) -> None:
    """Take TORCH_DISTRIBUTED_DEBUG=DETAIL as INFO over gloo, and say so. With DETAIL, torch wraps the process group in
    another class, and its DDP reads gloo's class there: the process ends by SIGSEGV."""
    if backend == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
        if worker.local_rank == 0:
            why = f"torch {torch.__version__} ends DDP over gloo by SIGSEGV with it"
            say(f"TORCH_DISTRIBUTED_DEBUG is DETAIL, taken as INFO: {why}", worker.rank)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_freed_memory() -> None:
    """Let glibc keep the large blocks that torch frees, for the next tensors of that size.

    By default glibc returns them to the kernel, and the next step gets them again page by page, which takes a tenth to
    a fifth of its time (docs/benchmarks.md). On GPUs torch keeps its own cache.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):  # the user has chosen
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc has it, musl has not
        libc.mallopt(M_MMAP_MAX, 0)  # no block outside of the heap,
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # and a heap that does not shrink


def _keep_no_record_of_collectives() -> None:
    """Let torch's flight recorder keep nothing, unless the user has set its size.

    It notes each of the last 2,000 collectives, 3 MB. NCCL's watchdog writes them to a file where a collective hangs;
    over gloo nothing reads them.
    """
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(os.environ):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
