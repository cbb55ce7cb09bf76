#!/usr/bin/env python3
"""Fine-tune a BERT to tag entities or to classify texts, on nodes with different numbers of GPUs.

    bert-finetune.py --task ner --model MODEL --data FOLDER             # train, dev and test files in it
    bert-finetune.py --task classify --model MODEL --data hf:glue,sst2  # a data set by name
    bert-finetune.py ... -n 2 -g 8,2 -i 0           # on the node with 8 GPUs; prints the next line
    bert-finetune.py ... -n 2 -g 8,2 -i 1 --master-addr NODE0      # on the node with 2

MODEL is a folder that transformers has saved, a run of bert-distributed.py, or a hub name. The loss of every step
and the scores do not depend on the layout. The best weights by dev F1 or accuracy are in OUT_DIR/best/latest.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from common.errors import UserError
from common.launch import cli, start
from common.launch.layout import Layout, Worker

ROLES = ("train", "dev", "test")


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=32)
    training = cli.add_training_flags(parser, epochs=3, lr=5e-5)
    training.add_argument("--warmup", type=cli.probability, default=0.1, metavar="P", help="part of all steps")
    training.add_argument("--dropout", type=cli.probability, metavar="P", help="instead of the model's own")
    task = parser.add_argument_group("task, model and data (SOURCE: a file, or hf:NAME or hf:NAME,CONFIG)")
    task.add_argument("--task", choices=("ner", "classify"), required=True, help="tag entities, or classify texts")
    task.add_argument("--model", required=True, metavar="MODEL", help="folder, run or hub name to begin from")
    task.add_argument("--max-length", type=cli.positive_int, metavar="L", help="most tokens in a row (128)")
    task.add_argument("--data", metavar="SOURCE", help="a folder with train, dev and test files, or hf:NAME")
    for role in ROLES:
        task.add_argument(f"--{role}", metavar="SOURCE", help=f"{role} data, if not those of --data")
    task.add_argument("--text-column", metavar="A[,B]", help="column of texts; two for pairs (found if left out)")
    task.add_argument("--label-column", metavar="NAME", help="column of labels (found if left out)")
    cli.add_output_flags(parser)
    cli.may_differ(parser, "model", "data", *ROLES)  # between nodes
    parser.set_defaults(clip_norm=1.0, eval_batch=64)
    return parser


def check(args: Namespace, layout: Layout) -> None:
    """Refuse what cannot work, before anything is started. Raises UserError."""
    cli.check_training(args, layout)
    if not args.data and not (args.train and args.dev):
        raise UserError("there is no data: name --data FOLDER or hf:NAME, or --train and --dev")


if __name__ == "__main__":
    # A wrong flag is answered before torch is imported. `launch` then loads this file once more in every worker,
    # as a module, so that it goes on below this line, and calls train() there.
    start.main(flags(), check)

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from bert_ddp.cpu.dropout import replace_dropout, use_own_attention
from bert_ddp.finetune import best, scores, tasks
from bert_ddp.finetune.scores import Scores
from bert_ddp.finetune.tasks import LabelledRows
from bert_ddp.finetune.token_batches import PASS_TOKENS, SortedShard, TokenBalancedSampler
from bert_ddp.model import pretrained
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from common.join.process_group import Group, process_group
from common.record import checkpoint, report
from common.uneven import ddp
from common.uneven.batching import plan_batches
from common.uneven.ddp import reduce_gradients_if
from common.uneven.precision import Precision
from common.uneven.seeding import derive_seed
from common.uneven.sums import Sums


def train(worker: Worker, args: Namespace) -> None:
    """One process's whole life: join, load, train, evaluate, save, leave. Every rank runs it."""
    with process_group(worker, args) as group:
        device, precision = group.device, Precision(args.precision, group.device)
        pass_tokens = PASS_TOKENS[device.type]

        # Data. One item of the loader is this rank's part of one optimizer step, balanced by tokens.
        with group.first_on_node("loading model and data"):
            source = pretrained.locate(args.model)
            config = pretrained.open_config(source)
            tokenizer = pretrained.open_tokenizer(source, config)
            data = load_data(args, config.max_position_embeddings, tokenizer, worker)
        group.agree(**{"data, labels and vocabulary, fingerprint": data.fingerprint})
        rows = data.train
        plan = plan_batches(len(rows), cli.global_batch(args, worker), worker.world_size, args.shares)
        balance = {"lengths": rows.lengths, "counts": rows.counts}
        balance |= {"most_rows": args.micro_batch, "pass_tokens": pass_tokens}
        sampler = TokenBalancedSampler(plan, worker.rank, args.seed, **balance)
        train_loader = DataLoader(rows, batch_sampler=sampler, collate_fn=tasks.as_is)

        # Model. The seed gives every layout the same new head; the encoder comes from --model.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        pretrained.prepare(config, data.names, args.dropout)
        with group.first_on_node("loading the weights"):
            net = pretrained.open_model(source, args.task, config, new_heads=True)
        group.agree(**{"--model, fingerprint": pretrained.fingerprint(net)})
        replace_dropout(net)
        use_own_attention(net)
        net = net.to(device, precision.dtype).train()  # transformers loads models for evaluation
        optimizer = torch.optim.AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        schedule = warm_up_then_decay(round(args.warmup * schedule_steps), schedule_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}

        # Files. A checkpoint fits any layout, but only the run that it is of.
        identity = {"data": data.fingerprint, "task": args.task}
        recipe = {"global_batch": plan.global_batch, **cli.values(args, "seed", "epochs", "lr", "weight_decay")}
        recipe |= {**cli.values(args, "clip_norm", "warmup"), "dropout": net.config.hidden_dropout_prob}
        folder = report.open_folder(group, args, f"bert-{args.task}")
        step = checkpoint.resume(group, args, folder, net, identity, recipe, **parts)  # optimizer steps done
        model = ddp.wrap(torch.compile(net, dynamic=True) if args.compile else net, device)
        settling = rows.batch([]).to(device)  # one stand-in row
        ddp.settle_buckets(model, model(**settling.inputs()).logits.sum())
        progress = report.Report(group, args, plan, model.timer)

        def evaluate_on(role: str) -> Scores:
            return evaluate(net, data.held_out[role], data.names, args, group, precision)

        if args.eval_only:
            for role in data.held_out:
                progress.line(f"the {role} set:")
                progress.evaluation(step, **evaluate_on(role).numbers)
            return

        measure = scores.MEASURE[args.task]
        best_score = best.score_so_far(group, folder, measure, step)

        def save(into: str, keep: int, **numbers: float) -> None:
            with progress.pause(), group.others_wait(f"rank 0 saving step {step}"):
                if worker.is_main:
                    state = {**identity, **recipe, "layout": worker.layout.source, "shares": plan.shares, **numbers}
                    extra = pretrained.files_of(net, tokenizer)
                    checkpoint.save(folder / into, step, net, state, keep, extra, **(parts if into != "best" else {}))

        # Where a further pass is dear and labels stand on tokens, rows are packed without padding into one.
        packs = rows.per_token and device.type == "cpu" and not args.compile

        def cut(part: tasks.Part) -> Iterator[tuple[tasks.Batch, bool]]:
            return part.packed_passes(args.micro_batch) if packs else part.passes(args.micro_batch, pass_tokens)

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        progress.open(folder, step, total_steps, task=f"{args.task} from {source}", data=data.facts)
        while step < total_steps:
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in model.timer.steps(train_loader):
                torch.manual_seed(derive_seed(args.seed, "dropout", step, worker.rank))
                count = sampler.global_count(step)  # labelled tokens or rows, on all ranks
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)
                for micro, is_last in cut(part):
                    micro = micro.to(device)
                    with reduce_gradients_if(is_last, model):  # one all-reduce a step, in the last backward
                        with precision.autocast():
                            logits = model(**micro.inputs()).logits
                            micro_loss = loss_of(logits, micro.labels)
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
                if args.save_every and step % args.save_every == 0 and step % plan.steps_per_epoch:
                    save("checkpoints", args.keep)
            with progress.pause():
                numbers = evaluate_on("dev").numbers
            progress.evaluation(step, **numbers)
            # The best first: a run killed between the two does this evaluation again, and not one too few.
            if numbers[measure] > best_score:
                best_score = numbers[measure]
                save("best", 1, **{measure: best_score})
            save("checkpoints", args.keep)

        # The best weights, once more on every held-out set, with a report for each class.
        with progress.pause():
            best_step = best.load(group, folder, net) or step
            found = {role: evaluate_on(role) for role in data.held_out}
            if worker.is_main:
                scores.write_report(folder, found, best_step)
                progress.line(
                    f"the weights of step {best_step}, on the {role_of(found)} set:\n{found[role_of(found)].text}"
                )
        final = {f"{role}_{name}": value for role, result in found.items() for name, value in result.numbers.items()}
        progress.summary(step, best_step=best_step, **final)


