#!/usr/bin/env python3
"""docs/unequal.png, from the tables of docs/benchmarks.md: what shares by speed, compression and rare exchanges win.

plot_unequal.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(title: str) -> list[dict[str, str]]:
    """The rows of the first table after the line that begins with `title`."""
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    first = next(number for number in range(start, len(lines)) if lines[number].startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def main() -> None:
    figure, (speeds, links, losses) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")

    rows = table("Shares by speed")
    places = range(len(rows))
    speeds.bar([place - 0.2 for place in places], [float(row["ratio"]) for row in rows], 0.4, label="--balance auto")
    speeds.bar(
        [place + 0.2 for place in places],
        [float(row["ceiling"]) for row in rows],
        0.4,
        label="ceiling",
        color="lightgray",
    )
    speeds.axhline(1.0, color="black", linewidth=0.8)
    names = [f"{row['trainer']}\n{row['global batch']}\n\n" + row["speeds"].replace(" ", "\n") for row in rows]
    speeds.set_xticks(places, names, fontsize=8)
    speeds.set_ylabel("steps per second, times equal shares")
    speeds.set_title("Ranks of different speed: global batch, cores")
    speeds.set_ylim(top=1.25 * max(float(row["ceiling"]) for row in rows))  # room for the legend
    speeds.legend()

    rows = table("Steps per second on a link of 100 Mbit/s")
    links.bar([row["exchange"] for row in rows], [float(row["times the exact"]) for row in rows])
    links.axhline(1.0, color="black", linewidth=0.8)
    links.set_ylabel("steps per second, times the exact")
    links.set_title("A small BERT on 100 Mbit/s")

    rows = table("Held-out loss")
    names, against = [row["exchange"] for row in rows], [float(row["against the exact"]) for row in rows]
    losses.barh(names[::-1], [(value - 1) * 100 for value in against[::-1]])
    losses.set_xlabel("held-out loss above the exact one, in %")
    losses.set_title("What it costs: 1,260 steps, equal tokens")

    figure.savefig(DOCS / "unequal.png", dpi=80)


if __name__ == "__main__":
    main()
