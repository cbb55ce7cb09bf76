"""The two trainers are near-twins: their diff is a lesson, so what need not differ must not."""

import difflib

from tests.harness import BERT, MNIST

TRAINERS = (MNIST.parent / "train.py", BERT.parent / "pretrain" / "train.py")
SAME = """
def train(worker: Worker, args: Namespace) -> None:
    with process_group(worker, cli.join_options(args)) as group:
        device, precision = group.device, Precision(args.precision, group.device, args.on_nan)
        global_batch = cli.global_batch(args, worker.world_size)
        plan = plan_batches(len(train_set), global_batch, worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        torch.manual_seed(derive_seed(args.seed, "weights"))
        outer = args.sync_every, args.sync_delay, args.outer_lr, args.outer_momentum, args.timeout
        nodes = NodeSteps(net, sampler, timer, group.ranks_of_nodes, *outer)  # does nothing without --sync-every
        parts |= nodes.parts
        step = resume(group, options, folder, net, identity, recipe, **parts)  # optimizer steps done
        most = global_batch if args.balance == "auto" else plan.shares[worker.rank]
        sizes = cli.micro_batches(args, worker.world_size) or fitting_micro_batches(net, trial, most, pace)
        micro_batch = sizes[worker.rank]  # the most samples in one forward; None for all at once
        in_turn = group.numbers("evaluation") if args.balance == "auto" else None
        def empty_loss(model: torch.nn.Module) -> torch.Tensor:
        balancer = Balancer(plan, sampler, timer, model, on=args.balance == "auto")
        report = Report(group, plan, timer, options, untrained_loss, precision=precision)
        def epoch_ends() -> bool:
            return step == total_steps or step % plan.steps_per_epoch == 0
        def finish(evaluates: bool) -> None:
            saves = report.checkpoint_is_due(step, epoch_ends()) and nodes.are_same
                for done in report.exchange():  # an all-gather of what the ranks have noted, every 1 to 5 s
                    precision.require_finite(done.step, done.loss, done.grad_norm)
            if saves:
                report.end_if_interrupted(step)  # by a signal
        report.open_together(folder, step, total_steps, micro_batches=sizes, **facts)
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in timer.steps(train_loader, plan.steps_per_epoch - first_step):
                seed_noise(device, derive_seed(args.seed, "dropout", step, worker.rank))
                mine = plan.part(step, worker.rank)  # the samples that the loader must have given
                part = move(part, device, precision.dtype)
                for micro, is_last in micro_batches(part, mine, micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model, timer):  # one exchange a step, in the last backward
                        with precision.autocast():
                grad_norm = precision.step(model, args.clip_norm, optimizer)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                balancer.end_step(len(mine))  # every few steps, the ranks exchange their speeds
                finish(evaluates)
        report.summary(step)
"""


def body(path):
    """A trainer without blank lines."""
    return [line for line in path.read_text().splitlines() if line.strip()]


def test_the_steps_that_make_training_exact_are_the_same_lines():
    for path in TRAINERS:
        lines = body(path)
        places = [lines.index(line) for line in SAME.strip("\n").splitlines()]
        assert places == sorted(places), path


def test_the_entries_end_in_the_same_call():
    for entry, module in ((MNIST, "mnist_ddp.train"), (BERT, "bert_ddp.pretrain.train")):
        assert body(entry)[-4:] == [
            "def main() -> None:",
            f'    start.main(flags(), "{module}:train", cli.check_training)',
            'if __name__ == "__main__":',
            "    main()",
        ]


def test_two_of_three_lines_of_the_mnist_trainer_stand_in_the_bert_trainer():
    mnist, bert = (body(path) for path in TRAINERS)
    blocks = difflib.SequenceMatcher(a=mnist, b=bert, autojunk=False).get_matching_blocks()
    shared = sum(block.size for block in blocks)
    assert shared / len(mnist) > 2 / 3, f"only {shared} of {len(mnist)} lines are shared"
    assert len(bert) < 1.35 * len(mnist)
