"""The two trainers are near-twins: their diff is a lesson, so what need not differ must not."""

import difflib

from tests.harness import BERT, MNIST

SAME = """
    start.main(flags(), cli.check_training)
    with process_group(worker, args) as group:
        device, precision = group.device, Precision(args.precision, group.device)
        plan = plan_batches(len(train_set), cli.global_batch(args, worker), worker.world_size, args.shares)
        sampler = UnevenDistributedSampler(plan, worker.rank, args.seed)
        shard = EvaluationSampler(len(test_set), worker.rank, worker.world_size, args.eval_batch)
        torch.manual_seed(derive_seed(args.seed, "weights"))
        recipe = {"global_batch": plan.global_batch, **cli.values(args, "seed", "epochs", "lr", "weight_decay")}
        model = ddp.wrap(net, device, args.compile)
        progress = report.Report(group, args, plan, model.timer)
            with progress.pause(), group.others_wait(f"rank 0, which saves step {step}"):
            epoch, first_step = divmod(step, plan.steps_per_epoch)
            sampler.set_epoch(epoch, skip_steps=first_step)
            for part in model.timer.steps(train_loader):
                torch.manual_seed(derive_seed(args.seed, "dropout", step, worker.rank))
                for micro, is_last in micro_batches(part.to(device), args.micro_batch):  # at least one, perhaps empty
                    with reduce_gradients_if(is_last, model):  # one all-reduce a step, in the last backward
                        with precision.autocast():
                grad_norm = precision.step(model, optimizer, args.clip_norm)
                scheduler.step()
                optimizer.zero_grad()
                step += 1
        progress.summary(step)
"""


def body(path):
    """A trainer from its guard on, without blank lines: flags and the docstring may differ freely."""
    text = path.read_text().split('\nif __name__ == "__main__":')[1]
    return [line for line in text.splitlines() if line.strip()]


def test_the_steps_that_make_training_exact_are_the_same_lines():
    for path in (MNIST, BERT):
        lines = body(path)
        places = [lines.index(line) for line in SAME.strip("\n").splitlines()]
        assert places == sorted(places), path


def test_two_of_three_lines_of_the_mnist_trainer_stand_in_the_bert_trainer():
    mnist, bert = body(MNIST), body(BERT)
    blocks = difflib.SequenceMatcher(a=mnist, b=bert, autojunk=False).get_matching_blocks()
    shared = sum(block.size for block in blocks)
    assert shared / len(mnist) > 2 / 3, f"only {shared} of {len(mnist)} lines are shared"
    assert len(bert) < 1.35 * len(mnist)
