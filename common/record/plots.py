"""curves.png: the loss, the evaluations and each rank's time of one metrics.jsonl."""

from pathlib import Path
from typing import Any

from common.record.metrics import read_metrics

# from the bottom of a bar to its top
COLORS = {"loading": "tab:red", "compute": "tab:green", "communication": "tab:blue", "wait": "tab:orange"}


def plot_curves(metrics: Path, picture: Path) -> None:
    """Draw loss, evaluations and time by rank of `metrics`, a metrics.jsonl, into the PNG `picture`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    ranks = [row for row in rows if row["kind"] == "ranks"]
    figure, (losses, quality, speed) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    losses.plot([row["step"] for row in train], [row["loss"] for row in train], linewidth=0.8, label="training")
    if evals and "loss" in evals[0]:
        losses.plot([row["step"] for row in evals], [row["loss"] for row in evals], "o-", label="held out")
    losses.set(xlabel="optimizer step", ylabel="loss", title="Loss", yscale="log" if train else "linear")
    losses.legend()
    # accuracy, F1 and other measures between 0 and 1; perplexity on the same axis would flatten them
    others = {"kind", "step", "epoch", "loss", "count", "training_seconds"}
    found = [name for name in (evals[0] if evals else {}) if name not in others]
    measures = [name for name in found if all(row[name] is not None and 0 <= row[name] <= 1 for row in evals)]
    for name in measures:
        quality.plot([row["step"] for row in evals], [row[name] for row in evals], "o-", label=name)
    quality.set(xlabel="optimizer step", title="Held out")
    if measures:
        quality.legend()
    last = [row for row in ranks if row["shares"] == ranks[-1]["shares"]]
    if last:
        _plot_ranks(speed, last)
    for axes in (losses, quality, speed):
        axes.grid(alpha=0.3)
    aside = picture.with_name(f".{picture.name}")
    figure.savefig(aside, dpi=110, format="png")
    aside.replace(picture)
    pyplot.close(figure)


def _plot_ranks(axes: Any, rows: list[dict[str, Any]]) -> None:
    """One bar a rank: how a step's time divides. Above it the rank's share, and its rate while it computes."""
    shares = rows[-1]["shares"]
    bottom = [0.0] * len(shares)
    for name, color in COLORS.items():
        # the median over the run, because the first steps are much slower than the rest
        values = [sorted(row[f"{name}_ms"][rank] for row in rows)[len(rows) // 2] for rank in range(len(shares))]
        axes.bar(range(len(shares)), values, bottom=bottom, label=name, color=color)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    for rank, (share, top) in enumerate(zip(shares, bottom, strict=True)):
        computing = sorted(row["compute_ms"][rank] for row in rows)[len(rows) // 2]
        rate = f"\n{share / computing * 1e3:,.0f}/s" if computing else ""
        axes.annotate(f"{share}{rate}", (rank, top), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.15)
    axes.set(ylabel="ms a step", title="Time by rank", xticks=range(len(shares)))
    axes.set_xlabel("rank (above: its share, and its rate while it computes)")
    axes.legend()
