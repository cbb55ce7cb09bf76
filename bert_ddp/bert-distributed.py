#!/usr/bin/env python3
"""Pretrain BERT on text, on one process or on nodes with different numbers of GPUs.

    bert-distributed.py                             # all GPUs of this machine, or its CPU; text that Python brings
    bert-distributed.py -n 2 -g 8,2 -i 0 --corpus books         # 2 nodes with 8 and 2 GPUs; this is node 0, the master
    bert-distributed.py -n 2 -g 8,2 -i 1 --corpus books --master-addr NODE0      # this is node 1; node 0 prints this
    torchrun --nproc-per-node 4 bert-distributed.py                              # any launcher

The loss of every step and the held-out loss do not depend on which of these was typed. (A model with dropout draws
other noise on another layout; everything else stays the same.)
"""

import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from bert_ddp.text import corpus
from common.launch import cli, start
from common.launch.layout import Worker


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=256)
    training = cli.add_training_flags(parser, epochs=40, lr=1e-4)
    training.add_argument("--warmup-steps", type=cli.natural_int, default=0, metavar="S", help="steps of rising --lr")
    training.add_argument("--decay-power", type=cli.positive_float, default=1.0, metavar="X", help="1: linear to 0")
    training.add_argument("--mask-probability", type=cli.probability, default=0.15, metavar="P", help="of each token")
    training.add_argument("--whole-words", action="store_true", help="mask all tokens of a word together")
    training.add_argument(
        "--eval-every", type=cli.positive_int, metavar="S", help="steps between evaluations (each epoch)"
    )
    training.add_argument("--checkpoint-activations", action="store_true", help="compute twice, store less")
    model = parser.add_argument_group("model")
    names = ("tiny", "mini", "small", "base", "large")
    model.add_argument("--preset", choices=names, default="base", help="sizes of Google's BERT models")
    model.add_argument("--config-file", type=Path, metavar="JSON", help="a bert_config.json instead of --preset")
    model.add_argument("--dropout", type=cli.probability, metavar="P", help="instead of the config's 0.1")
    model.add_argument("--init-from", metavar="MODEL", help="folder, run or hub name to begin from, as phase 2 does")
    data_flags = corpus.add_corpus_flags(parser)
    data_flags.add_argument(
        "--data-workers", type=cli.natural_int, default=0, metavar="N", help="processes that make batches"
    )
    cli.add_output_flags(parser)
    cli.may_differ(parser, *corpus.PATHS, "data_workers", "init_from", "config_file")  # between nodes
    parser.set_defaults(unit="rows", eval_batch=64)
    return parser


if __name__ == "__main__":
    # A wrong flag is answered before torch is imported. This call does not return: it starts the workers, each of
    # which loads this file as a module, goes on below this line, and enters train().
    start.main(flags(), cli.check_training)

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from bert_ddp.model import pretrained
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from bert_ddp.pretrain import model as bert
from bert_ddp.pretrain import rows
from common.join.process_group import process_group
from common.record import checkpoint, report
from common.uneven import ddp
from common.uneven.batching import micro_batches, plan_batches
from common.uneven.ddp import reduce_gradients_if
from common.uneven.precision import Precision
from common.uneven.sampling import EvaluationSampler, UnevenDistributedSampler
from common.uneven.seeding import derive_seed
from common.uneven.sums import Sums


