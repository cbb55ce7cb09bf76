"""Labelled examples as they are read, before they are tokenized, and the names of their labels."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import UserError

LONGEST_NUMBER = 18  # digits of a label that is sorted as a number
SHOWN_LABELS = 20  # in an error


@dataclass(frozen=True)
class Sentence:
    """Words and their entity tags, such as B-person, I-person and O."""

    words: list[str]
    tags: list[str]
    places: list[str]  # of each word, for errors: "train.conll, line 7"
    columns: list[int] = field(default_factory=list)  # of each word's line, where it has a line of its own

    @property
    def labels(self) -> list[tuple[str, str]]:
        """(label, place) of each word."""
        return list(zip(self.tags, self.places, strict=True))


@dataclass(frozen=True)
class Text:
    """A text, or a pair of texts, with its class."""

    text: str
    pair: str | None
    label: str
    place: str  # for errors: "train.csv, line 7"

    @property
    def labels(self) -> list[tuple[str, str]]:
        """(label, place) of the one label."""
        return [(self.label, self.place)]


def bare(label: str) -> str:
    """A label without what people do not see or mean: case, spaces, marks of no width, how characters are composed."""
    visible = (one for one in unicodedata.normalize("NFKC", label) if unicodedata.category(one) != "Cf")
    return " ".join("".join(visible).casefold().split())


def label_names(train: Sequence[Sentence] | Sequence[Text]) -> list[str]:
    """All labels of the training data, sorted; O first for entities. Raises UserError where texts have one class."""
    names = {label for example in train for label, _ in example.labels}
    if isinstance(train[0], Sentence):
        return sorted(names | {"O"}, key=lambda tag: (tag != "O", tag))
    if len(names) < 2:
        label, place = train[0].labels[0]
        raise UserError(f"{place}: every training example has the label {label!r}: two are needed")

    def in_order(name: str) -> tuple[bool, int, str]:  # numbers first, by size
        is_number = name.isdecimal() and len(name) <= LONGEST_NUMBER
        return not is_number, int(name) if is_number else 0, name

    return sorted(names, key=in_order)


def check_labels(examples: Sequence[Sentence] | Sequence[Text], names: Sequence[str]) -> None:
    """Raise UserError at the first label that is not one of `names`, with its file and line."""
    known = set(names)
    for label, place in (pair for example in examples for pair in example.labels):
        if label not in known:
            if bare(label) in map(bare, names):
                fix = "with other case, spaces, marks or composed characters: write it in one way"
                raise UserError(f"{place}: the label {label!a} occurs in the training data {fix}")
            shown = ", ".join(names[:SHOWN_LABELS]) + (", ..." if len(names) > SHOWN_LABELS else "")
            raise UserError(f"{place}: the label {label!r} does not occur in the training data, which has {shown}")
