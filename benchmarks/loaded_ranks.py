"""What benchmarks/loading.py runs on each rank: two epochs, and how long each first batch takes to come."""

import functools
import importlib
import multiprocessing
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from bert_ddp.pretrain import model, rows
from bert_ddp.text import corpus
from bert_ddp.text.flags import corpus_options
from common.console import say
from common.join.process_group import process_group
from common.launch import cli
from common.launch.layout import Worker
from common.uneven.evaluation import EvaluationSampler
from common.uneven.loading import part_loader
from common.uneven.options.workers import worker_options
from common.uneven.plan import plan_batches
from common.uneven.sampling import UnevenDistributedSampler

STEPS = 20  # of an epoch


def options_of(way: str, workers: int, data: str) -> dict[str, Any]:
    """The DataLoader's options: those of worker_options, those before commit c764adb, or a start method alone."""
    if way == "now":
        return worker_options(workers, torch.device("cpu"), ["torchvision" if data == "images" else "datasets"])
    if way != "before":
        return {"num_workers": workers, "multiprocessing_context": way}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "datasets"])
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
    if data == "token rows":  # their module imported this one then, in each process
        options["worker_init_fn"] = functools.partial(importlib.import_module, "bert_ddp.text.corpus")
    return options


def token_rows(args: Namespace) -> tuple[Dataset, Dataset, Any]:
    text = corpus.load(corpus_options(args))
    parts = rows.of_corpus(text, probability=0.15, whole_words=False, seed=1)
    wanted = model.ModelOptions("mlm", "small", None, None, False)
    return *parts, lambda: model.build(wanted, text.meta)


def images(args: Namespace) -> tuple[Dataset, Dataset, Any]:
    """A data set of torchvision as anyone uses it, with its transform."""
    from torchvision import datasets, models, transforms

    train_set, test_set = (datasets.FakeData(count, (3, 32, 32), 10, transforms.ToTensor()) for count in (2560, 256))
    return train_set, test_set, lambda: models.resnet18(num_classes=10)


def measure(worker: Worker, args: Namespace) -> None:
    """Print, on rank 0, the seconds to the first batch of each epoch, of the rank that waits longest."""
    with process_group(worker, cli.join_options(args)) as group:
        options = options_of(args.way, args.data_workers, args.data)
        with group.first_on_node("the data"):
            train_set, test_set, build = (images if args.data == "images" else token_rows)(args)
        samples = min(len(train_set), 64 * STEPS)
        plan = plan_batches(samples, samples // STEPS, worker.world_size, None)
        sampler = UnevenDistributedSampler(plan, worker.rank, seed=1)
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, 16)
        train_loader = part_loader(train_set, sampler, seed=1, **options)
        test_loader = part_loader(test_set, shard, **options)
        build()  # as a trainer does, which takes a moment
        seconds = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for loader in (train_loader, test_loader):
                dist.barrier()
                began = time.perf_counter()
                batches = iter(loader)
                next(batches)
                seconds.append(time.perf_counter() - began)
                for _ in batches:
                    pass
        longest = torch.tensor(seconds)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if worker.is_main:
            say("seconds " + " ".join(f"{one:.3f}" for one in longest.tolist()))
