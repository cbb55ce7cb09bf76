"""trace.json and trace.png: the spans of all ranks (trace.py), written by rank 0.

trace.json is in Chrome's Trace Event format. In both, the exchange of a step is divided as everyone can see it on one
clock: a rank *waits* until the slowest rank has its gradients ready; the rest is the transfer.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.console import say
from common.join.process_group import Group
from common.record.trace import RankTrace, Span, Trace

# What the picture shows, from the first to the last of a step, in the colours of curves.png.
COLORS = {
    "loading": "tab:red",
    "micro-batch": "tab:green",
    "wait": "tab:orange",
    "transfer": "tab:blue",
    "optimizer": "tab:olive",
    "shares": "tab:cyan",
    "report": "tab:gray",
    "evaluation": "tab:purple",
    "checkpoint": "tab:brown",
}
SHOWN_STEPS = 6  # in the picture: more would be too narrow to read


def write_trace(trace: Trace, group: Group, folder: Path | None, nodes_apart: bool) -> str:
    """Write trace.json and trace.png into `folder`, where this rank has one; returns what to print of them.
    `nodes_apart`: nodes exchange nothing in a step (--sync-every). Every rank must call this."""
    traces = trace.gather(group)
    if not traces or not folder:
        return ""
    traces = split_exchanges(traces, group.ranks_of_nodes if nodes_apart else [range(len(traces))])
    where, off = folder / "trace.json", max(one.off_seconds for one in traces) * 1e6
    facts = {"first_step": trace.first_step, "ranks": len(traces), "clocks_may_differ_by_us": round(off, 1)}
    events = {"traceEvents": _events(traces, group.views), "displayTimeUnit": "ms", "otherData": facts}
    aside = folder / ".trace"
    try:
        aside.write_text(json.dumps(events))
        aside.replace(where)
        _draw(aside, traces)
        aside.replace(folder / "trace.png")
    except OSError as error:  # the training needs neither
        say(f"could not write {where}: {error.strerror}", rank=0, error=True)
        return ""
    steps = f"steps {trace.first_step} to {trace.first_step + trace.done - 1}"
    return f"trace    {steps}: {where} and trace.png (the nodes' clocks compared to {off:,.0f} microseconds)"


def split_exchanges(traces: Sequence[RankTrace], nodes: Sequence[Sequence[int]]) -> list[RankTrace]:
    """The same, with each "all-reduce" of a step divided into "wait" and "transfer". `nodes` are the ranks that
    exchange with one another in a step."""

    def exchanges(trace: RankTrace) -> Iterator[tuple[tuple[int, int], Span]]:
        """Each with its step, and its number within that."""
        numbers = Counter[int]()
        for span in (one for one in trace.spans if one.name == "all-reduce"):
            numbers[span.step] += 1
            yield (span.step, numbers[span.step]), span

    begins = {(trace.rank, *place): span.start for trace in traces for place, span in exchanges(trace)}
    found = []
    for trace in traces:
        peers = next(ranks for ranks in nodes if trace.rank in ranks)
        parts: dict[Span, list[Span]] = {}
        for place, span in exchanges(trace):
            latest = max(begins.get((rank, *place), span.start) for rank in peers)
            middle = min(latest, span.end)
            parts[span] = [Span("wait", span.start, middle, span.step), Span("transfer", middle, span.end, span.step)]
        spans = [part for span in trace.spans for part in parts.get(span, [span])]
        found.append(replace(trace, spans=spans))
    return found


def _events(traces: Sequence[RankTrace], views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chrome's trace events: a process for each rank, with its node and host in its name, and times in microseconds
    since the first span. `views` are those of the group, by rank."""
    zero = min(span.start for trace in traces for span in trace.spans)
    events: list[dict[str, Any]] = []

    def name(rank: int, thread: int, what: str, **args: Any) -> None:
        events.append({"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args})

    def add(rank: int, thread: int, spans: Sequence[Span]) -> None:
        for span in spans:
            label = f"{span.name} {span.number}" if span.number else span.name
            times = {"ts": round((span.start - zero) * 1e6, 3), "dur": round((span.end - span.start) * 1e6, 3)}
            events.append({"name": label, "ph": "X", "pid": rank, "tid": thread, **times, "args": {"step": span.step}})

    for trace in traces:
        rank, view = trace.rank, views[trace.rank]
        name(rank, 0, "process_name", name=f"rank {rank}, node {view['node_rank']} ({view['host']})")
        name(rank, 0, "process_sort_index", sort_index=rank)
        name(rank, 0, "thread_name", name="this process")
        if trace.kernels:
            name(rank, 1, "thread_name", name="its GPU")
        add(rank, 0, [*steps_of(trace), *trace.spans])
        add(rank, 1, trace.kernels)
    return events


def steps_of(trace: RankTrace) -> list[Span]:
    """A span for each step, from its loading to its optimizer."""
    ends: dict[int, tuple[float, float]] = {}
    for span in trace.spans:
        if span.name in ("loading", "micro-batch", "wait", "transfer", "optimizer"):
            start, end = ends.get(span.step, (span.start, span.end))
            ends[span.step] = min(start, span.start), max(end, span.end)
    return [Span(f"step {step}", start, end, step) for step, (start, end) in sorted(ends.items())]


def _draw(path: Path, traces: Sequence[RankTrace]) -> None:
    """Draw the last steps of `traces`, at most six, into the PNG `path`: a row for each rank. Raises OSError."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    steps = [span for trace in traces for span in steps_of(trace)]
    last = max(span.step for span in steps)
    shown = [span for span in steps if span.step > last - SHOWN_STEPS]
    zero, end = min(span.start for span in shown), max(span.end for span in shown)
    figure = Figure(figsize=(13, 1.6 + 0.45 * len(traces)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    used = set()
    for trace in traces:
        for span in trace.spans:
            if span.start >= zero and span.end <= end and span.name in COLORS:
                used.add(span.name)
                place = ([((span.start - zero) * 1e3, (span.end - span.start) * 1e3)], (trace.rank - 0.4, 0.8))
                axes.broken_barh(*place, facecolors=COLORS[span.name], edgecolor="white", linewidth=0.4)
    for step in sorted({span.step for span in shown}):
        begins = min(span.start for span in shown if span.step == step)
        axes.axvline((begins - zero) * 1e3, color="black", linestyle=":", linewidth=0.8)
        axes.annotate(f"step {step}", ((begins - zero) * 1e3, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set(xlabel="ms", ylabel="rank", ylim=(len(traces) - 0.4, -0.6), xlim=(0, (end - zero) * 1e3))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend = [Patch(color=color, label=name) for name, color in COLORS.items() if name in used]
    axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, format="png")
