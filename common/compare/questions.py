"""The question to ask, from where two runs begin to differ. A pattern suggests a cause; it proves none."""

import math
import textwrap
from fractions import Fraction

from common.compare.differences import Comparison, default_tolerance
from common.compare.run import Run
from common.compare.settings import decides, unequal

STEADY_STEPS = 4  # from the first one, in which a wrong scale keeps the ratio of the losses
STEADY = 0.01  # how far that ratio may move: the weights move a little differently
CLEARLY = 0.05  # how far that ratio is from 1: the losses of other data, or of other weights, may be that near
SUDDEN = 100.0  # times more than in any step before: not rounding, which grows slowly
INDENT = 10
WIDTH = 110


def ask(a: Run, b: Run, found: Comparison) -> str:
    """Where the runs differ, what to ask, and what differed from the start."""
    first = found.first_above(found.tolerance)
    if first is None and found.first_evaluation:
        return _evaluation(a, b, found)
    if first is None and found.missing:
        return "\n".join([_line("differs", f"{what}, though the losses agree") for what in found.missing])
    if first is None:
        assert found.first_rate is not None
        rates = f"in step {found.first_rate}: {_values(a, b, found.first_rate, 'lr')}"
        return _line(
            "differs", f"in the learning rate {rates}. The losses agree, but the weights after that step do not"
        )
    lines = [_line("differs", f"from step {first} on: loss {_values(a, b, first, 'loss')}")]
    start = found.first_above(default_tolerance(a, b))  # where it begins does not depend on what is tolerated
    if start is None:
        lines.append(_line("expected", f"of {_precision(a, b, first)}: layouts add the same numbers in another order"))
        return "\n".join([*lines, *_table(a, b, first)])
    if start < first:
        lines.append(_line("begins", f"at step {start}, below the tolerance: loss {_values(a, b, start, 'loss')}"))
    if names := [name for name in unequal(a, b, start) if decides(name, a, b)]:
        lines.append(_line("ask", f"first why {', '.join(names)} differ: with other values the result is another one"))
    before = [step for step in found.steps if step < start]
    if not before:
        lines += _from_the_start(a, b, found)
    elif before == [1] and start == 2:
        lines += _from_the_first_update(a, b)
    else:
        lines += _later(a, b, found, start, before)
    return "\n".join([*lines, *_table(a, b, start)])


def what_equal_shares_hide(a: Run, b: Run) -> str:
    """What two runs that agree do not show, where the ranks of each had equal shares; else an empty string."""
    starts = [start for run in (a, b) for start in run.starts]
    if a.is_uneven or b.is_uneven or all(start["layout"]["world_size"] == 1 for start in starts):
        return ""
    return _line("but", "all ranks had equal shares, which hide a mean over each rank's part: give one run --shares")


def _from_the_start(a: Run, b: Run, found: Comparison) -> list[str]:
    first, *_ = steps = found.steps[:STEADY_STEPS]
    if first > 1:
        why = f"are the steps before {first} not in both? Where a difference begins says what it is"
        return [_line("ask", f"{why}: repeat from step 1, with --log-every 1")]
    if scale := _scale(a, b, steps):
        return [
            _line("ratio", f"B's loss is {scale} A's, in each of the first {len(steps)} steps"),
            _line(
                "ask",
                "how is the loss scaled? The summed loss is divided once, by the count over all ranks and "
                "micro-batches. An untrained network's loss is near ln(number of classes): which run has that? Or does "
                "the loss compare samples with one another, and only those of one rank?",
            ),
        ]
    return [
        _line(
            "ask",
            "what is different before the first update? The count that the loss is divided by; BatchNorm, whose "
            "statistics are those of one rank's samples; augmentation or masks, if seeded by rank and not by sample; "
            "dropout, which draws other noise on another layout (compare with --dropout 0); rows whose result depends "
            "on how much they are padded, such as positions after padding on the left; a loss that compares the "
            "samples of one micro-batch with one another; the initial weights; the data and their order.",
        )
    ]


def _scale(a: Run, b: Run, steps: list[int]) -> str | None:
    """B's loss over A's where it is steady and clearly not 1, such as '0.25 times (1/4, the world size of B)'."""
    losses = [(a.train[step]["loss"], b.train[step]["loss"]) for step in steps]
    if any(mine is None or other is None or mine <= 0 or other <= 0 for mine, other in losses):
        return None
    ratios = [other / mine for mine, other in losses]
    if abs(ratios[0] - 1) < CLEARLY or any(abs(one / ratios[0] - 1) > STEADY for one in ratios):
        return None
    near = Fraction(ratios[0]).limit_denominator(256)
    if not math.isclose(near, ratios[0], rel_tol=1e-6):
        return f"{ratios[0]:.6g} times"
    starts = {"A": a.start_at(steps[0]), "B": b.start_at(steps[0])}
    sizes = {name: start["layout"]["world_size"] for name, start in starts.items() if start}
    named = [f", the world size of {name}" for name, size in sizes.items() if near in (size, Fraction(1, size))]
    return f"{ratios[0]:.6g} times (exactly {near}{''.join(named)})"


