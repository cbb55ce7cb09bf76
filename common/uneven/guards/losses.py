"""A first loss that cannot be right: for a trainer to print."""

import math

NEAR = 1.3  # a first loss is within this factor of a guess's
FEW = 0.1  # of the samples: fewer that count are odd
ALIKE = 100.0  # a held-out loss is within this factor of the training's


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
    """What to print if the first held-out loss is of another size than the last training loss, else an empty string."""
    if not (math.isfinite(loss) and loss >= 0 < training_loss) or 1 / ALIKE < loss / training_loss < ALIKE:
        return ""
    return (
        f"warning: the held-out loss is {loss:.4g}, but that of the training {training_loss:.4g}: is it summed over "
        "the samples or tokens, and divided once, by their count over all ranks?"
    )
