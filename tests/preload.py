"""Imported once by the fork server of `harness.play`: everything that a worker would spend seconds on."""

import setproctitle

setproctitle.getproctitle()  # finds where the title is, which is possible only before the environment changes

import gc

gc.disable()  # it would look at what is imported again and again, and find nothing

import contextlib
import ctypes
import encodings.idna  # noqa: F401 (the first connection of a process looks for it)
import functools
import importlib
import importlib.metadata
import io
import os
import sys
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as common/launch/worker.py does before it imports torch

import matplotlib.figure  # noqa: F401
import seqeval.metrics  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torchvision  # noqa: F401

TRAINERS = ("mnist_ddp.train", "bert_ddp.pretrain.train", "bert_ddp.finetune.train", "bert_ddp.predict.run")
for trainer in TRAINERS:
    with contextlib.suppress(ImportError):
        importlib.import_module(trainer)
importlib.import_module("common.doctor.examination")
importlib.import_module("matplotlib.backends.backend_agg")

from common.record.plots import draw_curves

# the data set of most runs, which takes a tenth of their time, the fonts that a plot needs, and two things that torch
# does in each process: it looks for plugins in every package, and reads its sources for the first seed
torch.set_num_threads(1)  # no pool of threads: it would be missing in a child
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")
torch.manual_seed(torch.initial_seed())
importlib.import_module("mnist_ddp.data").load("digits", Path(), torch.float32)
draw_curves([{"kind": "train", "step": 1, "loss": 1.0}]).savefig(io.BytesIO(), format="png")


def _use_huge_pages() -> None:
    """Let the kernel join this process's memory into pages of 2 MB (Linux 6.1): each fork copies a table of all pages,
    which takes longer than what most tests do in the child."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = 1 << 21
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":  # memory, and no file
            first, end = (int(address, 16) for address in addresses.split("-"))
            for address in range(-(-first // size) * size, end - size + 1, size):
                advise(address, size, 25)  # MADV_COLLAPSE


# What is here stays: a collection in a child would look at all of it, and copy its pages.
gc.collect()
gc.freeze()
gc.enable()
if sys.platform == "linux":
    _use_huge_pages()