def train(worker: Worker, args: Namespace) -> None:
    """One process's whole life: join, load, train, evaluate, save, leave. Every rank runs it."""
    with process_group(worker, args) as group:
        device, precision = group.device, Precision(args.precision, group.device)

        # Data. The plan cuts each global batch by shares, 256 on `8,2` into 26 x 6 and 25 x 4; an epoch's last batch
        # holds what is left, and nothing is padded. One item of the loader is this rank's part of one optimizer
        # step, perhaps empty: the data set makes a whole batch at once, so there is nothing to collate.
        with group.first_on_node("the token rows"):
            source = pretrained.locate(args.init_from, "--init-from") if args.init_from else None
            text = corpus.load(args, lambda line: report.say(worker, line), source)
        group.agree(**{"--corpus and --vocab, fingerprint": text.fingerprint})
        train_set, test_set = rows.of_corpus(text, args.mask_probability, args.whole_words, args.seed)
        plan = plan_batches(len(train_set), cli.global_batch(args, worker), worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        loading = rows.loading(args.data_workers, device)
        train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=rows.as_is, **loading)
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, args.eval_batch)
        test_loader = DataLoader(test_set, batch_sampler=shard, collate_fn=rows.as_is, **loading)

        # Model. The seed gives every layout the same first weights.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        with group.first_on_node("the first weights"):
            net = bert.build(args, text.meta, source).to(device, precision.dtype)
        group.agree(**{"--config-file or --init-from, fingerprint": bert.fingerprint(net, source is not None)})
        optimizer = torch.optim.AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        decay = warm_up_then_decay(args.warmup_steps, schedule_steps, args.decay_power)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}

        # Files. A checkpoint fits any layout, but only the run that it is of: --resume with another value is refused.
        identity = {"data": f"{args.objective} {text.fingerprint}"}
        recipe = {"global_batch": plan.global_batch, **cli.values(args, "seed", "epochs", "lr", "weight_decay")}
        recipe |= cli.values(args, "clip_norm", "warmup_steps", "decay_power", "mask_probability", "whole_words")
        recipe |= {"dropout": net.config.hidden_dropout_prob}
        folder = report.open_folder(group, args, "bert")
        step = checkpoint.resume(group, args, folder, net, identity, recipe, **parts)  # optimizer steps done
        model = ddp.wrap(net, device, args.compile)
        # A backward of no rows, so that the first step adds up gradients in the order that all later ones do.
        ddp.settle_buckets(model, bert.sum_of(model(**train_set.__getitems__([]).to(device).inputs)))
        progress = report.Report(group, args, plan, model.timer)

        if args.eval_only:
            progress.evaluation(step, **evaluate(net, test_loader, precision, device))
            return

        def evaluate_now() -> None:
            with progress.pause():
                numbers = evaluate(net, test_loader, precision, device)
            progress.evaluation(step, **numbers, unigram_entropy=text.meta["unigram_entropy"])

        def write_extra(path: Path) -> None:  # with these, a checkpoint is a folder that from_pretrained reads
            net.config.save_pretrained(path)
            text.copy_tokenizer(path)

        def save() -> None:
            with progress.pause(), group.others_wait(f"rank 0, which saves step {step}"):
                if worker.is_main:
                    state = {**identity, **recipe, "layout": worker.layout.source, "shares": plan.shares}
                    checkpoint.save(folder / "checkpoints", step, net, state, args.keep, write_extra, **parts)

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        progress.open(folder, step, total_steps, data=text.describe())
        while step < total_steps:
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            train_set.set_epoch(epoch)
            masked_tokens = train_set.masked_in_steps(plan, sampler.order())  # of each step, over all ranks
            for part in model.timer.steps(train_loader):
                torch.manual_seed(derive_seed(args.seed, "dropout", step, worker.rank))
                count = masked_tokens[step % plan.steps_per_epoch]
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)  # this rank's; `progress` adds up all
                for micro, is_last in micro_batches(part.to(device), args.micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model):  # one all-reduce a step, in the last backward
                        with precision.autocast():
                            logits, next_logits = model(**micro.inputs)
                            micro_loss = cross_entropy(logits, micro.labels.flatten(), reduction="sum")
                            if next_logits is not None:  # a mean over rows, beside the mean over masked tokens
                                next_loss = cross_entropy(next_logits, micro.next_labels, reduction="sum")
                                micro_loss = micro_loss + next_loss * (count / plan.global_count(step))
                        # DDP averages over the ranks; a mean over the global batch needs sum / global_count.
                        precision.backward(micro_loss * worker.world_size / count)
                    loss_sum += micro_loss.detach()
                lr = scheduler.get_last_lr()[0]
                grad_norm = precision.step(model, optimizer, args.clip_norm)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                progress.step(step, loss_sum, lr, grad_norm, count)
                if step == total_steps:
                    break
                if args.eval_every and step % args.eval_every == 0 and step % plan.steps_per_epoch:
                    evaluate_now()
                if args.save_every and step % args.save_every == 0 and step % plan.steps_per_epoch:
                    save()
            evaluate_now()
            save()
        progress.summary(step)


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: DataLoader, precision: Precision, device: torch.device) -> dict[str, float]:
    """MLM loss, perplexity and accuracy over the held-out rows' masked tokens, each counted once on any number of
    ranks; with sentence pairs also the accuracy of the next sentence.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the ranks
    meet only once, in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", "next_correct", "rows", device=device)
    for batch in loader:
        batch = batch.to(device)
        with precision.autocast():
            logits, next_logits = net(**batch.inputs)
            labels = batch.labels.flatten()
            loss_sum = cross_entropy(logits, labels, reduction="sum")
        next_correct = 0 if next_logits is None else (next_logits.argmax(dim=1) == batch.next_labels).sum()
        counted = (labels != rows.IGNORED).sum()
        sums.add(loss_sum, (logits.argmax(dim=1) == labels).sum(), counted, next_correct, len(batch))
    net.train()
    total = sums.reduce()
    count = total["count"]
    found = {"loss": total["loss"] / count, "accuracy": total["correct"] / count, "count": int(count)}
    found["perplexity"] = math.exp(min(found["loss"], 700.0))
    return found if net.bert.pooler is None else found | {"next_accuracy": total["next_correct"] / total["rows"]}
