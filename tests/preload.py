"""Imported once by the fork server of `harness.play`: everything that a worker would spend seconds on."""

import setproctitle

setproctitle.getproctitle()  # finds where the title is, which is possible only before the environment changes

import contextlib
import gc
import importlib
import io
import os

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as common/launch/worker.py does before it imports torch

import matplotlib.figure  # noqa: F401
import seqeval.metrics  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401
import torchvision  # noqa: F401

TRAINERS = ("mnist_ddp.train", "bert_ddp.pretrain.train", "bert_ddp.finetune.train", "bert_ddp.predict.run")
for trainer in TRAINERS:
    with contextlib.suppress(ImportError):
        importlib.import_module(trainer)
importlib.import_module("common.doctor.examination")
importlib.import_module("matplotlib.backends.backend_agg")

from common.record.plots import draw_curves

# the fonts that a plot needs
draw_curves([{"kind": "train", "step": 1, "loss": 1.0}]).savefig(io.BytesIO(), format="png")
# What is here stays: a collection in a child would look at all of it, and copy its pages.
gc.collect()
gc.freeze()
