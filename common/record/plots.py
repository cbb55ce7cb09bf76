"""curves.png: the loss, the evaluations and each rank's time of one metrics.jsonl."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from common.record.metrics import OF_STEPS, each_row

# from the bottom of a bar to its top
COLORS = {"loading": "tab:red", "compute": "tab:green", "communication": "tab:blue", "wait": "tab:orange"}
NOT_MEASURES = {"kind", "step", "epoch", "loss", "count", "training_seconds"}  # of an eval row
PANEL_HEIGHT = 4.2  # inches
PANEL_INCHES = 5.5  # the width of a panel; that of many ranks is wider
# inches of a panel around its axes. Fixed, because to find them matplotlib would draw everything several times, which
# took longer than all else at the end of a run
LEFT, RIGHT, BOTTOM, TOP = 0.85, 0.15, 0.6, 0.4
BESIDE = 1.6  # inches to the right of the axes for a legend there
SIDE_BY_SIDE = 4  # ranks whose figures fit above their bars
MOST_POINTS = 20_000  # of a curve, more than any screen shows: the steps of a week would fill the memory
UPRIGHT = 48  # ranks whose figures fit there when they are turned by 90 degrees

Rows = list[dict[str, Any]]
Panel = tuple[float, Callable[[Any], None]]  # inches wide, and a function that draws into axes


def plot_curves(metrics: Path, picture: Path) -> None:
    """Draw loss, evaluations and time by rank of `metrics`, a metrics.jsonl, into the PNG `picture`."""
    figure = draw_curves(thinned(each_row(metrics)))
    aside = picture.with_name(f".{picture.name}")
    figure.savefig(aside, format="png", pil_kwargs={"compress_level": 1})
    aside.replace(picture)


def thinned(rows: Iterable[dict[str, Any]], most: int = MOST_POINTS) -> Rows:
    """Of rows of steps with more than `most` numbers to draw, every second one, every fourth, ..., and the last."""
    kept, every, seen = defaultdict[str, Rows](list), Counter[str](), Counter[str]()
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        kind, numbers = row["kind"], len(row.get("shares", ())) or 1
        if seen[kind] % (every[kind] or 1) == 0:
            kept[kind].append(row)
        seen[kind] += 1
        last[kind] = row
        if len(kept[kind]) * numbers > most and kind in OF_STEPS:
            kept[kind] = kept[kind][::2]
            every[kind] = 2 * (every[kind] or 1)
    return [row for kind, some in kept.items() for row in (some if some[-1] is last[kind] else [*some, last[kind]])]


def draw_curves(rows: Rows) -> Any:
    """A matplotlib Figure with a panel for the loss, one for measures between 0 and 1, one for measures of other
    scales, such as perplexity, one for time by rank, one for members that come and go, and two for shares that change;
    without those that would be empty."""
    train, evals, ranks = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval", "ranks"))
    measures = _measures(evals)
    fractions = {name: points for name, points in measures.items() if all(0 <= value <= 1 for _, value in points)}
    others = {name: points for name, points in measures.items() if name not in fractions}
    curves: list[Panel] = [(PANEL_INCHES, partial(_plot_losses, train=train, evals=evals))]
    for title, found in {"Held out": fractions, "Held out, other scales": others}.items():
        if found:
            curves.append((PANEL_INCHES, partial(_plot_measures, measures=found, title=title)))
    times: list[Panel] = []
    if ranks:
        wide = max(PANEL_INCHES, 2 + 0.2 * min(len(ranks[-1]["shares"]), UPRIGHT))
        last = [row for row in ranks if row["shares"] == ranks[-1]["shares"]]
        times.append((wide + BESIDE, partial(_plot_ranks, rows=last)))
    if any(row["kind"] == "members" for row in rows):
        times.append((PANEL_INCHES, partial(plot_members, rows=rows)))
    here = [row for row in ranks if len(row["shares"]) == len(ranks[-1]["shares"])]  # others are of other layouts
    if changing := any(row["shares"] != here[0]["shares"] for row in here):
        unit = f"samples of {sum(here[-1]['shares']):,} a step"
        both, title = ["compute_ms", "wait_ms"], "Compute (lines) and wait (dots)"
        times.append((PANEL_INCHES, partial(_plot_over_time, rows=here, names=["shares"], title="Shares", unit=unit)))
        times.append((PANEL_INCHES, partial(_plot_over_time, rows=here, names=both, title=title, unit="ms a step")))
    figure = _figure([curves, times] if changing else [[*curves, *times]])
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_title(axes.get_title(), y=1.0)  # without y, matplotlib lays out all ticks once more to find its place
    return figure


def _figure(rows: list[list[Panel]]) -> Any:
    """A Figure with these panels drawn in it, row by row."""
    from matplotlib.figure import Figure

    width, height = max(sum(inches for inches, _ in row) for row in rows), PANEL_HEIGHT * len(rows)
    figure = Figure(figsize=(width, height), dpi=110)
    for number, row in enumerate(rows, 1):
        left, bottom = 0.0, height - number * PANEL_HEIGHT
        for inches, draw in row:
            wide, high = inches - LEFT - RIGHT, PANEL_HEIGHT - BOTTOM - TOP
            place = ((left + LEFT) / width, (bottom + BOTTOM) / height, wide / width, high / height)
            draw(figure.add_axes(place))
            left += inches
    return figure


def _measures(evals: Rows) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) of each number that evaluations have found, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in evals:
        for name in row.keys() - NOT_MEASURES:
            if isinstance(row[name], int | float):
                found.setdefault(name, []).append((row["step"], row[name]))
    return dict(sorted(found.items()))


def _plot_losses(axes: Any, train: Rows, evals: Rows) -> None:
    axes.plot([row["step"] for row in train], [row["loss"] for row in train], linewidth=0.8, label="training")
    held_out = [(row["step"], row["loss"]) for row in evals if row.get("loss") is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss", title="Loss")
    if train:
        _scale_by_powers(axes)
    axes.legend()


def _scale_by_powers(axes: Any) -> None:
    """A logarithmic axis with plain numbers: 0.1, 0.2, 0.5, and not powers of 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plot_measures(axes: Any, measures: dict[str, list[tuple[int, float]]], title: str) -> None:
    for name, points in measures.items():
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    values = [value for points in measures.values() for _, value in points]
    axes.set(xlabel="optimizer step", title=title)
    if min(values) > 0 and max(values) > 20 * min(values):
        _scale_by_powers(axes)
    axes.legend()


