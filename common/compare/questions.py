"""The question to ask, from where two runs begin to differ. A pattern suggests a cause; it proves none."""

import math
import textwrap
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from common.compare.differences import Comparison, default_tolerance, same
from common.compare.run import Run
from common.launch import cli

STEADY_STEPS = 4  # from the first one, in which a wrong scale keeps the ratio of the losses
STEADY = 0.01  # how far that ratio may move: the weights move a little differently
CLEARLY = 0.05  # how far that ratio is from 1: the losses of other data, or of other weights, may be that near
SUDDEN = 100.0  # times more than in any step before: not rounding, which grows slowly
INDENT = 10
WIDTH = 110
# may change in a resumed run, and change the last digits
NUMERIC = {"micro_batch", "precision", "compile", "backend", "device"}
NOT_SHOWN = (cli.MAY_DIFFER | cli.MAY_CHANGE) - NUMERIC
# What may be the cause, by where the difference begins.
SCALE = """how is the loss scaled? The summed loss is divided once, by the count over all ranks and micro-batches. An
untrained network's loss is near ln(number of classes): which run has that? Or does the loss compare samples with one
another, and only those of one rank?"""
BEFORE_UPDATE = """what is different before the first update? The count that the loss is divided by; BatchNorm, whose
statistics are those of one rank's samples; augmentation or masks, if seeded by rank and not by sample; dropout, which
draws other noise on another layout (compare with --dropout 0); rows whose result depends on how much they are padded,
such as positions after padding on the left; a loss that compares the samples of one micro-batch with one another; the
initial weights; the data and their order."""
GRADIENT = """about this gradient, because its loss agrees. Are the ranks' means averaged equally, as plain DDP does,
where their samples should be summed? Are gradients not reduced over all ranks and micro-batches? Are embeddings of
other ranks gathered without their gradients (gather_rows has them)? Is only backward() scaled wrongly, or does it draw
other dropout?"""
RESUME = """The first step after it shows lost weights or a lost position in the epoch, the second one a lost
optimizer, schedule or random state."""
EPOCH = """Is its order drawn from (seed, epoch) alone? Is set_epoch called? Is the short last batch of an epoch
divided by its own count?"""
SUDDENLY = """Buffers, and BatchNorm's statistics, that differ between ranks; a step of an optimizer, a scheduler or an
average that one rank alone takes, as under `if rank == 0`; random numbers that depend on the rank; a sample that only
one run has; a loss that compares the samples of one micro-batch with one another; a part of the computation in lower
precision."""
PARTS = """how the ranks' parts of the evaluation are put together, because the training agrees. Sums over samples are
added and divided once, by the count; a mean of means is another number. Is the model in eval() mode? Is an average of
the weights (EMA) among the parts of the checkpoint? Below fp64 a sample may also lie so near the border of two classes
that rounding decides."""

Lines = Iterator[tuple[str, str]]  # label, text


def ask(found: Comparison) -> str:
    """Where the runs differ, what to ask, and what differed from the start."""
    first = found.first_above(found.tolerance)
    if first is not None:
        start = found.first_above(default_tolerance(found.a, found.b))  # whatever is tolerated, it begins there
        return _text(_losses(found, first, start), *_settings(found, first if start is None else start))
    if found.first_evaluation:
        return _text(_evaluation(found), *_settings(found, found.first_evaluation[0]))
    if found.missing:
        return _text(("differs", f"{what}, though the losses agree") for what in found.missing)
    assert found.first_rate is not None
    rates = f"in the learning rate in step {found.first_rate}: {_values(found, found.first_rate, 'lr')}"
    return _line("differs", f"{rates}. The losses agree, but the weights after that step do not")


def what_equal_shares_hide(a: Run, b: Run) -> str:
    """What two runs that agree do not show, where the ranks of each had equal shares; else an empty string."""
    starts = [start for run in (a, b) for start in run.starts]
    if a.is_uneven or b.is_uneven or all(start["layout"]["world_size"] == 1 for start in starts):
        return ""
    return _line("but", "all ranks had equal shares, which hide a mean over each rank's part: give one run --shares")


