"""What a set of labelled examples must look like as a whole, where each of its lines is right by itself.

    ner         the first column holds words: no numbers, nor the same one for each line of a sentence; some word of the
                training set is an entity
    classify    texts differ and are not all blank; examples share their labels

`check_*` raise UserError for what cannot be right. `odd` says what may be right, but rarely is.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bert_ddp.finetune.examples import Sentence, Text, bare
from common.errors import UserError

ENOUGH = 10  # examples, from which a set as a whole says something
NUMBER = re.compile(r"[+-]?[0-9]+([.][0-9]*)?")
SHOWN = 40  # characters of an example
MANY = 20  # of examples with a label each
LONG = 60  # words: more are rarely one sentence
SPECIAL = ("[CLS]", "[SEP]", "[PAD]")
QUOTED = re.compile(r"b'.*'|b\".*\"|\".*\"", re.DOTALL)  # as Python writes bytes, and a .csv a text


def check_sentences(sentences: Sequence[Sentence], source: str, role: str) -> None:
    """Raise UserError where the words are not words, or there is nothing to learn."""
    several = [one.words for one in sentences if len(one.words) > 1]
    place = sentences[0].places[0] if sentences[0].places else source
    fix = "the word must be in the first column, and its label in the last"
    says_something = role == "train" or len(several) >= ENOUGH
    if several and says_something and all(_counts(words) for words in several):
        raise UserError(f"{place}: the first column numbers the words of each sentence: {fix}")
    if sum(map(len, several)) > 2 and says_something and all(len(set(words)) == 1 for words in several):
        raise UserError(f"{place}: the first column is the same in all lines of a sentence: {fix}")
    words = [word for one in sentences for word in one.words]
    if role == "train" and not any(character.isalpha() for word in words for character in word):
        raise UserError(f"{place}: no word of the training data has a letter: {fix}")
    if role == "train" and all(tag == "O" for one in sentences for tag in one.tags):
        raise UserError(f"{source}: every word of the training data has the label O: there is no entity to learn")


def _counts(words: Sequence[str]) -> bool:
    """Are these 1, 2, 3 and so on, from any number?"""
    if not all(word.isdecimal() for word in words):
        return False
    first = int(words[0])
    return [int(word) for word in words] == list(range(first, first + len(words)))


def check_texts(texts: Sequence[Text], source: str, role: str, columns: Sequence[str], label_column: str) -> None:
    """Raise UserError where the texts or the labels are from a wrong column."""
    if not any(text.text.strip() for text in texts):
        raise UserError(f"{source}: every text is blank (column {columns[0]}): name another with --text-column")
    if len(texts) >= ENOUGH and len({(text.text, text.pair) for text in texts}) == 1:
        raise UserError(f"{source}: all {len(texts):,} texts are the same (column {columns[0]}): see --text-column")
    if role == "train" and len(texts) >= MANY and len({text.label for text in texts}) == len(texts):
        raise UserError(
            f"{source}: each of the {len(texts):,} examples has a label of its own (column {label_column}): name the "
            "column of classes with --label-column"
        )


def odd(examples: Mapping[str, Sequence[Sentence] | Sequence[Text]], sources: Mapping[str, str]) -> Iterator[str]:
    """What is odd about the sets of each role, in one line each."""
    seen = {_content(one) for one in examples["train"]}
    for role, some in examples.items():
        source = sources[role]
        known = sum(_content(one) in seen for one in some)
        if role != "train" and known > len(some) / 2 and len(some) >= ENOUGH:
            many = "all" if known == len(some) else f"{known:,} of"
            yield f"{source}: {many} {len(some):,} {role} examples are in the training data too: the scores say little"
        if (
            role == "test"
            and len(some) >= ENOUGH
            and Counter(map(_content, some)) == Counter(map(_content, examples["dev"]))
        ):
            yield f"{source}: the test examples are the dev examples: the best of many evaluations is no test"
        usual, times = Counter(map(_content, some)).most_common(1)[0]
        if len(some) >= MANY and times > len(some) / 2:
            shown = " ".join(filter(None, usual))[:SHOWN]
            yield f"{source}: {times:,} of {len(some):,} {role} examples are the same: {shown!r}"
        labels = Counter(label for one in some for label, _ in one.labels)
        if role != "train" and len(labels) == 1 and len(some) >= ENOUGH:
            yield f"{source}: every {role} label is {next(iter(labels))}: the scores say little"
        yield from _odd_labels(labels, source)
        if isinstance(some[0], Sentence):
            yield from _odd_sentences([one for one in some if isinstance(one, Sentence)], source)
        else:
            yield from _odd_texts([one for one in some if isinstance(one, Text)], source, role)


def _content(example: Sentence | Text) -> tuple:
    return tuple(example.words) if isinstance(example, Sentence) else (example.text, example.pair)


def _odd_labels(labels: Counter[str], source: str) -> Iterator[str]:
    alike = Counter(map(bare, labels))
    if twice := [label for label in labels if alike[bare(label)] > 1]:
        shown = ", ".join(label if label.isascii() else ascii(label) for label in twice[:4])
        yield f"{source}: labels differ in case, spaces or marks alone: {shown}"
    if listed := [label for label in labels if label[:1] + label[-1:] == "[]"]:
        yield f"{source}: a label is {listed[0]}: a list of labels counts as one class"
    if missing := [label for label in labels if label.casefold() == "nan"]:
        yield f"{source}: a label is {missing[0]}, as pandas writes one that is missing: it counts as a class"
    numbers = {label: float(label) for label in labels if NUMBER.fullmatch(label)}
    if fractions := [label for label, number in numbers.items() if not number.is_integer()]:
        yield f"{source}: a label is {fractions[0]}: each number counts as a class, whatever its size"
    written = Counter(numbers.values())
    if twice := [label for label, number in numbers.items() if written[number] > 1]:
        yield f"{source}: one number is written in several ways, each a class: {', '.join(twice[:4])}"


def _odd_sentences(sentences: Sequence[Sentence], source: str) -> Iterator[str]:
    lengths = [len(one.words) for one in sentences]
    if len(lengths) == 1 and lengths[0] > LONG:
        yield f"{source} is one sentence of {lengths[0]:,} words: are blank lines missing between sentences?"
    if max(lengths) == 1 and len(lengths) >= ENOUGH:
        fix = ": are there blank lines within it?" if sentences[0].columns else ""  # not of JSON lines
        yield f"{source}: every sentence has one word{fix}"
    words = [word for one in sentences for word in one.words]
    pieces = [word for word in words if (word.startswith("##") and len(word) > 2) or word in SPECIAL]
    if len(pieces) > len(words) / LONG:
        yield f"{source}: words such as {pieces[0]} are pieces of a tokenizer, which would cut them again"
    if all(len(word) == 1 for word in words) and len(words) >= LONG and all(map(str.isascii, words)):
        yield f"{source}: every word is one character: are these the letters of words?"
    widths = Counter(width for one in sentences for width in one.columns)
    if len(widths) > 1:
        usual = widths.most_common(1)[0][0]
        places = (pair for one in sentences for pair in zip(one.columns, one.places, strict=True))
        width, place = next((width, place) for width, place in places if width != usual)
        yield f"{place} has {width} columns, most lines have {usual}: the first is the word, the last its label"
    begins = [(tag, place) for one in sentences for tag, place in _beginnings(one)]
    marks = Counter(tag[0] for tag, _ in begins)
    if marks["I"] and marks["B"]:
        place = next(place for tag, place in begins if tag[0] == min("BI", key=marks.__getitem__))
        yield f"{place}: {marks['I']:,} entities begin with I-, {marks['B']:,} with B-: was it joined of two files?"


def _beginnings(sentence: Sentence) -> Iterator[tuple[str, str]]:
    """(label, place) of each word that begins an entity after a word of another kind or of none."""
    before = "O"
    for tag, place in sentence.labels:
        if tag != "O" and tag[2:] != before[2:]:
            yield tag, place
        before = tag


def _odd_texts(texts: Sequence[Text], source: str, role: str) -> Iterator[str]:
    if blank := [text for text in texts if not text.text.strip()]:
        yield f"{blank[0].place}: the text is blank, as in {len(blank):,} of {len(texts):,} examples of {source}"
    if len(texts) >= ENOUGH and all(
        text.pair is not None and text.pair.strip() in ("", text.text.strip()) for text in texts
    ):
        yield f"{source}: the second text of each example is blank, or the first one again: see --text-column"
    elif len(texts) >= ENOUGH and texts[0].pair is not None and len({text.pair for text in texts}) == 1:
        yield f"{source}: the second text of all {len(texts):,} examples is the same: see --text-column"
    if long := next((text for text in texts if text.text.count("\n") >= MANY), None):
        lines = long.text.count("\n") + 1
        yield f"{long.place}: a text of {lines:,} lines: is a quote never closed, so that rows became one text?"
    of_text = Counter(content for content, _ in {(_content(text), text.label) for text in texts})
    several = sum(count > 1 for count in of_text.values())
    if several > len(of_text) / MANY and len(texts) >= ENOUGH:
        yield f"{source}: {several:,} of {len(of_text):,} texts have several labels: can they be learnt?"
    if len(texts) >= ENOUGH and not any(character.isalpha() for text in texts for character in text.text):
        yield f"{source}: no text has a letter, as {texts[0].text[:SHOWN]!r}: see --text-column"
    if len(texts) >= ENOUGH and sum(bool(QUOTED.fullmatch(text.text)) for text in texts) > len(texts) / 2:
        yield f"{source}: most texts are between quotes, which are a part of them: {texts[0].text[:SHOWN]}"
    classes = len({text.label for text in texts})
    if role == "train" and len(texts) >= ENOUGH and classes > len(texts) / 2:
        yield f"{source} has {classes:,} classes in {len(texts):,} examples: is it the right column of labels?"
