"""Training and evaluation on MNIST: read this first, top to bottom.

Every worker of every node runs `train`. Nothing in it depends on the node or the GPU: `worker` holds the rank, and
common/uneven cuts the batches.
"""

import math
from argparse import Namespace
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from common.join.process_group import process_group
from common.launch import cli
from common.launch.layout import Worker
from common.record.folder import open_folder
from common.record.report import Report
from common.record.resume import resume
from common.uneven import ddp
from common.uneven.balance import Balancer
from common.uneven.batches import micro_batches, move
from common.uneven.batching import plan_batches
from common.uneven.ddp import reduce_gradients_if
from common.uneven.loading import part_loader
from common.uneven.memory import fitting_micro_batches
from common.uneven.node_steps import NodeSteps
from common.uneven.precision import Precision
from common.uneven.sampling import EvaluationSampler, UnevenDistributedSampler
from common.uneven.seeding import derive_seed, seed_noise
from common.uneven.sums import Sums
from common.uneven.timer import StepTimer
from mnist_ddp import data
from mnist_ddp.model import ConvNet


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with process_group(worker, cli.join_options(args)) as group:
        device, precision = group.device, Precision(args.precision, group.device, args.on_nan)
        options, timer = cli.run_options(args, "mnist"), StepTimer(device)

        # Data. The plan cuts each global batch by shares, 256 on `8,2` into 26 x 6 and 25 x 4. An epoch's last batch
        # holds what is left, and nothing is padded. One item of the loader is this rank's part of one optimizer step,
        # perhaps empty.
        with group.first_on_node(f"the data set {args.dataset}"):
            train_set, test_set, fingerprint = data.load(args.dataset, args.data_dir, precision.dtype, device)
        group.agree(**{f"--dataset {args.dataset}, fingerprint": fingerprint})
        global_batch = cli.global_batch(args, worker.world_size)
        plan = plan_batches(len(train_set), global_batch, worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        train_loader = part_loader(train_set, sampler, args.seed)

        # Model. The seed gives every layout the same initial weights.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        net = ConvNet(train_set.side).to(device, precision.dtype)
        # With the usual eps of 1e-8, rounding noise in gradients near zero moves weights by 5e-5 within 20 steps.
        optimizer = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay, eps=1e-5, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=schedule_steps)
        outer = args.sync_every, args.sync_delay, args.outer_lr, args.outer_momentum, args.timeout
        nodes = NodeSteps(net, sampler, timer, group.ranks_of_nodes, *outer)  # does nothing without --sync-every
        parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}
        parts |= nodes.parts

        # Files. A checkpoint fits any layout, but only its own run: --resume with other data or flags is refused.
        identity = {"data": f"{args.dataset} {fingerprint}"}
        recipe = cli.recipe(args) | {"global_batch": global_batch}
        folder = open_folder(group, options)
        step = resume(group, options, folder, net, identity, recipe, **parts)  # optimizer steps done

        def trial(rows: int) -> None:  # for --micro-batch auto
            some = move(train_set.get_batch([0] * rows), device, precision.dtype)
            with precision.autocast():
                loss = cross_entropy(net(some.images), some.labels)
            loss.backward()

        pace = group.each_at_its_own_pace("the largest micro-batch of each rank")
        most = global_batch if args.balance == "auto" else plan.shares[worker.rank]
        sizes = cli.micro_batches(args, worker.world_size) or fitting_micro_batches(net, trial, most, pace)
        micro_batch = sizes[worker.rank]  # the most samples in one forward; None for all at once
        in_turn = group.numbers("evaluation") if args.balance == "auto" else None
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, cli.eval_batch(args, sizes), in_turn)
        test_loader = part_loader(test_set, shard)
        empty = move(train_set.get_batch([]), device, precision.dtype)

        def empty_loss(model: torch.nn.Module) -> torch.Tensor:
            return model(empty.images).sum()

        model = ddp.wrap(net, plan, timer, empty_loss, args.compile, compress=args.compress, nodes=nodes)
        untrained_loss = math.log(10)  # a guess among ten classes
        balancer = Balancer(plan, sampler, timer, model, on=args.balance == "auto")
        report = Report(group, plan, timer, options, untrained_loss, precision=precision)
        if args.eval_only:
            report.evaluation(step, **evaluate(net, test_loader, precision, device))
            return

        def is_good_enough() -> bool:
            return args.target_accuracy is not None and report.last_eval.get("accuracy", 0.0) >= args.target_accuracy

        def epoch_ends() -> bool:
            return step == total_steps or step % plan.steps_per_epoch == 0

        def finish(evaluates: bool) -> None:
            """What may be due after a step: write what the ranks have noted, evaluate, save."""
            saves = report.checkpoint_is_due(step, epoch_ends()) and nodes.are_same
            if saves or report.is_due:
                for done in report.exchange():  # an all-gather of what the ranks have noted, every 1 to 5 s
                    precision.require_finite(done.step, done.loss, done.grad_norm)
            if evaluates and report.evaluated_step != step:
                with report.pause():
                    numbers = evaluate(net, test_loader, precision, device)
                report.evaluation(step, **numbers)
            if saves:
                report.save(step, net, identity | recipe, parts, args.keep)
                report.end_if_interrupted(step)  # by a signal

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        facts = {"data": f"{args.dataset}: {len(train_set):,} + {len(test_set):,} images"}
        report.open_together(folder, step, total_steps, micro_batches=sizes, **facts)
        if report.goes_on:  # ranks were lost, or have come: what was due after the last step may not be done
            finish(epoch_ends())
        while step < total_steps and not is_good_enough():
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in timer.steps(train_loader, plan.steps_per_epoch - first_step):
                seed_noise(device, derive_seed(args.seed, "dropout", step, worker.rank))
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)  # of this rank; the report adds up all
                mine = plan.part(step, worker.rank)  # the samples that the loader must have given
                part = move(part, device, precision.dtype)
                for micro, is_last in micro_batches(part, mine, micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model, timer):  # one exchange a step, in the last backward
                        with precision.autocast():
                            logits = model(micro.images)
                            micro_loss = cross_entropy(
                                logits, micro.labels, reduction="sum", label_smoothing=args.label_smoothing
                            )
                        precision.backward(micro_loss / plan.global_count(step))  # the all-reduce sums over the ranks
                    loss_sum += micro_loss.detach()
                lr = scheduler.get_last_lr()[0]
                grad_norm = precision.step(model, args.clip_norm, optimizer)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                saves, ends = report.checkpoint_is_due(step, epoch_ends()), step == total_steps or report.is_interrupted
                evaluates = nodes.end_step(epoch_ends(), saves, now=ends)
                report.note(step, loss_sum, lr, grad_norm)
                balancer.end_step(len(mine))  # every few steps, the ranks exchange their speeds

                finish(evaluates)
                if step == total_steps or (evaluates and is_good_enough()):
                    break
        if is_good_enough():
            report.line(f"reached {args.target_accuracy:.2%} after {report.clock.seconds:.1f} s of training")
        report.summary(step)


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: DataLoader, precision: Precision, device: torch.device) -> dict[str, float]:
    """Mean loss and accuracy over the test set, each image counted once on any number of ranks.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the only
    collective is in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", device=device)
    for batch in loader:
        batch = move(batch, device, precision.dtype)
        with precision.autocast():
            logits = net(batch.images)
            loss_sum = cross_entropy(logits, batch.labels, reduction="sum")
        sums.add(loss_sum, (logits.argmax(dim=1) == batch.labels).sum(), len(batch.labels))
    net.train()
    total = sums.reduce()
    count = total["count"]
    return {"loss": total["loss"] / count, "accuracy": total["correct"] / count, "count": int(count)}
