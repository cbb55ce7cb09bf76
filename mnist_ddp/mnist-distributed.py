#!/usr/bin/env python3
"""Train a small network on MNIST, on one process or on nodes with different numbers of GPUs.

    mnist-distributed.py                            # all GPUs of this machine, or its CPU
    mnist-distributed.py -n 2 -g 8,2 -i 0           # 2 nodes with 8 and 2 GPUs; this is node 0, the master
    mnist-distributed.py -n 2 -g 8,2 -i 1 --master-addr NODE0      # this is node 1; node 0 prints this line
    torchrun --nproc-per-node 4 mnist-distributed.py               # any launcher

The loss of every step and the accuracy, about 99.2 %, do not depend on which of these was typed. (A model with
dropout draws other noise on another layout; everything else stays the same.)
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from common import cli, launch
from common.layout import Worker


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=256)
    training = cli.add_training_flags(parser, epochs=3, lr=8e-3)
    training.add_argument("--label-smoothing", type=cli.probability, default=0.05, help="in training")
    training.add_argument("--target-accuracy", type=cli.percent, metavar="P", help="stop at this test accuracy, in %%")
    data_flags = parser.add_argument_group("data")
    names = ("mnist", "fashion-mnist", "kmnist", "digits")
    data_flags.add_argument("--dataset", choices=names, default="mnist", help="digits needs no download")
    data_flags.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="looks and downloads here"
    )
    cli.add_output_flags(parser)
    cli.may_differ(parser, "data_dir")  # between nodes
    return parser


if __name__ == "__main__":
    # A wrong flag is answered before torch is imported. This call does not return: it starts the workers, each of
    # which loads this file as a module, goes on below this line, and enters train().
    launch.main(flags(), cli.check_training)

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from common import checkpoint, ddp, report
from common.batching import micro_batches, plan_batches
from common.ddp import reduce_gradients_if
from common.metrics import Sums
from common.precision import Precision
from common.process_group import process_group
from common.sampling import EvaluationSampler, UnevenDistributedSampler
from common.seeding import derive_seed
from mnist_ddp import data
from mnist_ddp.model import ConvNet


def train(worker: Worker, args: Namespace) -> None:
    """One process's whole life: join, load, train, evaluate, save, leave. Every rank runs it."""
    with process_group(worker, args) as group:
        device, precision = group.device, Precision(args.precision, group.device)

        # Data. The plan cuts each global batch by shares, 256 on `8,2` into 26 x 6 and 25 x 4; an epoch's last batch
        # holds what is left, and nothing is padded. One item of the loader is this rank's part of one optimizer
        # step, perhaps empty: the data set makes a whole batch at once, so there is nothing to collate.
        with group.first_on_node(f"the data set {args.dataset}"):
            train_set, test_set, fingerprint = data.load(args.dataset, args.data_dir, precision.dtype)
        group.agree(**{f"--dataset {args.dataset}, fingerprint": fingerprint})
        plan = plan_batches(len(train_set), cli.global_batch(args, worker), worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=data.as_is)
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, args.eval_batch)
        test_loader = DataLoader(test_set, batch_sampler=shard, collate_fn=data.as_is)

        # Model. The seed gives every layout the same first weights.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        net = ConvNet(train_set.side).to(device, precision.dtype)
        optimizer = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay, eps=1e-5, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=schedule_steps)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}

        # Files. A checkpoint fits any layout, but only the run that it is of: --resume with another value is refused.
        identity = {"data": f"{args.dataset} {fingerprint}"}
        recipe = {"global_batch": plan.global_batch, **cli.values(args, "seed", "epochs", "lr", "weight_decay")}
        recipe |= cli.values(args, "clip_norm", "label_smoothing")
        folder = report.open_folder(group, args, "mnist")
        step = checkpoint.resume(group, args, folder, net, identity, recipe, **parts)  # optimizer steps done
        model = ddp.wrap(net, device, args.compile)
        # A backward of no rows, so that the first step adds up gradients in the order that all later ones do.
        ddp.settle_buckets(model, model(train_set.__getitems__([]).to(device).images).sum())
        progress = report.Report(group, args, plan, model.timer)

        if args.eval_only:
            progress.evaluation(step, **evaluate(net, test_loader, precision, device))
            return

        def save() -> None:
            with progress.pause(), group.others_wait(f"rank 0, which saves step {step}"):
                if worker.is_main:
                    state = {**identity, **recipe, "layout": worker.layout.source, "shares": plan.shares}
                    checkpoint.save(folder / "checkpoints", step, net, state, args.keep, **parts)

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        progress.open(folder, step, total_steps, data=f"{args.dataset}: {len(train_set):,} + {len(test_set):,} images")
        while step < total_steps and not progress.reached(args.target_accuracy):
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in model.timer.steps(train_loader):
                torch.manual_seed(derive_seed(args.seed, "dropout", step, worker.rank))
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)  # this rank's; `progress` adds up all
                for micro, is_last in micro_batches(part.to(device), args.micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model):  # one all-reduce a step, in the last backward
                        with precision.autocast():
                            logits = model(micro.images)
                            micro_loss = cross_entropy(
                                logits, micro.labels, reduction="sum", label_smoothing=args.label_smoothing
                            )
                        # DDP averages over the ranks; a mean over the global batch needs sum / global_count.
                        precision.backward(micro_loss * worker.world_size / plan.global_count(step))
                    loss_sum += micro_loss.detach()
                lr = scheduler.get_last_lr()[0]
                grad_norm = precision.step(model, optimizer, args.clip_norm)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                progress.step(step, loss_sum, lr, grad_norm)
                if step == total_steps:
                    break
                if args.save_every and step % args.save_every == 0 and step % plan.steps_per_epoch:
                    save()
            with progress.pause():
                numbers = evaluate(net, test_loader, precision, device)
            progress.evaluation(step, **numbers)
            save()
        progress.summary(step)


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: DataLoader, precision: Precision, device: torch.device) -> dict[str, float]:
    """Mean loss and accuracy over the test set, each image counted once on any number of ranks.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the ranks
    meet only once, in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", device=device)
    for batch in loader:
        batch = batch.to(device)
        with precision.autocast():
            logits = net(batch.images)
            loss_sum = cross_entropy(logits, batch.labels, reduction="sum")
        sums.add(loss_sum, (logits.argmax(dim=1) == batch.labels).sum(), len(batch))
    net.train()
    total = sums.reduce()
    count = total["count"]
    return {"loss": total["loss"] / count, "accuracy": total["correct"] / count, "count": int(count)}
