"""Fine-tuning and evaluation of a tagger or classifier; mnist_ddp/train.py is a simpler version of the same.

Every worker of every node runs `train`. Two things differ from MNIST: the ranks' parts of a global batch are balanced
by tokens (token_balance.py), and the loss of tagging is a mean over labelled words, whose number is counted in advance.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bert_ddp.finetune import best, data, scores
from bert_ddp.finetune.encoding import LabelledRows
from bert_ddp.finetune.passes import choose_passes
from bert_ddp.finetune.rows import IGNORE, of_labelled
from bert_ddp.finetune.scores import Scores
from bert_ddp.finetune.sources import DataOptions
from bert_ddp.model import pretrained, speed
from bert_ddp.model.optimizer import decay_groups, warm_up_then_decay
from common.join.process_group import Group, process_group
from common.launch import cli
from common.launch.layout import Worker
from common.record.folder import open_folder
from common.record.report import Report
from common.record.resume import resume
from common.uneven import ddp
from common.uneven.balance import Balancer
from common.uneven.batches import move
from common.uneven.batching import plan_batches
from common.uneven.ddp import reduce_gradients_if
from common.uneven.loading import part_loader
from common.uneven.memory import fitting_micro_batches
from common.uneven.node_steps import NodeSteps
from common.uneven.precision import Precision
from common.uneven.seeding import derive_seed, seed_noise
from common.uneven.sums import Sums
from common.uneven.timer import StepTimer
from common.uneven.token_balance import PASS_TOKENS, SortedShard, TokenBalancedSampler


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with process_group(worker, cli.join_options(args)) as group:
        device, precision = group.device, Precision(args.precision, group.device, args.on_nan)
        options, timer = cli.run_options(args, f"bert-{args.task}"), StepTimer(device)

        # Data. One item of the loader is this rank's part of one optimizer step, balanced by tokens, perhaps empty.
        with group.first_on_node("the model and the data"):
            source = pretrained.locate(args.model)
            config = pretrained.open_config(source)
            tokenizer = pretrained.open_tokenizer(source, config)
            length = pretrained.row_length(args.max_length, config, args.model, default=128)
            named = {"train": args.train, "dev": args.dev, "test": args.test}
            wanted = DataOptions(args.task, args.data, named, args.text_column, args.label_column)
            found = data.load(wanted, tokenizer, length)
        group.agree(**{"data, labels and vocabulary, fingerprint": found.fingerprint})
        rows, global_batch = found.train, cli.global_batch(args, worker.world_size)
        plan = plan_batches(len(rows), global_batch, worker.world_size, args.shares)
        sampler = TokenBalancedSampler(plan, worker.rank, args.seed, rows.lengths, PASS_TOKENS[device.type])
        counts = sampler.sums_in_steps(rows.counts)  # labelled words or rows of each step, over all ranks
        train_loader = part_loader(rows, sampler, args.seed)
        in_turn = group.numbers("evaluation") if args.balance == "auto" else None

        # Model. The seed gives every layout the same new head; the encoder comes from --model.
        torch.manual_seed(derive_seed(args.seed, "weights"))
        pretrained.prepare(config, found.names, args.dropout)
        with group.first_on_node("the weights"):
            net: Any = pretrained.open_model(source, args.task, config, new_heads=True)  # mypy cannot read its `to`
        group.agree(**{"--model, fingerprint": pretrained.fingerprint(net)})
        speed.tune(net, device, same_sizes=False)
        net.to(device, precision.dtype).train()  # transformers loads models for evaluation
        optimizer = torch.optim.AdamW(decay_groups(net, args.weight_decay), args.lr, fused=True)
        schedule_steps = plan.steps_per_epoch * args.epochs
        schedule = warm_up_then_decay(cli.steps_of(args.warmup_steps, schedule_steps), schedule_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        outer = args.sync_every, args.sync_delay, args.outer_lr, args.outer_momentum, args.timeout
        nodes = NodeSteps(net, sampler, timer, group.ranks_of_nodes, *outer)  # does nothing without --sync-every
        parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": precision.scaler}
        parts |= nodes.parts

        # Files. A checkpoint fits any layout, but only its own run: --resume with other data or flags is refused.
        identity = {"data": found.fingerprint, "task": args.task}
        recipe = cli.recipe(args) | {"global_batch": global_batch, "dropout": net.config.hidden_dropout_prob}
        recipe["warmup"] = args.warmup_steps  # its name and value in older checkpoints, such as 0.1
        folder = open_folder(group, options)
        step = resume(group, options, folder, net, identity, recipe, **parts)  # optimizer steps done

        def trial(count: int) -> None:  # for --micro-batch auto
            longest = rows.get_batch([int(torch.as_tensor(rows.lengths).argmax())] * count)
            some = move(next(longest.passes(None, PASS_TOKENS[device.type]))[0], device)
            with precision.autocast():
                loss = loss_of(net(**some.inputs()).logits, some.labels)
            loss.backward()

        pace = group.each_at_its_own_pace("the largest micro-batch of each rank")
        most = global_batch if args.balance == "auto" else plan.shares[worker.rank]
        sizes = cli.micro_batches(args, worker.world_size) or fitting_micro_batches(net, trial, most, pace)
        micro_batch = sizes[worker.rank]  # the most samples in one forward; None for all at once
        eval_batch = cli.eval_batch(args, sizes)
        cut = choose_passes(net, rows, device, micro_batch, args.compile)
        # A row whose label does not count: it stands for no rows.
        stand_in = move(next(cut(rows.get_batch([])))[0], device)
        compiled: Any = torch.compile(net, dynamic=True) if args.compile else net  # rows differ in length

        def empty_loss(model: torch.nn.Module) -> torch.Tensor:
            return model(**stand_in.inputs()).logits.sum()

        model = ddp.wrap(compiled, plan, timer, empty_loss, compress=args.compress, nodes=nodes)
        balancer = Balancer(plan, sampler, timer, model, on=args.balance == "auto")
        report = Report(group, plan, timer, options, precision=precision)
        for note in found.notes:
            report.line(note)
        if args.eval_only:
            for role, held_out in found.held_out.items():
                report.line(f"the {role} set:")
                report.evaluation(step, **evaluate(net, held_out, eval_batch, group, precision, in_turn).numbers)
            return
        measure = scores.MEASURE[args.task]
        best_score = best.score_so_far(group, folder, measure, step)

        def save(into: str, keep: int, **numbers: float) -> None:
            training = parts if into == "checkpoints" else {}
            write_extra = pretrained.files_of(net, tokenizer)
            report.save(step, net, identity | recipe | numbers, training, keep, write_extra, into)

        def epoch_ends() -> bool:
            return step == total_steps or step % plan.steps_per_epoch == 0

        def finish(evaluates: bool) -> None:
            """What may be due after a step: write what the ranks have noted, evaluate, save."""
            nonlocal best_score
            saves = report.checkpoint_is_due(step, epoch_ends()) and nodes.are_same
            if saves or report.is_due:
                for done in report.exchange():  # an all-gather of what the ranks have noted, every 1 to 5 s
                    precision.require_finite(done.step, done.loss, done.grad_norm)
            if evaluates and report.evaluated_step != step:
                with report.pause():
                    numbers = evaluate(net, found.held_out["dev"], eval_batch, group, precision, in_turn).numbers
                if numbers[measure] > best_score:  # before the row: a run that is lost in between evaluates again
                    best_score = numbers[measure]
                    save("best", 1, **{measure: best_score})
                report.evaluation(step, **numbers)
            if saves:
                save("checkpoints", args.keep)
                report.end_if_interrupted(step)  # by a signal

        total_steps = min(schedule_steps, args.max_steps or schedule_steps)
        report.open_together(
            folder, step, total_steps, micro_batches=sizes, task=f"{args.task} from {source}", data=found.facts
        )
        if report.goes_on:  # ranks were lost, or have come: what was due after the last step may not be done
            finish(epoch_ends())
        while step < total_steps:
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in timer.steps(train_loader, plan.steps_per_epoch - first_step):
                seed_noise(device, derive_seed(args.seed, "dropout", step, worker.rank))
                count = counts[step]
                loss_sum = torch.zeros((), dtype=precision.dtype, device=device)  # of this rank; the report adds up all
                for micro, is_last in cut(part):  # at least one, perhaps a stand-in for no rows
                    micro = move(micro, device)
                    with reduce_gradients_if(is_last, model, timer):  # one exchange a step, in the last backward
                        with precision.autocast():
                            logits = model(**micro.inputs()).logits
                            micro_loss = loss_of(logits, micro.labels)
                        precision.backward(micro_loss / count)  # the all-reduce sums over the ranks
                    loss_sum += micro_loss.detach()
                lr = scheduler.get_last_lr()[0]
                grad_norm = precision.step(model, args.clip_norm, optimizer)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                saves, ends = report.checkpoint_is_due(step, epoch_ends()), step == total_steps or report.is_interrupted
                evaluates = nodes.end_step(epoch_ends(), saves, now=ends)
                report.note(step, loss_sum, float(lr), grad_norm, count)
                balancer.end_step(part.tokens)  # every few steps, the ranks exchange their speeds

                finish(evaluates)
                if step == total_steps:
                    break

        # Evaluate the best weights on every held-out set, with a table of each class.
        report.finish_saving()
        with report.pause():
            best_step = best.load(group, folder, net) or step
            final = {
                role: evaluate(net, held_out, eval_batch, group, precision, in_turn)
                for role, held_out in found.held_out.items()
            }
            if worker.is_main:
                scores.write_report(folder, final, best_step)
        shown = scores.role_to_show(final)
        report.line(f"the weights of step {best_step}, on the {shown} set:\n{final[shown].text}")
        numbers = {f"{role}_{name}": value for role, one in final.items() for name, value in one.numbers.items()}
        report.summary(step, best_step=best_step, **numbers)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the labelled tokens (B, S) or over the rows (B,); zero where there are none."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(
    net: PreTrainedModel,
    held_out: LabelledRows,
    eval_batch: int,
    group: Group,
    precision: Precision,
    in_turn: Callable[[], Iterator[int]] | None,
) -> Scores:
    """Scores of a held-out set: each row on one rank, and rank 0 scores the whole sentences.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the
    collectives come at its end. Every rank must call this, and gets the same numbers.
    """
    net.eval()
    worker, device = group.worker, group.device
    sums = Sums("loss", "count", device=device)
    predicted: dict[int, list[int]] = {}  # row -> the labels of its words, or its class
    for indices in SortedShard(held_out.rows.lengths, worker.rank, worker.world_size, eval_batch, in_turn):
        for batch, _ in held_out.rows.get_batch(indices).passes(None, PASS_TOKENS[device.type]):
            batch = move(batch, device)
            with precision.autocast():
                logits = net(**batch.inputs()).logits
            sums.add(loss_of(logits.to(precision.dtype), batch.labels), (batch.labels != IGNORE).sum())
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
