"""Scores of held-out predictions: entity F1 by seqeval, class scores by scikit-learn, and the files that show them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURE = {"ner": "f1", "classify": "accuracy"}  # the best checkpoint has the highest


@dataclass(frozen=True)
class Scores:
    """What the predictions for one held-out set score."""

    numbers: dict[str, float]  # for metrics.jsonl
    per_class: dict[str, dict[str, float]]
    text: str  # a table for a person
    confusion: dict[str, Counter[str]]  # right class -> answer -> count


def score_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Precision, recall and F1 of entities. An entity is correct if its type and both ends are, as in conlleval."""
    from seqeval.metrics import accuracy_score, classification_report

    pairs = zip((tag for tags in gold for tag in tags), (tag for tags in predicted for tag in tags), strict=True)
    confusion = _confusion((_type(right), _type(answer)) for right, answer in pairs)
    if set(confusion) | {answer for row in confusion.values() for answer in row} <= {"O"}:
        # seqeval has no report without a class
        found = {"micro avg": {"precision": 0.0, "recall": 0.0, "f1-score": 0.0, "support": 0}}
        text = "there are no entities, and none was predicted: precision, recall and F1 count as 0\n"
    else:
        found = classification_report(gold, predicted, output_dict=True, zero_division=0)
        text = classification_report(gold, predicted, zero_division=0)
    micro = found["micro avg"]
    numbers = {"f1": micro["f1-score"], "precision": micro["precision"], "recall": micro["recall"]}
    numbers["tag_accuracy"] = accuracy_score(gold, predicted)
    return Scores(_floats(numbers), _per_class(found), text, confusion)


def score_classes(gold: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Accuracy, macro F1 and Matthews' correlation, with one class for each text."""
    from sklearn.metrics import classification_report, matthews_corrcoef

    found = classification_report(gold, predicted, output_dict=True, zero_division=0)
    right = sum(one == other for one, other in zip(gold, predicted, strict=True))
    numbers = {"accuracy": right / len(gold), "macro_f1": found["macro avg"]["f1-score"]}
    numbers["matthews"] = matthews_corrcoef(gold, predicted)
    text = classification_report(gold, predicted, zero_division=0)
    return Scores(_floats(numbers), _per_class(found), text, _confusion(zip(gold, predicted, strict=True)))


def _type(tag: str) -> str:
    """B-person -> person."""
    return tag if tag == "O" else tag[2:]


def _confusion(pairs: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    table: dict[str, Counter[str]] = {}
    for right, answer in pairs:
        table.setdefault(right, Counter())[answer] += 1
    return table


def _floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items()}


def _per_class(found: Mapping[Any, Any]) -> dict[str, dict[str, float]]:
    return {str(name): _floats(row) for name, row in found.items() if isinstance(row, dict)}


def role_to_show(by_role: Mapping[str, Scores]) -> str:
    """The test set, or dev where there is none."""
    return "test" if "test" in by_role else "dev"


def write_report(folder: Path, by_role: Mapping[str, Scores], step: int) -> None:
    """Write report.txt and report.json for all held-out sets, and confusion.png for the one of `role_to_show`."""
    texts = [f"{role} (weights of step {step})\n\n{scores.text}" for role, scores in by_role.items()]
    (folder / "report.txt").write_text("\n\n".join(texts), encoding="utf-8")
    rows = {role: {**scores.numbers, "per_class": scores.per_class} for role, scores in by_role.items()}
    (folder / "report.json").write_text(json.dumps({"step": step, **rows}, indent=1))
    role = role_to_show(by_role)
    plot_confusion(by_role[role].confusion, f"{role}, weights of step {step}", folder / "confusion.png")


def plot_confusion(confusion: Mapping[str, Counter[str]], title: str, picture: Path) -> None:
    """Draw a PNG of the right class (rows) against the answer (columns), coloured by the part of its row."""
    from matplotlib.figure import Figure

    names = sorted(set(confusion) | {name for row in confusion.values() for name in row})
    counts = [[confusion.get(right, Counter())[answer] for answer in names] for right in names]
    parts = [[count / max(1, sum(row)) for count in row] for row in counts]
    side = min(14.0, 2.5 + 0.6 * len(names))
    figure = Figure(figsize=(side + 1, side), layout="constrained")  # without pyplot: no state, no window
    axes = figure.subplots()
    figure.colorbar(axes.imshow(parts, cmap="Blues", vmin=0, vmax=1), label="part of the row")
    axes.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="answer", ylabel="right", title=title)
    axes.set_xticklabels(names, rotation=90)
    axes.set_yticklabels(names)
    if len(names) <= 20:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                color = "white" if parts[y][x] > 0.6 else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=7, color=color)
    figure.savefig(picture, dpi=110, format="png")
