"""Imported once by the fork server of `harness.play`: everything that a worker would spend seconds on."""

import contextlib

import matplotlib.figure  # noqa: F401
import seqeval.metrics  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401
import torchvision  # noqa: F401

from tests import harness

for trainer in sorted(harness.ROOT.glob("*_ddp/*-*.py")):
    with contextlib.suppress(FileNotFoundError):
        harness.load_trainer(trainer)