def _losses(found: Comparison, first: int, start: int | None) -> Lines:
    yield "differs", f"from step {first} on: loss {_values(found, first, 'loss')}"
    if start is None:
        yield "expected", f"of {_precision(found, first)}: layouts add the same numbers in another order"
        return
    if start < first:
        yield "begins", f"at step {start}, below the tolerance: loss {_values(found, start, 'loss')}"
    if names := [name for name in _unequal(found, start) if _decides(name, found)]:
        yield "ask", f"first why {', '.join(names)} differ: with other values the result is another one"
    before = [step for step in found.losses if step < start]
    if not before:
        yield from _from_the_start(found)
    elif before == [1] and start == 2:
        yield from _from_the_first_update(found)
    else:
        yield from _later(found, start, before)


def _from_the_start(found: Comparison) -> Lines:
    first, *_ = steps = list(found.losses)[:STEADY_STEPS]
    if first > 1:
        why = f"are the steps before {first} not in both? Where a difference begins says what it is"
        yield "ask", f"{why}: repeat from step 1, with --log-every 1"
    elif scale := _scale(found, steps):
        yield "ratio", f"B's loss is {scale} A's, in each of the first {len(steps)} steps"
        yield "ask", SCALE
    else:
        yield "ask", BEFORE_UPDATE


def _scale(found: Comparison, steps: list[int]) -> str | None:
    """B's loss over A's where it is steady and clearly not 1, such as '0.25 times (1/4, the world size of B)'."""
    losses = [_pair(found, step, "loss") for step in steps]
    if any(loss is None or not 0 < loss < math.inf for pair in losses for loss in pair):
        return None
    ratio, *others = (other / mine for mine, other in losses)
    if abs(ratio - 1) < CLEARLY or any(abs(one / ratio - 1) > STEADY for one in others):
        return None
    near = Fraction(ratio).limit_denominator(256)
    if not math.isclose(near, ratio, rel_tol=1e-6):
        return f"{ratio:.6g} times"
    starts = {"A": found.a.start_at(steps[0]), "B": found.b.start_at(steps[0])}
    sizes = {name: start["layout"]["world_size"] for name, start in starts.items() if start}
    named = [f", the world size of {name}" for name, size in sizes.items() if near in (size, Fraction(1, size))]
    return f"{ratio:.6g} times (exactly {near}{''.join(named)})"


def _from_the_first_update(found: Comparison) -> Lines:
    if not same(*_pair(found, 1, "lr")):
        yield "ask", f"about the learning rate of step 1: {_values(found, 1, 'lr')}"
    elif "grad_norm" in found.a.train[1] and same(*_pair(found, 1, "grad_norm")):
        said = f"about the update: loss and gradient norm of step 1 agree ({_values(found, 1, 'grad_norm')})"
        yield "ask", f"{said}, so the optimizer, its settings or its state differ."
    else:
        if all("grad_norm" in run.train[1] for run in (found.a, found.b)):
            yield "gradient", f"of step 1: norm {_values(found, 1, 'grad_norm')}"
        yield "ask", GRADIENT


def _later(found: Comparison, start: int, before: list[int]) -> Lines:
    resumes = [("A", step) for step in found.a.resumes] + [("B", step) for step in found.b.resumes]
    lost = [(name, after) for name, after in resumes if start in [step for step in found.losses if step > after][:2]]
    if lost:
        yield "ask", f"what {lost[0][0]}'s resume after step {lost[0][1]} lost. {RESUME}"
    elif found.first_rate is not None and found.first_rate < start:
        rates = _values(found, found.first_rate, "lr")
        yield "ask", f"about the learning rate, from step {found.first_rate} on: {rates}"
    elif found.a.train[start].get("epoch") != found.a.train[before[-1]].get("epoch"):
        yield "ask", f"about the end of an epoch: step {start} is the first of the next one. {EPOCH}"
    else:
        yield from _growth(found, start, max(found.losses[step] for step in before))


