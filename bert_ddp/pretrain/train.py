"""Pretraining BERT, and its evaluation: mnist_ddp/train.py, which you should read first, with other data and loss.

Every worker of every node runs `train`. Nothing in it depends on the node or the GPU: `worker` holds the rank, and
`run` cuts the batches (common/uneven/global_batches.py) and knows what is due (common/run/run.py).
"""

import math
from argparse import Namespace

import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from bert_ddp.model import pretrained, speed
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from bert_ddp.pretrain import model as bert
from bert_ddp.pretrain import rows
from bert_ddp.text import corpus
from bert_ddp.text.flags import corpus_options
from common.launch.layout import Worker
from common.run import EvaluationLoader, Run
from common.uneven.options.workers import worker_options
from common.uneven.sums import Sums


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with Run(worker, args, name="bert") as run:
        loading = worker_options(args.data_workers, run.device, preload=["datasets"])  # their start takes seconds

        # Data. The loss is a mean over masked tokens, of which each row has a known number.
        with run.first_on_node("the token rows"):
            source = pretrained.locate(args.init_from, "--init-from") if args.init_from else None
            text = corpus.load(corpus_options(args), source, worker.rank)
        run.agree(data=f"{args.objective} {text.fingerprint}")  # between the ranks, and with the checkpoint
        run.describe(data=text.describe())
        train_set, test_set = rows.of_corpus(text, args.mask_probability, args.whole_words, args.seed)
        batches = run.global_batches(train_set, counts=train_set.counts, **loading)
        test_loader = run.evaluation_loader(test_set, **loading)

        # Model. The seed gives every layout the same initial weights.
        run.seed("weights")
        with run.first_on_node("the initial weights"):
            net = bert.build(bert.model_options(args), text.meta, source).to(run.device, run.precision.dtype)
        run.group.agree(**{"--config-file or --init-from, fingerprint": bert.fingerprint(net, source is not None)})
        speed.tune(net, run.device, same_sizes=True)
        optimizer = AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        scheduler = warm_up_then_decay(optimizer, args.warmup_steps, batches.total_steps, args.decay_power)
        run.resume(net, {"dropout": net.config.hidden_dropout_prob}, optimizer=optimizer, scheduler=scheduler)
        model = run.wrap(net, compute_loss, None if source else bert.untrained_loss(net), pad_empty_batch=True)

        while True:
            # What is due after the steps so far is first. With --elastic, `train` is called again when one is lost.
            if run.evaluation_is_due:
                run.log_evaluation(**evaluate(net, test_loader, run), unigram_entropy=text.meta["unigram_entropy"])
            if run.checkpoint_is_due:
                run.save(write_extra=bert.files_of(net, text))
            if run.is_done:
                break

            batch = next(batches)  # this rank's part of one global batch
            for micro, is_last in batch.micro_batches():  # at least one, perhaps empty
                with model.no_sync(enabled=not is_last):  # the last backward of a step exchanges the gradients
                    with run.autocast():
                        loss_sum, *_ = compute_loss(model, micro, batch.global_count / batch.global_samples)
                    run.backward(loss_sum / batch.global_count)  # the count over all ranks, because DDP sums
            run.optimizer_step(optimizer, clip_norm=args.clip_norm)
            scheduler.step()
            optimizer.zero_grad()
            run.end_step()


def compute_loss(
    model: torch.nn.Module, batch: rows.Batch, next_weight: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The loss summed over a batch's masked tokens, and the logits of the words and, with sentence pairs, of the next
    sentence. That one's loss is a mean over rows, added to a mean over tokens: `next_weight` is tokens / rows."""
    logits, next_logits = model(**batch.inputs)
    loss_sum = cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    if next_logits is not None:
        loss_sum = loss_sum + cross_entropy(next_logits, batch.next_labels, reduction="sum") * next_weight
    return loss_sum, logits, next_logits


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: EvaluationLoader, run: Run) -> dict[str, float]:
    """Mean loss, perplexity and accuracy over the held-out rows' masked tokens, each counted once on any number of
    ranks; with sentence pairs also the accuracy of the next sentence.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the only
    collective is in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", "next_correct", "next_count", device=run.device)
    for batch in loader:
        with run.autocast():
            loss_sum, logits, next_logits = compute_loss(net, batch, next_weight=0.0)
        labels = batch.labels.flatten()
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
