"""What held-out predictions are worth: entity F1 by seqeval, class scores by scikit-learn, and their files."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEASURE = {"ner": "f1", "classify": "accuracy"}  # which number makes a checkpoint the best


@dataclass(frozen=True)
class Scores:
    """`numbers` for the metrics, `per_class` and `text` for a person, `confusion[gold][predicted]` for the plot."""

    numbers: dict[str, float]
    per_class: dict[str, dict[str, float]]
    text: str
    confusion: dict[str, Counter]


def score(task: str, gold: list, predicted: list) -> Scores:
    """Scores of all predictions of a held-out set at once; entities are counted over whole sentences."""
    return score_entities(gold, predicted) if task == "ner" else score_classes(gold, predicted)


def score_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Precision, recall and F1 of entities, right only with both ends and type, as conlleval counts them."""
    from seqeval.metrics import accuracy_score, classification_report

    pairs = zip((tag for tags in gold for tag in tags), (tag for tags in predicted for tag in tags), strict=True)
    confusion = _confusion((_type(right), _type(answer)) for right, answer in pairs)
    if set(confusion) | {answer for row in confusion.values() for answer in row} <= {"O"}:
        # seqeval has no report without a class
        found = {"micro avg": {"precision": 0.0, "recall": 0.0, "f1-score": 0.0, "support": 0}}
        text = "no entity is there, and none was found: precision, recall and F1 count as 0\n"
    else:
        found = classification_report(gold, predicted, output_dict=True, zero_division=0)
        text = classification_report(gold, predicted, zero_division=0)
    micro = found["micro avg"]
    numbers = {"f1": micro["f1-score"], "precision": micro["precision"], "recall": micro["recall"]}
    numbers["tag_accuracy"] = accuracy_score(gold, predicted)
    return Scores(_floats(numbers), _per_class(found), text, confusion)


def score_classes(gold: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Accuracy, macro F1 and Matthews' correlation."""
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


def _confusion(pairs) -> dict[str, Counter]:
    table: dict[str, Counter] = {}
    for right, answer in pairs:
        table.setdefault(right, Counter())[answer] += 1
    return table


def _floats(numbers: dict) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items()}


def _per_class(found: dict) -> dict[str, dict[str, float]]:
    return {str(name): _floats(row) for name, row in found.items() if isinstance(row, dict)}


def write_report(folder: Path, by_role: dict[str, Scores], step: int) -> None:
    """report.txt, report.json and confusion.png, the last for the test set, or dev where there is none."""
    texts = [f"{role} (weights of step {step})\n\n{scores.text}" for role, scores in by_role.items()]
    (folder / "report.txt").write_text("\n\n".join(texts))
    rows = {role: {**scores.numbers, "per_class": scores.per_class} for role, scores in by_role.items()}
    (folder / "report.json").write_text(json.dumps({"step": step, **rows}, indent=1))
    role = "test" if "test" in by_role else "dev"
    plot_confusion(by_role[role].confusion, f"{role}, weights of step {step}", folder / "confusion.png")


def plot_confusion(confusion: dict[str, Counter], title: str, picture: Path) -> None:
    """A table of right class (rows) against answer (columns), coloured by the part of its row, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(set(confusion) | {name for row in confusion.values() for name in row})
    counts = [[confusion.get(right, Counter())[answer] for answer in names] for right in names]
    parts = [[count / max(1, sum(row)) for count in row] for row in counts]
    side = min(14.0, 2.5 + 0.6 * len(names))
    figure, axes = pyplot.subplots(figsize=(side + 1, side), layout="constrained")
    figure.colorbar(axes.imshow(parts, cmap="Blues", vmin=0, vmax=1), label="part of the row")
    axes.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="answer", ylabel="right", title=title)
    axes.set_xticklabels(names, rotation=90)
    axes.set_yticklabels(names)
    if len(names) <= 20:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                color = "white" if parts[y][x] > 0.6 else "black"
                axes.text(x, y, count, ha="center", va="center", fontsize=7, color=color)
    figure.savefig(picture, dpi=110, format="png")
    pyplot.close(figure)