def _growth(found: Comparison, start: int, so_far: float) -> Lines:
    now, precision = found.losses[start], _precision(found, start)
    grown = f"the difference is at most {so_far:.1e} before step {start}, and {now:.1e} there"
    if now <= SUDDEN * so_far:
        said = f"of {precision}: {grown}. Layouts add the same numbers in another order, and training amplifies the"
        surer = "a smaller --lr" if "fp64" in precision.split(" and ") else "--precision fp64"
        yield "expected", f"{said} last digits. To be sure, repeat both runs with {surer}."
    else:
        yield "ask", f"about what is not in the gradient: {grown}. {SUDDENLY}"


def _evaluation(found: Comparison) -> Lines:
    assert found.first_evaluation is not None
    step, measure, _ = found.first_evaluation
    mine, other = (run.evaluations[step] for run in (found.a, found.b))
    yield "differs", f"in the evaluation after step {step}: {measure} {mine[measure]} in A, {other[measure]} in B"
    counts = mine.get("count"), other.get("count")
    padded = "A sampler that pads repeats some; drop_last leaves some out."
    which = f"which samples are evaluated: {counts[0]} in A, {counts[1]} in B. {padded}"
    yield "ask", PARTS if counts[0] == counts[1] else which


def _pair(found: Comparison, step: int, name: str) -> tuple[Any, Any]:
    return found.a.train[step].get(name), found.b.train[step].get(name)


def _values(found: Comparison, step: int, name: str) -> str:
    mine, other = _pair(found, step, name)
    return f"{mine} in A, {other} in B"


def _precision(found: Comparison, step: int) -> str:
    starts = [start for start in (found.a.start_at(step), found.b.start_at(step)) if start]
    return " and ".join(sorted({start["flags"].get("precision", "unknown") for start in starts})) or "unknown precision"


def _unequal(found: Comparison, step: int) -> dict[str, tuple[str, str]]:
    """Name -> (A's value, B's value) of all that differs at this step and is in the files of both runs: data, flags,
    layout, versions and commit."""
    first, second = found.a.start_at(step), found.b.start_at(step)
    if not first or not second:
        return {}
    pairs: dict[str, tuple[Any, Any]] = {}
    if found.a.state and found.b.state:
        pairs["data fingerprint"] = (found.a.state.get("data"), found.b.state.get("data"))
    for name in sorted(first["facts"].keys() | second["facts"].keys()):
        pairs[name] = (first["facts"].get(name), second["facts"].get(name))
    for name in sorted((first["flags"].keys() | second["flags"].keys()) - NOT_SHOWN):
        pairs[f"--{name.replace('_', '-')}"] = (first["flags"].get(name), second["flags"].get(name))
    pairs["global batch"] = (sum(first["shares"]), sum(second["shares"]))
    pairs["shares"] = (first["shares"], second["shares"])
    pairs["layout"] = (first["layout"]["source"], second["layout"]["source"])
    for name in first["versions"]:
        pairs[name] = (first["versions"][name], second["versions"].get(name))
    pairs["commit"] = (first["commit"], second["commit"])
    return {name: (cli.shown(mine), cli.shown(other)) for name, (mine, other) in pairs.items() if mine != other}


def _decides(name: str, found: Comparison) -> bool:
    """Do two runs with another value of this optimise something else? Paths, for example, do not, if the data agree.

    A checkpoint holds the flags that must stay the same when a run is resumed, which are those that decide.
    """
    flag, kept = name.removeprefix("--").replace("-", "_"), found.a.state.keys() | found.b.state
    return name in ("data fingerprint", "global batch") or (name.startswith("--") and flag in kept)


def _settings(found: Comparison, step: int) -> list[str]:
    settings = _unequal(found, step)
    width = max(map(len, settings), default=0)
    rows = [f"{'':{INDENT}}{name:<{width}}  {mine} | {other}" for name, (mine, other) in settings.items()]
    return [_line("settings", "that differ, A | B:" if rows else "none that differ are known"), *rows]


def _text(lines: Iterable[tuple[str, str]], *settings: str) -> str:
    return "\n".join([*(_line(label, text) for label, text in lines), *settings])


def _line(label: str, text: str) -> str:
    text = f"{label:<{INDENT}}{text}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)
