"""A first loss that cannot be right: for a trainer to print."""

import math
from collections.abc import Sequence

NEAR = 1.3  # a first loss is within this factor of a guess's
FEW = 0.1  # of the samples: fewer that count are odd
SMALLER = 0.01  # than that of the training: a held-out loss that is odd


def first_loss_problem(loss: float, expected: float) -> str:
    """What to print if the first loss of untrained weights is far from what it must be, else an empty string.

    Over C classes an untrained model is about right with probability 1/C, so its cross entropy is about ln(C). A loss
    that is not summed, or a wrong count, is wrong by a factor, and looks the same on every layout.
    """
    if not math.isfinite(loss) or expected / NEAR < loss < expected * NEAR:
        return ""
    return (
        f"warning: the first loss is {loss:.4g}, but an untrained model should begin near {expected:.4g}. "
        'Is it summed over the samples (reduction="sum"), and divided by the global count of what it is a mean over, '
        "which leaves out ignored labels, and adds up class weights where there are some? Or are the initial weights "
        "too large, such as those of an nn.Embedding that is also the output layer?"
    )


def few_counted_problem(count: float, samples: int) -> str:
    """What to print if a loss is divided by much less than the samples of its global batch, else an empty string. A few
    may count less, or not at all: ignored labels, weights below 1."""
    if count >= FEW * samples:
        return ""
    return (
        f"warning: the loss of step 1 is divided by {count:g}, but its global batch has {samples} samples. Sum the "
        "loss over samples or tokens, and divide by their count over all ranks, not by the number of ranks or batches"
    )


def held_out_loss_problem(loss: float, training_loss: float) -> str:
    """What to print if a held-out loss is much smaller than the loss of the training, else an empty string."""
    if not 0 < loss < SMALLER * training_loss < math.inf:
        return ""
    return (
        f"warning: the held-out loss is {loss:.4g}, but that of the training {training_loss:.4g}: is it a mean "
        "already, which was divided by the count once more? Sum it over the samples or tokens"
    )


def held_out_count_problem(count: float, held_out: Sequence[int], world_size: int) -> str:
    """What to print if the count of an evaluation is that of a held-out set, whose samples are `held_out`, times the
    ranks, else an empty string."""
    if world_size < 2 or not any(count == samples * world_size for samples in held_out):
        return ""
    return (
        f"warning: this evaluation counts {count:g} samples, those of the held-out set {world_size} times: read "
        "run.evaluation_loader(test_set), of which each rank has its own part"
    )
