"""Pretraining BERT, and its evaluation: a near-twin of mnist_ddp/train.py, which you should read first.

Every worker of every node runs `train`. Nothing in it depends on the node or the GPU: `worker` holds the rank, and
common/uneven cuts the batches.
"""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from bert_ddp.model import pretrained, speed
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from bert_ddp.pretrain import model as bert
from bert_ddp.pretrain import rows
from bert_ddp.text import corpus
from bert_ddp.text.flags import corpus_options
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
from common.uneven.workers import worker_options


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with process_group(worker, cli.join_options(args)) as group:
        device, precision = group.device, Precision(args.precision, group.device, args.on_nan)
        options, timer = cli.run_options(args, "bert"), StepTimer(device)
        loading = worker_options(args.data_workers, device, preload=["datasets"])  # their start takes seconds

        # Data. The plan cuts each global batch by shares, 256 on `8,2` into 26 x 6 and 25 x 4. An epoch's last batch
        # holds what is left, and nothing is padded. One item of the loader is this rank's part of one optimizer step,
        # perhaps empty.
        with group.first_on_node("the token rows"):
            source = pretrained.locate(args.init_from, "--init-from") if args.init_from else None
            text = corpus.load(corpus_options(args), source, worker.rank)
        group.agree(**{"--corpus and --vocab, fingerprint": text.fingerprint})
        train_set, test_set = rows.of_corpus(text, args.mask_probability, args.whole_words, args.seed)
        global_batch = cli.global_batch(args, worker.world_size)
        plan = plan_batches(len(train_set), global_batch, worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        masked_tokens = sampler.sums_in_steps(train_set.counts)  # of each step, over all ranks
        train_loader = part_loader(train_set, sampler, args.seed, **loading)

        # Model. The seed gives every layout the same initial weights.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        wanted = bert.ModelOptions(
            args.objective, args.preset, args.config_file, args.dropout, args.checkpoint_activations
        )
        with group.first_on_node("the initial weights"):
            net = bert.build(wanted, text.meta, source).to(device, precision.dtype)
        group.agree(**{"--config-file or --init-from, fingerprint": bert.fingerprint(net, source is not None)})
        speed.tune(net, device, same_sizes=True)
        optimizer = torch.optim.AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        decay = warm_up_then_decay(cli.steps_of(args.warmup_steps, schedule_steps), schedule_steps, args.decay_power)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        outer = args.sync_every, args.sync_delay, args.outer_lr, args.outer_momentum, args.timeout
        nodes = NodeSteps(net, sampler, timer, group.ranks_of_nodes, *outer)  # does nothing without --sync-every
        parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}
        parts |= nodes.parts

        # Files. A checkpoint fits any layout, but only its own run: --resume with other data or flags is refused.
        identity = {"data": f"{args.objective} {text.fingerprint}"}
        recipe = cli.recipe(args) | {"global_batch": global_batch, "dropout": net.config.hidden_dropout_prob}
        folder = open_folder(group, options)
        step = resume(group, options, folder, net, identity, recipe, **parts)  # optimizer steps done

        def trial(rows: int) -> None:  # for --micro-batch auto
            some = move(train_set.get_batch([0] * rows), device, precision.dtype)
            with precision.autocast():
                loss = cross_entropy(net(**some.inputs)[0], some.labels.flatten())
            loss.backward()

        pace = group.each_at_its_own_pace("the largest micro-batch of each rank")
        most = global_batch if args.balance == "auto" else plan.shares[worker.rank]
        sizes = cli.micro_batches(args, worker.world_size) or fitting_micro_batches(net, trial, most, pace)
        micro_batch = sizes[worker.rank]  # the most samples in one forward; None for all at once
        in_turn = group.numbers("evaluation") if args.balance == "auto" else None
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, cli.eval_batch(args, sizes), in_turn)
        test_loader = part_loader(test_set, shard, **loading)
        empty = move(train_set.get_batch([]), device, precision.dtype)

        def empty_loss(model: torch.nn.Module) -> torch.Tensor:
            return bert.sum_of(model(**empty.inputs))

        model = ddp.wrap(net, plan, timer, empty_loss, args.compile, stand_in=True, compress=args.compress, nodes=nodes)
        untrained_loss = None if source else bert.untrained_loss(net)
        balancer = Balancer(plan, sampler, timer, model, on=args.balance == "auto")
        report = Report(group, plan, timer, options, untrained_loss, precision=precision)
        if args.eval_only:
            report.evaluation(step, **evaluate(net, test_loader, precision, device))
            return

        def write_extra(path: Path) -> None:  # with these, a checkpoint is a folder that from_pretrained reads
            net.config.save_pretrained(path)
            text.copy_tokenizer(path)

        def epoch_ends() -> bool:
            return step == total_steps or step % plan.steps_per_epoch == 0

        def evaluation_is_due() -> bool:
            return epoch_ends() or bool(args.eval_every and step % args.eval_every == 0)

        def finish(evaluates: bool) -> None:
            """What may be due after a step: write what the ranks have noted, evaluate, save."""
            saves = report.checkpoint_is_due(step, epoch_ends()) and nodes.are_same
            if saves or evaluates or report.is_due:
                for done in report.exchange():  # an all-gather of what the ranks have noted, every 1 to 5 s
                    precision.require_finite(done.step, done.loss, done.grad_norm)
            if evaluates and report.evaluated_step != step:
                with report.pause():
                    numbers = evaluate(net, test_loader, precision, device)
                report.evaluation(step, **numbers, unigram_entropy=text.meta["unigram_entropy"])
            if saves:
                report.save(step, net, identity | recipe, parts, args.keep, write_extra)
                report.end_if_interrupted(step)  # by a signal

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        facts = {"data": text.describe()}
        report.open_together(folder, step, total_steps, micro_batches=sizes, **facts)
        if report.goes_on:  # ranks were lost, or have come: what was due after the last step may not be done
            finish(evaluation_is_due())
        while step < total_steps:
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in timer.steps(train_loader, plan.steps_per_epoch - first_step):
                seed_noise(device, derive_seed(args.seed, "dropout", step, worker.rank))
                count = masked_tokens[step]
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)  # of this rank; the report adds up all
                mine = plan.part(step, worker.rank)  # the samples that the loader must have given
                part = move(part, device, precision.dtype)
                for micro, is_last in micro_batches(part, mine, micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model, timer):  # one exchange a step, in the last backward
                        with precision.autocast():
                            logits, next_logits = model(**micro.inputs)
                            micro_loss = cross_entropy(logits, micro.labels.flatten(), reduction="sum")
                            if next_logits is not None:  # a mean over rows, added to the mean over masked tokens
                                next_loss = cross_entropy(next_logits, micro.next_labels, reduction="sum")
                                micro_loss = micro_loss + next_loss * (count / plan.global_count(step))
                        precision.backward(micro_loss / count)  # the all-reduce sums over the ranks
                    loss_sum += micro_loss.detach()
                lr = scheduler.get_last_lr()[0]
                grad_norm = precision.step(model, args.clip_norm, optimizer)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                saves, ends = report.checkpoint_is_due(step, epoch_ends()), step == total_steps or report.is_interrupted
                evaluates = nodes.end_step(evaluation_is_due(), saves, now=ends)
                report.note(step, loss_sum, lr, grad_norm, count)
                balancer.end_step(len(mine))  # every few steps, the ranks exchange their speeds

                finish(evaluates)
                if step == total_steps:
                    break
        report.summary(step)


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: DataLoader, precision: Precision, device: torch.device) -> dict[str, float]:
    """Mean loss, perplexity and accuracy over the held-out rows' masked tokens, each counted once on any number of
    ranks; with sentence pairs also the accuracy of the next sentence.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the only
    collective is in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", "next_correct", "next_count", device=device)
    for batch in loader:
        batch = move(batch, device, precision.dtype)
        with precision.autocast():
            logits, next_logits = net(**batch.inputs)
            labels = batch.labels.flatten()
            loss_sum = cross_entropy(logits, labels, reduction="sum")
        sums.add(loss_sum, (logits.argmax(dim=1) == labels).sum(), (labels != rows.IGNORED).sum(), 0, 0)
        if next_logits is not None:
            sums.add(0, 0, 0, (next_logits.argmax(dim=1) == batch.next_labels).sum(), len(batch.labels))
    net.train()
    total = sums.reduce()
    count = total["count"]
    found = {"loss": total["loss"] / count, "accuracy": total["correct"] / count, "count": int(count)}
    found["perplexity"] = math.exp(min(found["loss"], 700.0))
    if total["next_count"]:
        found["next_accuracy"] = total["next_correct"] / total["next_count"]
    return found
