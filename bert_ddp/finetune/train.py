"""Fine-tuning and evaluation of a tagger or classifier; mnist_ddp/train.py is a simpler version of the same.

Every worker of every node runs `train`. Two things differ from MNIST: the ranks' parts of a global batch are balanced
by tokens (token_balance.py), and the loss of tagging is a mean over labelled words, whose number is counted in advance.
"""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import PreTrainedModel

from bert_ddp.finetune import data, scores
from bert_ddp.finetune.best import BestWeights
from bert_ddp.finetune.encoding import LabelledRows
from bert_ddp.finetune.passes import choose_passes
from bert_ddp.finetune.rows import IGNORE, Batch, of_labelled
from bert_ddp.finetune.scores import Scores
from bert_ddp.finetune.sources import data_options
from bert_ddp.model import pretrained, speed
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from common.launch.layout import Worker
from common.run import Run
from common.uneven.batches import move
from common.uneven.options.token_balance import PASS_TOKENS, SortedShard
from common.uneven.sums import Sums


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with Run(worker, args, name=f"bert-{args.task}") as run:
        # Data. The loss is a mean over labelled words or rows. The ranks' parts are balanced by tokens.
        with run.first_on_node("the model and the data"):
            start = pretrained.open_pretrained(args.model)
            length = pretrained.row_length(args.max_length, start.config, args.model, default=128)
            found = data.load(data_options(args), start.tokenizer, length)
        run.agree(data=found.fingerprint, task=args.task)  # between the ranks, and with the checkpoint of --resume
        run.describe(task=f"{args.task} from {start.source}", data=found.facts)

        # Model. The seed gives every layout the same new head; the encoder comes from --model.
        run.seed("weights")
        with run.first_on_node("the weights"):
            net = pretrained.open_to_tune(start, args.task, found.names, args.dropout)
        run.group.agree(**{"--model, fingerprint": pretrained.fingerprint(net)})
        speed.tune(net, run.device, same_sizes=False)
        net.to(run.device, run.precision.dtype).train()  # transformers loads models for evaluation
        batches = run.global_batches(
            found.train,
            counts=found.train.counts,
            lengths=found.train.lengths,
            pass_tokens=PASS_TOKENS[run.device.type],
            cut=choose_passes(net, found.train, run.device, args.compile),
        )
        optimizer = AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        scheduler = warm_up_then_decay(optimizer, args.warmup_steps, batches.total_steps)
        run.resume(
            net,
            # "warmup" is the name and value of --warmup-steps in older checkpoints, such as 0.1
            {"dropout": net.config.hidden_dropout_prob, "warmup": args.warmup_steps},
            optimizer=optimizer,
            scheduler=scheduler,
        )
        model = run.wrap(net, compute_loss, dynamic=True)
        for note in found.notes:
            run.line(note)
        if args.eval_only:
            evaluate_only(net, found, run)
            return
        files = pretrained.files_of(net, start.tokenizer)
        best = BestWeights(run, scores.MEASURE[args.task], files)

        while True:
            # What is due after the steps so far is first. With --elastic, `train` is called again when one is lost.
            if run.evaluation_is_due:
                numbers = evaluate(net, found.held_out["dev"], run).numbers
                best.save_if_better(numbers)  # before the row: a run that is lost in between evaluates again
                run.log_evaluation(**numbers)
            if run.checkpoint_is_due:
                run.save(write_extra=files)
            if run.is_done:
                break

            batch = next(batches)  # this rank's part of one global batch
            for micro, is_last in batch.micro_batches():  # a rank without rows has one that does not count
                with model.no_sync(enabled=not is_last):  # the last backward of a step exchanges the gradients
                    with run.autocast():
                        loss_sum, _ = compute_loss(model, micro)
                    run.backward(loss_sum / batch.global_count)  # the count over all ranks, because DDP sums
            run.optimizer_step(optimizer, clip_norm=args.clip_norm)
            scheduler.step()
            optimizer.zero_grad()
            run.end_step()

        run.finish_saving()
        evaluate_best(net, best, found, run)


def compute_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over the labelled tokens or rows of a batch, zero where there are none, and the logits: of tokens
    (B, S, labels) or (N, labels), or of rows (B, labels)."""
    logits = model(**batch.inputs()).logits
    return loss_of(logits, batch.labels), logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the labelled tokens (B, S) or over the rows (B,); zero where there are none."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def evaluate_only(net: PreTrainedModel, found: data.TaskData, run: Run) -> None:
    """For --eval-only: print the numbers of each held-out set. Every rank must call this."""
    for role, held_out in found.held_out.items():
        run.line(f"the {role} set:")
        run.log_evaluation(**evaluate(net, held_out, run).numbers)


def evaluate_best(net: PreTrainedModel, best: BestWeights, found: data.TaskData, run: Run) -> None:
    """Evaluate the best weights on every held-out set, with a table of each class. Every rank must call this."""
    with run.pause():
        step = best.load(net)
        final = {role: evaluate(net, held_out, run) for role, held_out in found.held_out.items()}
        if run.worker.is_main:
            scores.write_report(run.folder, final, step)
    shown = scores.role_to_show(final)
    run.line(f"the weights of step {step}, on the {shown} set:\n{final[shown].text}")
    of_all = {f"{role}_{name}": value for role, one in final.items() for name, value in one.numbers.items()}
    run.summarize(best_step=step, **of_all)


@torch.no_grad()
def evaluate(net: PreTrainedModel, held_out: LabelledRows, run: Run) -> Scores:
    """Scores of a held-out set: each row on one rank, and rank 0 scores the whole sentences.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the
    collectives come at its end. Every rank must call this, and gets the same numbers.
    """
    net.eval()
    worker, device = run.worker, run.device
    sums = Sums("loss", "count", device=device)
    predicted: dict[int, list[int]] = {}  # row -> the labels of its words, or its class
    of_this_rank = worker.rank, worker.world_size, run.eval_batch, run.dynamic_batches
    for indices in SortedShard(held_out.rows.lengths, *of_this_rank):
        for batch, _ in held_out.rows.get_batch(indices).passes(None, PASS_TOKENS[device.type]):
            batch = move(batch, device)
            with run.autocast():
                logits = net(**batch.inputs()).logits
            sums.add(loss_of(logits.to(run.precision.dtype), batch.labels), (batch.labels != IGNORE).sum())
            answers, labels = logits.argmax(dim=-1).tolist(), batch.labels.tolist()
            for row, answer, label in zip(batch.rows.tolist(), answers, labels, strict=True):
                predicted[row] = of_labelled(answer, label)
    net.train()
    total = sums.reduce()
    gathered: list[Any] | None = [None] * worker.world_size if worker.is_main else None
    dist.gather_object(predicted, gathered)
    result: list[Any] = [None]
    if gathered:
        everything = {row: labels for some in gathered for row, labels in some.items()}
        names: Any = net.config.id2label  # number -> name
        found = held_out.answers(everything, names)
        score = scores.score_entities if held_out.rows.per_token else scores.score_classes
        result = [score(held_out.gold, found)]
        result[0].numbers.update(loss=total["loss"] / total["count"], count=len(held_out.gold))
    dist.broadcast_object_list(result)
    return result[0]