def _from_the_first_update(a: Run, b: Run) -> list[str]:
    if not _near(a, b, 1, "lr"):
        return [_line("ask", f"about the learning rate of step 1: {_values(a, b, 1, 'lr')}")]
    if "grad_norm" in a.train[1] and _near(a, b, 1, "grad_norm"):
        said = f"about the update: loss and gradient norm of step 1 agree ({_values(a, b, 1, 'grad_norm')})"
        return [_line("ask", f"{said}, so the optimizer, its settings or its state differ.")]
    is_known = "grad_norm" in a.train[1] and "grad_norm" in b.train[1]
    return [
        *([_line("gradient", f"of step 1: norm {_values(a, b, 1, 'grad_norm')}")] if is_known else []),
        _line(
            "ask",
            "about this gradient, because its loss agrees. Are the ranks' means averaged equally, as plain DDP does, "
            "where their samples should be summed? Are gradients not reduced over all ranks and micro-batches? Are "
            "embeddings of other ranks gathered without their gradients (gather_rows has them)? Is only backward() "
            "scaled wrongly, or does it draw other dropout?",
        ),
    ]


def _later(a: Run, b: Run, found: Comparison, start: int, before: list[int]) -> list[str]:
    for name, run in (("A", a), ("B", b)):
        for resumed in run.resumes:
            if start in [step for step in found.steps if step > resumed][:2]:
                question = (
                    f"what {name}'s resume after step {resumed} lost. The first step after it shows lost weights or a "
                    "lost position in the epoch, the second one a lost optimizer, schedule or random state."
                )
                return [_line("ask", question)]
    if rate := next((step for step in before if not _near(a, b, step, "lr")), None):
        return [_line("ask", f"about the learning rate, from step {rate} on: {_values(a, b, rate, 'lr')}")]
    if a.train[start].get("epoch") != a.train[before[-1]].get("epoch"):
        return [
            _line(
                "ask",
                f"about the end of an epoch: step {start} is the first of the next one. Is its order drawn from (seed, "
                "epoch) alone? Is set_epoch called? Is the short last batch of an epoch divided by its own count?",
            )
        ]
    return _growth(a, b, found, start, before)


def _growth(a: Run, b: Run, found: Comparison, start: int, before: list[int]) -> list[str]:
    so_far, now = max(found.losses[step] for step in before), found.losses[start]
    grown = f"the difference is at most {so_far:.1e} before step {start}, and {now:.1e} there"
    precision = _precision(a, b, start)
    if "fp64" not in precision.split(" and ") and now <= SUDDEN * so_far:
        said = f"of {precision}: {grown}. Layouts add the same numbers in another order, and training amplifies the"
        return [_line("expected", f"{said} last digits. To be sure, repeat both runs with --precision fp64.")]
    return [
        _line(
            "ask",
            f"about what is not in the gradient: {grown}. Buffers, and BatchNorm's statistics, that differ between "
            "ranks; random numbers that depend on the rank; a sample that only one run has; a loss that compares the "
            "samples of one micro-batch with one another; a part of the computation in lower precision.",
        )
    ]


def _evaluation(a: Run, b: Run, found: Comparison) -> str:
    assert found.first_evaluation is not None
    step, measure, _ = found.first_evaluation
    mine, other = (run.evaluations[step] for run in (a, b))
    lines = [
        _line("differs", f"in the evaluation after step {step}: {measure} {mine[measure]} in A, {other[measure]} in B")
    ]
    if mine.get("count") != other.get("count"):
        counts = f"{mine.get('count')} in A, {other.get('count')} in B"
        question = (
            f"which samples are evaluated: {counts}. A sampler that pads repeats some; drop_last leaves some out."
        )
    else:
        question = (
            "how the ranks' parts of the evaluation are put together, because the training agrees. Sums over samples "
            "are added and divided once, by the count; a mean of means is another number. Is the model in eval() mode? "
            "Is an average of the weights (EMA) among the parts of the checkpoint? "
            "Below fp64 a sample may also lie so near the border of two classes that rounding decides."
        )
    return "\n".join([*lines, _line("ask", question), *_table(a, b, step)])


def _near(a: Run, b: Run, step: int, name: str) -> bool:
    mine, other = (run.train[step].get(name) for run in (a, b))
    if mine is None or other is None:
        return mine == other
    return math.isclose(mine, other, rel_tol=1e-6)


def _values(a: Run, b: Run, step: int, name: str) -> str:
    return f"{a.train[step].get(name)} in A, {b.train[step].get(name)} in B"


def _precision(a: Run, b: Run, step: int) -> str:
    starts = [start for start in (a.start_at(step), b.start_at(step)) if start]
    return " and ".join(sorted({start["flags"].get("precision", "unknown") for start in starts})) or "unknown precision"


def _table(a: Run, b: Run, step: int) -> list[str]:
    settings = unequal(a, b, step)
    width = max(map(len, settings), default=0)
    rows = [f"{'':{INDENT}}{name:<{width}}  {mine} | {other}" for name, (mine, other) in settings.items()]
    return [_line("settings", "that differ, A | B:" if rows else "none that differ are known"), *rows]


def _line(label: str, text: str) -> str:
    text = f"{label:<{INDENT}}{text}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)
