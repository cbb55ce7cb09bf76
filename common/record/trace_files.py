"""trace.json and trace.png: the spans of all ranks (trace.py), written by rank 0.

trace.json is in Chrome's Trace Event format. In both, the exchange of a step is divided as everyone can see it on one
clock: a rank *waits* until the slowest rank has its gradients ready; the rest is the transfer.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.record.trace import RankTrace, Span

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


def split_exchanges(traces: Sequence[RankTrace], nodes: Sequence[Sequence[int]]) -> list[RankTrace]:
    """The same, with each "all-reduce" of a step divided into "wait" and "transfer".

    `nodes` are the ranks that exchange with one another in a step: all in one list, but with --sync-every those of each
    node.
    """
    peers = {rank: ranks for ranks in nodes for rank in ranks}
    begins: dict[tuple[int, int], list[float]] = {}  # (rank, step) -> when its exchanges began
    for trace in traces:
        for span in trace.spans:
            if span.name == "all-reduce":
                begins.setdefault((trace.rank, span.step), []).append(span.start)
    found = []
    for trace in traces:
        spans: list[Span] = []
        seen: dict[int, int] = {}  # step -> its exchanges so far
        for span in trace.spans:
            if span.name != "all-reduce":
                spans.append(span)
                continue
            index = seen[span.step] = seen.get(span.step, -1) + 1
            theirs = [begins.get((rank, span.step), []) for rank in peers[trace.rank]]
            latest = max(starts[index] for starts in theirs if len(starts) > index)
            middle = min(max(latest, span.start), span.end)
            spans += [Span("wait", span.start, middle, span.step), Span("transfer", middle, span.end, span.step)]
        found.append(RankTrace(trace.rank, spans, trace.kernels, trace.off_seconds))
    return found


def write_json(path: Path, traces: Sequence[RankTrace], views: Sequence[Mapping[str, Any]], first_step: int) -> None:
    """Write `traces` as Chrome's trace events: a process for each rank, with its node and host in its name, and times
    in microseconds since the first span. `views` are those of the group, by rank. Raises OSError."""
    zero = min(span.start for trace in traces for span in trace.spans)
    events: list[dict[str, Any]] = []
    for trace in traces:
        view = views[trace.rank]
        name = f"rank {trace.rank}, node {view['node_rank']} ({view['host']})"
        about = {"ph": "M", "pid": trace.rank, "tid": 0}
        events += [{**about, "name": "process_name", "args": {"name": name}}]
        events += [{**about, "name": "process_sort_index", "args": {"sort_index": trace.rank}}]
        for thread, what in enumerate(["this process", *(["its GPU"] if trace.kernels else [])]):
            events.append({**about, "tid": thread, "name": "thread_name", "args": {"name": what}})
        events += [_event(step, trace.rank, 0, zero) for step in steps_of(trace)]
        events += [_event(span, trace.rank, 0, zero) for span in trace.spans]
        events += [_event(span, trace.rank, 1, zero) for span in trace.kernels]
    off = max(trace.off_seconds for trace in traces)
    facts = {"first_step": first_step, "ranks": len(traces), "clocks_may_differ_by_us": round(off * 1e6, 1)}
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}))
    aside.replace(path)


def steps_of(trace: RankTrace) -> list[Span]:
    """A span for each step, from its loading to its optimizer."""
    ends: dict[int, tuple[float, float]] = {}
    for span in trace.spans:
        if span.name in ("loading", "micro-batch", "wait", "transfer", "optimizer"):
            start, end = ends.get(span.step, (span.start, span.end))
            ends[span.step] = min(start, span.start), max(end, span.end)
    return [Span(f"step {step}", start, end, step) for step, (start, end) in sorted(ends.items())]


def _event(span: Span, rank: int, thread: int, zero: float) -> dict[str, Any]:
    name = f"{span.name} {span.number}" if span.number else span.name
    times = {"ts": round((span.start - zero) * 1e6, 3), "dur": round((span.end - span.start) * 1e6, 3)}
    return {"name": name, "ph": "X", "pid": rank, "tid": thread, **times, "args": {"step": span.step}}


def draw(path: Path, traces: Sequence[RankTrace]) -> None:
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
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, format="png")
    aside.replace(path)