def _plot_ranks(axes: Any, rows: Rows) -> None:
    """One bar a rank: how a step's time divides. Above it the rank's share, and its rate while it computes."""
    from matplotlib.ticker import MultipleLocator

    shares = rows[-1]["shares"]
    zeros = [0.0] * len(shares)
    # the median over the run, because the first steps are much slower than the rest; earlier versions had no loading_ms
    tops, times = zeros, {}
    for name, color in COLORS.items():
        times[name] = [median_low(ms) for ms in zip(*(row.get(f"{name}_ms", zeros) for row in rows), strict=True)]
        axes.bar(range(len(shares)), times[name], bottom=tops, label=name, color=color)
        tops = [top + ms for top, ms in zip(tops, times[name], strict=True)]
    axes.set(ylabel="ms a step", title="Time by rank", xlabel="rank")
    axes.set_xlim(-0.7, len(shares) - 0.3)
    axes.xaxis.set_major_locator(MultipleLocator(-(-len(shares) // 20)))
    left, bottom, width, height = axes.get_position().bounds
    axes.set_position([left, bottom, width - BESIDE / axes.figure.get_figwidth(), height])
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the bars, so that it covers none
    if len(shares) <= UPRIGHT:
        axes.set_xlabel("rank (above: its share, and its rate while it computes)")
        rates = [f"{share / ms * 1e3:,.0f}/s" if ms else "" for share, ms in zip(shares, times["compute"], strict=True)]
        _write_above(axes, tops, list(zip(map(str, shares), rates, strict=True)))


def plot_members(axes: Any, rows: Rows) -> None:
    """A line for each rank as it was started, over the steps in which it was there."""
    for rank, spans in spans_of_members(rows).items():
        for first, last in spans:
            axes.plot([first, last], [rank, rank], color=f"C{rank % 10}", linewidth=5, solid_capstyle="butt")
    for row in rows:
        if row["kind"] == "members":
            axes.axvline(row["step"], color="gray", linestyle=":", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="rank, as it was started", title="Members")
    axes.set_ylim(axes.get_ylim()[0] - 0.5, axes.get_ylim()[1] + 0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)


def spans_of_members(rows: Rows) -> dict[int, list[tuple[int, int]]]:
    """For each rank as it was started, the (first, last) steps between which it was there, from a run's rows."""
    members = [row for row in rows if row["kind"] == "members"]
    before = [row for row in rows if row["kind"] == "ranks" and row["step"] <= members[0]["step"]]
    there = [(row["step"], {one["original"] for one in row["ranks"]}) for row in members]
    started = len(before[0]["shares"]) if before else 1 + max(rank for _, ranks in there for rank in ranks)
    there = [(0, set(range(started))), *there, (max(row.get("step", 0) for row in rows), set())]
    spans: dict[int, list[tuple[int, int]]] = {}
    for (first, ranks), (last, _) in pairwise(there):
        for rank in sorted(ranks):
            mine = spans.setdefault(rank, [])
            begun = mine.pop()[0] if mine and mine[-1][1] == first else first
            mine.append((begun, last))
    return dict(sorted(spans.items()))


def _plot_over_time(axes: Any, rows: Rows, names: list[str], title: str, unit: str) -> None:
    """A line a rank for each of the numbers `names` of "ranks" rows; the second one is dotted."""
    ranks, steps = len(rows[0]["shares"]), [row["step"] for row in rows]
    has_legend = ranks <= SIDE_BY_SIDE * 2
    for rank in range(ranks):
        for name, style in zip(names, ("-", ":"), strict=False):
            label = f"rank {rank}" if has_legend and name == names[0] else None
            values = [row[name][rank] for row in rows]
            axes.plot(steps, values, style, color=f"C{rank % 10}", label=label, linewidth=1.2)
    axes.set(xlabel="optimizer step", ylabel=unit, title=title)
    axes.set_ylim(bottom=0)
    if has_legend:
        axes.legend()


def _write_above(axes: Any, tops: list[float], figures: list[tuple[str, str]]) -> None:
    """Write each bar's figures above it, and make the axes high enough for them."""
    upright = len(tops) > SIDE_BY_SIDE
    line = " (%s)" if upright else "\n%s"
    style = {"rotation": 90, "fontsize": 6.5} if upright else {"fontsize": 8}
    offset: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    texts = [
        axes.annotate(share + (rate and line % rate), (rank, top), **offset, **style)
        for rank, (top, (share, rate)) in enumerate(zip(tops, figures, strict=True))
    ]
    height, gap = axes.bbox.height, axes.figure.dpi / 72 * 4
    needed = [height / max(1.0, height - text.get_window_extent().height - gap) for text in texts]
    axes.set_ylim(0, max(top * factor for top, factor in zip(tops, needed, strict=True)) or 1)
