"""Training and evaluation on MNIST: read this first, top to bottom.

Every worker of every node runs `train`. How many ranks there are, and on which nodes, changes nothing but rounding.
`worker` holds the rank. `run` cuts the batches (common/uneven/global_batches.py), logs the losses that `run.backward`
is given, and knows what is due between two steps (common/run/schedule.py): an evaluation at the end of an epoch and
with --eval-only, a checkpoint at the end of an epoch and by --save-every. The flags are in mnist-distributed.py.
"""

import math
from argparse import Namespace

import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from common.launch.layout import Worker
from common.run import EvaluationLoader, Run
from common.uneven.sums import Sums
from mnist_ddp import data
from mnist_ddp.model import ConvNet


def train(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, train, evaluate, save, leave. Every rank must call this."""
    with Run(worker, args, name="mnist") as run:
        # Data. An epoch uses each image once, in an order that is the same on every layout. A global batch is the next
        # 256 images of it (--global-batch; the last one of an epoch may be smaller), and each rank gets a slice of it,
        # in the order of the ranks. These are equal up to one image, if --shares or --balance do not ask for others: on
        # nodes of 8 and 2 GPUs, ranks 0 to 5 get 26 images, ranks 6 and 7 of the same node and 8 and 9 of the other 25.
        with run.first_on_node(f"the data set {args.dataset}"):  # one rank of each node first: the others find it there
            train_set, test_set, fingerprint = data.load(args.dataset, args.data_dir, run.precision.dtype, run.device)
        run.agree(data=f"{args.dataset} {fingerprint}")  # an error if a rank, or the checkpoint, has other data
        run.describe(data=f"{args.dataset}: {len(train_set):,} + {len(test_set):,} images{train_set.odd}")
        batches, test_loader = run.global_batches(train_set), run.evaluation_loader(test_set)

        # Model. The seed gives every layout the same initial weights.
        run.seed("weights")
        net = ConvNet(train_set.side).to(run.device, run.precision.dtype)
        # With the usual eps of 1e-8, rounding noise in gradients near zero makes the losses of two layouts differ by
        # 5e-5 after 20 steps.
        optimizer = AdamW(net.parameters(), args.lr, weight_decay=args.weight_decay, eps=1e-5, fused=True)
        scheduler = OneCycleLR(optimizer, args.lr, total_steps=batches.total_steps)
        # Loads these three and the place in `batches`: with --resume from the checkpoint; where --elastic has called
        # `train` again, from the memory of the ranks. In a new run it loads nothing.
        run.resume(net, optimizer=optimizer, scheduler=scheduler)
        # DDP that sums the gradients over the ranks, where plain DDP averages them. `wrap` calls `compute_loss` with an
        # empty batch, because a rank may get one. The log warns if the loss of step 1 is not near ln(10), that of an
        # equal guess among ten classes.
        model = run.wrap(net, compute_loss, untrained_loss=math.log(10))

        while True:
            # What is due comes first, so it is done after the last step too. Where a rank dies, the run ends, and
            # --resume repeats the steps since the checkpoint. With --elastic, `train` is called again on the ranks that
            # are left, makes up for what was due, and repeats only the step that was under way.
            if run.evaluation_is_due:
                run.log_evaluation(**evaluate(net, test_loader, run))
            if run.checkpoint_is_due:
                run.save()
            if run.is_done or run.has_reached("accuracy", args.target_accuracy):
                break  # the end of `with` saves what is not saved yet

            batch = next(batches)  # this rank's part of one global batch
            for micro, is_last in batch.micro_batches():  # at least one: without images, an empty one
                with model.no_sync(enabled=not is_last):  # the last backward of a step exchanges the gradients
                    with run.autocast():
                        loss_sum, _ = compute_loss(model, micro, args.label_smoothing)
                    run.backward(loss_sum / batch.global_count)  # the count over all ranks, because DDP sums
            run.optimizer_step(optimizer, clip_norm=args.clip_norm)
            scheduler.step()
            optimizer.zero_grad()
            run.end_step()


def compute_loss(
    model: torch.nn.Module, batch: data.Batch, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over a batch's images, a scalar, and its logits (images, 10)."""
    logits = model(batch.images)
    return cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=label_smoothing), logits


@torch.no_grad()
def evaluate(net: torch.nn.Module, loader: EvaluationLoader, run: Run) -> dict[str, float]:
    """Mean loss and accuracy over the test set, each image counted once on any number of ranks.

    The ranks' shards may differ in length, so this runs the network itself and not its DDP wrapper, and the only
    collective is in `reduce`. Every rank must call this.
    """
    net.eval()
    sums = Sums("loss", "correct", "count", device=run.device)
    for batch in loader:
        with run.autocast():
            loss_sum, logits = compute_loss(net, batch)
        sums.add(loss_sum, (logits.argmax(dim=1) == batch.labels).sum(), len(batch.labels))
    net.train()
    total = sums.reduce()
    count = total["count"]
    return {"loss": total["loss"] / count, "accuracy": total["correct"] / count, "count": int(count)}