def role_of(found: dict[str, Scores]) -> str:
    return "test" if "test" in found else "dev"


def load_data(
    args: Namespace, positions: int, tokenizer: tasks.PreTrainedTokenizerBase, worker: Worker
) -> tasks.TaskData:
    length = args.max_length or min(128, positions)
    if not 8 <= length <= positions:
        raise UserError(f"--max-length is {length}, but --model {args.model} has positions for 8 to {positions} tokens")
    sources = tasks.find_sources(args.data, {role: getattr(args, role) for role in ROLES})
    columns = args.text_column.split(",") if args.text_column else None

    def say_once(line: str) -> None:
        if worker.is_main:
            report.say(worker, line)

    return tasks.load(args.task, sources, tokenizer, length, columns, args.label_column, say_once)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the labelled tokens (B, S) or over the rows (B,); zero where there are none."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=tasks.IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(
    net: torch.nn.Module,
    held_out: LabelledRows,
    names: list[str],
    args: Namespace,
    group: Group,
    precision: Precision,
) -> Scores:
    """Scores of a held-out set, each row on one rank, each sentence judged once, as a whole, on rank 0.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the ranks
    meet only at its end. Every rank must call this, and gets the same numbers.
    """
    net.eval()
    sums = Sums("loss", "count", device=group.device)
    shard = SortedShard(held_out.rows.lengths, group.worker.rank, group.worker.world_size, args.eval_batch)
    predicted: dict[int, list[int]] = {}
    for part in DataLoader(held_out.rows, batch_sampler=shard, collate_fn=tasks.as_is):
        for batch, _ in part.passes(None, PASS_TOKENS[group.device.type]):
            batch = batch.to(group.device)
            with precision.autocast():
                logits = net(**batch.inputs()).logits
            sums.add(loss_of(logits.to(precision.dtype), batch.labels), (batch.labels != tasks.IGNORE).sum())
            answers, labels = logits.argmax(dim=-1).tolist(), batch.labels.tolist()
            for row, answer, label in zip(batch.rows.tolist(), answers, labels, strict=True):
                predicted[row] = tasks.of_labelled(answer, label)
    net.train()
    total = sums.reduce()
    gathered = [None] * group.worker.world_size if group.worker.is_main else None
    dist.gather_object(predicted, gathered)
    result = [None]
    if group.worker.is_main:
        everything = {row: labels for some in gathered for row, labels in some.items()}
        result = [scores.score(args.task, held_out.gold, held_out.answers(everything, names))]
        result[0].numbers.update(loss=total["loss"] / total["count"], count=len(held_out.gold))
    dist.broadcast_object_list(result)
    return result[0]
