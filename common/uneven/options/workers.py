"""Processes that make batches beside the training, for anyone's DataLoader: quick to start, kept over the epochs, and
ended with their rank.

    options = worker_options(workers=2, device=device, preload=["torchvision"])
    train_loader = part_loader(train_set, sampler, seed, **options)
    test_loader = part_loader(test_set, shard, **options)

A data set in such a process is a copy, made when the process starts. It learns the epoch from the sampler, which sends
it with the indices of every batch (`common.uneven.sampling.Indices`).
"""

import ctypes
import io
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from common.sockets import keep_paths_short

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FORKS = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
SHARED_TENSORS = 100  # at most, by file descriptors, between a rank and a loader's process
END_SECONDS = 5.0  # within which a process has ended that the system has been told to end


def worker_options(workers: int, device: torch.device, preload: Sequence[str] = ()) -> dict[str, Any]:
    """Options for DataLoaders that make batches in `workers` processes; with 0 the rank makes them itself.

    A rank has threads (of gloo, autograd, tokenizers), and a process with threads must not fork. So this starts a fork
    server, a process that imports torch and the modules `preload` once and then forks the loaders' processes. It does
    so in the background: call this early. A module that it cannot import, each of the loaders' processes imports;
    until Python 3.13 it finds only modules that are installed or in the current folder. Where there is no fork, each
    process starts afresh. Either way data set and collate function are pickled, and a script needs the `__main__`
    guard.

    All loaders of a rank share the fork server; `preload` of the first call counts. A loader's processes live as long
    as the loader. For a `worker_init_fn` of your own, replace the one given here and call `end_with_rank` in it.
    """
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": device.type == "cuda"}
    if not workers:
        return options
    context = _ForkServerContext() if FORKS else multiprocessing.get_context("spawn")
    if FORKS:
        from multiprocessing import forkserver

        context.set_forkserver_preload(["torch", *preload])
        keep_paths_short()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # a closed terminal's is the rank's
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    options |= {"multiprocessing_context": context, "persistent_workers": True, "worker_init_fn": end_with_rank}
    return options


if FORKS:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    class _Process(ForkServerProcess):
        """A loader's process that does not print a traceback when its fork server is killed.

        The rank learns of that a moment before the system ends this process (see `end_with_rank`). In between, the
        DataLoader takes this process for dead and tells it to stop, which torch's loop asserts not to happen.
        """

        def run(self) -> None:
            try:
                super().run()
            except AssertionError:  # those of a data set, torch's loop sends to the rank
                time.sleep(END_SECONDS)
                raise

    class _ForkServerContext(ForkServerContext):
        Process = _Process


def end_with_rank(worker_id: int) -> None:
    """A DataLoader's `worker_init_fn`: leave Ctrl-C to the rank, and end when the rank has ended, by whatever means.

    torch's own watch asks for the parent process, and that is the fork server, which lives as long as its processes.
    Should that one be killed, the rank takes its processes for dead and says so; on Linux they end with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if FORKS and isinstance(multiprocessing.current_process(), ForkServerProcess):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_wait_for_rank, name="wait for the rank's end", daemon=True).start()


def _wait_for_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None, "only a DataLoader's worker process calls this"
    rank.join()
    signal.raise_signal(getattr(signal, "SIGKILL", signal.SIGTERM))  # the main thread may be anywhere in a data set


def pack_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a data set, for a loader's process. Tensors are shared by file descriptors, of which a process can
    be sent about 250: a state with more of them is copied."""
    return {"copied": pickle.dumps(state)} if _count_tensors(state) > SHARED_TENSORS else state


def unpack_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state that `pack_tensors` was given."""
    return pickle.loads(state["copied"]) if "copied" in state else state


class _CountTensors(pickle.Pickler):
    """Counts tensors on the way, and leaves their data out."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors = 0

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors += 1
        return "a tensor"


def _count_tensors(value: Any) -> int:
    counting = _CountTensors()
    counting.dump(value)
    return counting.tensors
