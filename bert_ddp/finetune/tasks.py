"""Fine-tuning data: from labelled files to rows of tokens, and from rows to batches padded only to their longest.

A *source* is a file, or `hf:name,config` (a data set by name, or a folder that `datasets` reads):

    ner        .conll .txt .bio .iob   one "word label" a line, blank lines between sentences; or .json .jsonl
    classify   .csv .tsv .json .jsonl  a column of text, or two for pairs, and a column of labels

A *row* is what goes through the model at once: `[CLS] pieces [SEP]`. An entity label stands on the first piece of
its word, all other pieces have IGNORE. A sentence too long for one row becomes several, so that every word is
labelled, and scored, once.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from bert_ddp.cpu.packing import Packing
from bert_ddp.finetune.token_batches import cut_passes
from common.errors import RunError, UserError

if TYPE_CHECKING:
    import datasets  # slow to import, and needed for hf: alone

IGNORE = -100  # the label of a position that counts for nothing; cross_entropy's own default
ROLES = {"train": ("train",), "dev": ("validation", "dev", "valid"), "test": ("test",)}  # file stems and splits
WORD_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("ner_tags", "tags", "labels")
LABEL_COLUMNS = ("label", "labels", "class")
MOST_OF_AN_ERROR = 400  # characters of what `datasets` says
KNOWN_WORDS = 200_000  # whose pieces are kept in memory
ENCODE_AT_ONCE = 2000  # texts; bounds the memory of the tokenizer's intermediate objects


@dataclass(frozen=True)
class Sentence:
    """Words and their entity tags, such as B-person, I-person and O."""

    words: list[str]
    tags: list[str]
    places: list[str]  # of each word, for errors: "train.conll, line 7"


@dataclass(frozen=True)
class Text:
    """A text, or a pair of texts, with its class."""

    text: str
    pair: str | None
    label: str
    place: str


# --- sources -----------------------------------------------------------------------------------------------------


class OfData(str):
    """A source that --data gives. One that is named for its role must have what the role needs; this may lack a test
    split, or its labels, as many data sets of the hub do."""


def find_sources(data: str | None, named: dict[str, str | None]) -> dict[str, str]:
    """The source of each role (train, dev, test): what is `named`, or found in the folder or data set `data`.

    A role that has no source is left out. Raises UserError where `data` is no folder and no data set, RunError where
    the hub does not answer.
    """
    found = {}
    if data and data.startswith("hf:"):
        found = dict.fromkeys(ROLES, OfData(data))
        if not named.get("test") and _split_of(_open_hub(data), "test") is None:
            del found["test"]
    elif data:
        if not Path(data).is_dir():
            raise UserError(
                f"--data {data}: there is no such folder: give one with train, dev and test files, or hf:NAME"
            )
        for role, stems in ROLES.items():
            files = sorted(path for stem in stems for path in Path(data).glob(f"{stem}.*") if path.suffix in READERS)
            if files:
                found[role] = str(files[0])
    return found | {role: source for role, source in named.items() if source}


def read_sentences(source: str, role: str) -> list[Sentence]:
    """Labelled sentences for `--task ner`. Raises UserError that names file and line where one is wrong."""
    if source.startswith("hf:"):
        examples = [_sentence(row, place) for place, row in _from_hub(source, role)]
    elif READERS.get(Path(source).suffix) is _records_of_jsonl:
        examples = [_sentence(row, place) for place, row in _records(source)]
    elif READERS.get(Path(source).suffix) is None:
        examples = list(read_conll(Path(source)))
    else:
        raise UserError(f"{source}: --task ner reads CoNLL files (.conll, .txt, .bio, .iob), .jsonl, and hf:NAME")
    if examples and not any(sentence.words for sentence in examples):
        raise UserError(f"{source} holds no labelled word ({role}): its sentences are empty: is it the right file?")
    return _not_empty(examples, source)


def read_texts(source: str, role: str, text_columns: Sequence[str] | None, label_column: str | None) -> list[Text]:
    """Labelled texts for `--task classify`. `text_columns` are one name, or two for pairs; None finds them.

    Raises UserError that names file and line where one is wrong.
    """
    records = _from_hub(source, role) if source.startswith("hf:") else _records(source)
    texts, columns, label = [], text_columns, label_column
    for place, row in records:
        if columns is None:
            columns = [_column(row, ("text", "sentence", "sentence1"), place, "--text-column")]
            columns += ["sentence2"] if columns == ["sentence1"] and "sentence2" in row else []
        label = label or _column(row, LABEL_COLUMNS, place, "--label-column")
        for name, flag in [*((name, "--text-column") for name in columns), (label, "--label-column")]:
            _column(row, (name,), place, flag)
        if row[label] in (None, ""):
            raise UserError(f"{place}: the label is missing (column {label})")
        values = [_as_text(row[name], place, name) for name in columns]
        texts.append(Text(values[0], values[1] if len(values) > 1 else None, str(row[label]), place))
    return _not_empty(texts, source)


def read_conll(path: Path) -> Iterator[Sentence]:
    """CoNLL: the word in the first column, its label in the last, blank lines between sentences.

    Columns are parted by tabs where a line has one, by spaces otherwise. `-DOCSTART-` lines of CoNLL-2003 are left
    out. Raises UserError for a line without a label, or with one that is no entity tag.
    """
    words, tags, places = [], [], []
    for number, line in _lines(path):
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if not any(fields) or fields[0] == "-DOCSTART-":
            if words:
                yield Sentence(words, tags, places)
                words, tags, places = [], [], []
            continue
        place = f"{path}, line {number}"
        if len(fields) < 2 or not fields[-1]:
            raise UserError(
                f"{place}: {fields[0]!r} has no label: write a word and its label, such as `Berlin B-location`"
            )
        words.append(fields[0])
        tags.append(_tag(fields[-1], place))
        places.append(place)
    if words:
        yield Sentence(words, tags, places)


def _tag(tag: str, place: str) -> str:
    if tag != "O" and not (tag[:2] in ("B-", "I-", "E-", "S-") and len(tag) > 2):
        raise UserError(f"{place}: the label {tag!r} is no entity tag: use O, B-TYPE or I-TYPE (or E-, S-)")
    return tag


def _sentence(row: dict, place: str) -> Sentence:
    words = row[_column(row, WORD_COLUMNS, place, "tokens")]
    tags = row[_column(row, TAG_COLUMNS, place, "tags")]
    if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
        raise UserError(f"{place}: words and tags are not two lists of one length")
    return Sentence([str(word) for word in words], [_tag(str(tag), place) for tag in tags], [place] * len(words))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of a UTF-8 text file. Raises UserError where it is not one."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise UserError(f"{path}, line {number}: this is not a text file")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: this is not UTF-8 text ({error.reason}): convert it first") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _records(source: str) -> Iterator[tuple[str, dict]]:
    """(place, record) of a file whose name tells what it is."""
    reader = READERS.get(Path(source).suffix)
    if reader is None:
        raise UserError(f"{source}: --task classify reads .csv, .tsv, .json and .jsonl, and hf:NAME")
    return reader(Path(source))


def _records_of_csv(path: Path) -> Iterator[tuple[str, dict]]:
    lines = (line + "\n" for _, line in _lines(path))
    if path.suffix == ".tsv":  # as GLUE's files are: a quote is a character like any other
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.DictReader(lines, strict=True)
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                more = "more" if None in row else "fewer"
                raise UserError(f"{place}: {more} fields than the header's {len(reader.fieldnames)}")
            yield place, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _records_of_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: this is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: this is no JSON object: write one for each line")
        yield f"{path}, line {number}", row


READERS = {".csv": _records_of_csv, ".tsv": _records_of_csv, ".json": _records_of_jsonl, ".jsonl": _records_of_jsonl}
READERS |= dict.fromkeys((".conll", ".txt", ".bio", ".iob"))  # read_conll


def _from_hub(source: str, role: str) -> Iterator[tuple[str, dict]]:
    """The records of one split of `hf:name`, `hf:name,config` or `hf:folder`, class numbers as their names."""
    splits = _open_hub(source)
    split = _split_of(splits, role)
    if split is None:
        raise UserError(f"{source} has {', '.join(splits)}, but no {role} split: name a file with --{role}")
    names = {column: _class_names(feature) for column, feature in splits[split].features.items()}
    for number, row in enumerate(splits[split]):
        yield f"{source}, {split} row {number}", {name: _named(value, names[name]) for name, value in row.items()}


def _open_hub(source: str) -> "datasets.DatasetDict":
    """All splits of `hf:name`, `hf:name,config` or `hf:folder`."""
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, config = source.removeprefix("hf:").partition(",")
    try:
        return datasets.load_dataset(name, config or None)
    except (ConnectionError, TimeoutError, OSError) as error:
        raise RunError(f"{source} is not on this machine and the hub does not answer: {_first_line(error)}") from None
    except DatasetsError as error:  # what was wrong stands in its later lines, or in its cause
        text = str(error) if "\n" in str(error) or not error.__cause__ else f"{error}: {error.__cause__}"
        raise UserError(f"{source} cannot be read: {shorten(text, MOST_OF_AN_ERROR)}") from None
    except (ValueError, RuntimeError) as error:  # such as an unknown config
        raise UserError(f"{source} cannot be read: {_first_line(error)}") from None


def _split_of(splits: "datasets.DatasetDict", role: str) -> str | None:
    return next((split for split in ROLES[role] if split in splits), None)


def _has_labels(source: str, role: str, columns: Sequence[str]) -> bool:
    """Is there a label in the first of `columns` that this split has? Test sets of competitions keep theirs back."""
    splits = _open_hub(source)
    rows = splits[_split_of(splits, role)]
    column = next((name for name in columns if name in rows.features), None)
    if column is None:
        return False
    names = _class_names(rows.features[column])
    values = (_named(value, names) for value in rows[column])
    labels = (label for value in values for label in (value if isinstance(value, list) else [value]))
    return any(label not in (None, "", -1) for label in labels)


def _class_names(feature: object) -> list[str] | None:
    """The names of a ClassLabel, or of the ClassLabels in a list; None for any other feature."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def _named(value: object, names: list[str] | None) -> object:
    if names is None:
        return value
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    return names[value] if value is not None and value >= 0 else None  # -1 marks the unlabelled test sets of GLUE


def _column(row: dict, names: Sequence[str], place: str, flag: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        has = ", ".join(map(str, row))
        mend = f": name it with {flag}" if flag.startswith("--") else ""
        raise UserError(f"{place}: there is no column {' or '.join(names)} among {has}{mend}")
    return found


def _as_text(value: object, place: str, column: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column} is {value!r}, which is no text")
    return value


def _not_empty(examples: list, source: str) -> list:
    if not examples:
        raise UserError(f"{source} holds no examples: is it the right file?")
    return examples


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- labels ------------------------------------------------------------------------------------------------------


def label_names(train: Sequence[Sentence | Text]) -> list[str]:
    """All labels of the training data, sorted; O first for entities. Raises UserError where there is one class."""
    if isinstance(train[0], Sentence):
        return sorted({tag for sentence in train for tag in sentence.tags} | {"O"}, key=lambda tag: (tag != "O", tag))
    names = {text.label for text in train}
    if len(names) < 2:
        raise UserError(f"{train[0].place}: every training example has the label {train[0].label!r}: two are needed")
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def check_labels(examples: Sequence[Sentence | Text], names: Sequence[str]) -> None:
    """Raise UserError at the first label that `names` does not have, with its file and line."""
    known = set(names)
    for example in examples:
        labels, places = (
            ([example.label], [example.place]) if isinstance(example, Text) else (example.tags, example.places)
        )
        for label, place in zip(labels, places, strict=True):
            if label not in known:
                shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
                raise UserError(f"{place}: the label {label!r} does not occur in the training data, which has {shown}")


# --- rows of tokens ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model at once, padded to the longest of them.

    B = rows, S = tokens of the longest; `mask` is None where nothing is padded.
    """

    tokens: torch.Tensor  # (B, S)
    segments: torch.Tensor | None  # (B, S): 0 for the first text, 1 for the second; None where there is one text
    mask: torch.Tensor | None  # (B, S): 1 for a token, 0 for padding
    labels: torch.Tensor  # ner: (B, S), IGNORE where there is none; classify: (B,)
    rows: torch.Tensor  # (B,): which rows of the data set these are; -1 for the stand-in of an empty part
    packing: Packing | None = None  # on CPUs only: tokens and segments are (1, T) then, and labels (N,)

    def to(self, device: torch.device) -> "Batch":
        tensors = (self.tokens, self.segments, self.mask, self.labels, self.rows)
        moved = (None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors)
        return Batch(*moved, self.packing)

    def inputs(self) -> dict[str, object]:
        """What `transformers` calls these tensors."""
        named = {"input_ids": self.tokens, "attention_mask": self.mask, "token_type_ids": self.segments}
        return named if self.packing is None else {**named, "packing": self.packing}


class Rows(Dataset):
    """A data set's token rows in memory, one after the other in flat arrays.

    `DataLoader(batch_sampler=..., collate_fn=as_is)` gets a `Part` at a time from it.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], labels: Sequence, segments: Sequence | None, pad: int, empty: list
    ):
        self.lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.tokens = _flat(rows)
        self.segments = None if segments is None else _flat(segments)
        self.per_token = len(labels) > 0 and isinstance(labels[0], list | np.ndarray)
        self.labels = _flat(labels) if self.per_token else np.asarray(labels, dtype=np.int32)
        # what each row adds to the denominator of the loss: its labelled tokens, or itself
        marked = np.add.reduceat(self.labels != IGNORE, self.starts[:-1]) if self.per_token else np.ones(len(rows))
        self.counts = marked.astype(np.int64)
        self.pad, self.empty = pad, empty

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Sequence[int]) -> "Part":
        return Part(self, np.asarray(indices, dtype=np.int64))

    def batch(self, indices: np.ndarray) -> Batch:
        """These rows as tensors, padded to their longest. No row gives a stand-in that counts for nothing."""
        if len(indices) == 0:  # transformers' attention cannot reshape a batch of no rows
            shape = (1, len(self.empty)) if self.per_token else (1,)
            tokens, ignored = torch.tensor([self.empty]), torch.full(shape, IGNORE)
            return Batch(tokens, None, None, ignored, torch.tensor([-1]))
        lengths = self.lengths[indices]
        mask = np.arange(lengths.max()) < lengths[:, None]  # (B, S)
        where = (self.starts[indices][:, None] + np.arange(lengths.max()))[mask]
        labels = (
            self._padded(self.labels, where, mask, IGNORE) if self.per_token else self._tensor(self.labels[indices])
        )
        return Batch(
            tokens=self._padded(self.tokens, where, mask, self.pad),
            segments=None if self.segments is None else self._padded(self.segments, where, mask, 0),
            mask=None if mask.all() else self._tensor(mask),
            labels=labels,
            rows=torch.from_numpy(indices),
        )

    def packed(self, indices: np.ndarray) -> Batch:
        """These rows of falling lengths one after the other as T tokens, of which N have a label."""
        lengths = self.lengths[indices]
        where = np.concatenate([np.arange(*self.starts[index : index + 2]) for index in indices])
        labels = self.labels[where]
        return Batch(
            tokens=self._tensor(self.tokens[where])[None],
            segments=None if self.segments is None else self._tensor(self.segments[where])[None],
            mask=None,
            labels=self._tensor(labels[labels != IGNORE]),
            rows=torch.from_numpy(indices),
            packing=Packing.of(lengths, labels != IGNORE),
        )

    def _padded(self, flat: np.ndarray, where: np.ndarray, mask: np.ndarray, value: int) -> torch.Tensor:
        result = np.full(mask.shape, value, dtype=np.int64)
        result[mask] = flat[where]
        return torch.from_numpy(result)

    @staticmethod
    def _tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))

    def fingerprint(self) -> str:
        """Sixteen hex digits of all tokens and labels."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.lengths, self.tokens, self.labels):
            digest.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Part:
    """One rank's part of one global batch; `passes` cuts it where the padding that a cut saves is worth a pass."""

    rows: Rows
    indices: np.ndarray

    def passes(self, micro_batch: int | None, pass_tokens: int) -> Iterator[tuple[Batch, bool]]:
        """Micro-batches of at most `micro_batch` rows, with `is_last`. An empty part gives one stand-in."""
        lengths = self.rows.lengths[self.indices]
        by_length = self.indices[np.argsort(-lengths, kind="stable")]
        cuts = cut_passes(np.sort(lengths)[::-1], micro_batch, pass_tokens)
        for begin, end in pairwise(cuts):
            yield self.rows.batch(by_length[begin:end]), end == cuts[-1]

    def packed_passes(self, micro_batch: int | None) -> Iterator[tuple[Batch, bool]]:
        """As `passes`, without padding: for rows with labels on their tokens."""
        if len(self.indices) == 0:
            yield from self.passes(micro_batch, 0)
            return
        by_length = self.indices[np.argsort(-self.rows.lengths[self.indices], kind="stable")]
        most = micro_batch or len(by_length)
        for begin in range(0, len(by_length), most):
            yield self.rows.packed(by_length[begin : begin + most]), begin + most >= len(by_length)


def of_labelled(values: list[int] | int, labels: list[int] | int) -> list[int]:
    """The values of a row's labelled tokens; a row that has one label itself has one value."""
    if not isinstance(labels, list):
        return [values]
    return [value for value, label in zip(values, labels, strict=True) if label != IGNORE]


def as_is(part: Part) -> Part:
    """The DataLoader's collate function: `__getitems__` has made a part already."""
    return part


def _flat(lists: Sequence) -> np.ndarray:
    arrays = [np.asarray(one, dtype=np.int32) for one in lists]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)


class Pieces:
    """Words as lists of WordPiece numbers; a word that comes again is seldom tokenized again.

    `most` words are remembered, at about 0.6 kB each: a large file to predict has new words without end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int = KNOWN_WORDS):
        self.tokenizer, self.most, self.known = tokenizer, most, {}

    def of(self, words: Sequence[str]) -> list[list[int]]:
        if len(self.known) > self.most:
            self.known.clear()  # the common words are back soon
        new = [word for word in dict.fromkeys(words) if word not in self.known]
        if new:
            found = self.tokenizer(new, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            # a word of nothing but, say, a joiner between emoji has no piece: it still is a word with a label
            self.known.update(
                (word, ids or [self.tokenizer.unk_token_id]) for word, ids in zip(new, found, strict=True)
            )
        return [self.known[word] for word in words]


def windows(pieces: Sequence[Sequence[int]], room: int) -> Iterator[tuple[int, int]]:
    """Ranges of words whose pieces fit in `room`; a word longer than that stands alone, and is cut by the caller."""
    begin, used = 0, 0
    for index, word in enumerate(pieces):
        if index > begin and used + len(word) > room:
            yield begin, index
            begin, used = index, 0
        used += len(word)
    if pieces:
        yield begin, len(pieces)


@dataclass(frozen=True)
class LabelledRows:
    """Rows and what is right for them: `gold` has the tags of each sentence, or the class of each text."""

    rows: Rows
    gold: list
    sentence_of: np.ndarray | None  # ner: (rows,) a row's sentence
    cut: int = 0  # classify: texts that are longer than a row

    def answers(self, predicted: dict[int, list[int]], names: Sequence[str]) -> list:
        """Predictions by row (numbers of labels) as names in the form of `gold`."""
        if self.sentence_of is None:
            return [names[predicted[row][0]] for row in range(len(self.rows))]
        tags = [[] for _ in self.gold]
        for row, sentence in enumerate(self.sentence_of):
            tags[sentence] += [names[label] for label in predicted[row]]
        return tags


def encode_sentences(
    sentences: Sequence[Sentence], names: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> LabelledRows:
    """Rows of at most `length` tokens with the label on each word's first piece."""
    number = {name: index for index, name in enumerate(names)}
    pieces = Pieces(tokenizer)
    begin, end, room = tokenizer.cls_token_id, tokenizer.sep_token_id, length - 2
    rows, labels, sentence_of = [], [], []
    for index, sentence in enumerate(sentences):
        words = pieces.of(sentence.words)
        for first, last in windows(words, room):
            row, marks = [begin], [IGNORE]
            for word, tag in zip(words[first:last], sentence.tags[first:last], strict=True):
                row += word[:room]
                marks += [number[tag]] + [IGNORE] * (min(len(word), room) - 1)
            rows.append(np.asarray([*row, end], dtype=np.int32))
            labels.append(np.asarray([*marks, IGNORE], dtype=np.int32))
            sentence_of.append(index)
    packed = Rows(rows, labels, None, tokenizer.pad_token_id, [begin, end])
    return LabelledRows(packed, [sentence.tags for sentence in sentences], np.asarray(sentence_of))


def encode_texts(
    texts: Sequence[Text], names: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> LabelledRows:
    """One row a text or pair, cut to `length` tokens, the longer text of a pair first."""
    number = {name: index for index, name in enumerate(names)}
    rows, segments, cut = [], [], 0
    for start in range(0, len(texts), ENCODE_AT_ONCE):
        some = texts[start : start + ENCODE_AT_ONCE]
        pairs = [text.pair for text in some] if some[0].pair is not None else None
        found = tokenizer([text.text for text in some], pairs, truncation=True, max_length=length)
        rows += [np.asarray(row, dtype=np.int32) for row in found["input_ids"]]
        cut += sum(bool(encoding.overflowing) for encoding in found.encodings or ())  # None of a tokenizer in Python
        segments += [np.asarray(row, dtype=np.int32) for row in found["token_type_ids"]] if pairs else []
    labels = [number[text.label] for text in texts]
    empty = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    packed = Rows(rows, labels, segments or None, tokenizer.pad_token_id, empty)
    return LabelledRows(packed, [text.label for text in texts], None, cut)


# --- a task's data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskData:
    """Everything that fine-tuning reads, tokenized: training rows, held-out sets by role, names of the labels."""

    train: Rows
    held_out: dict[str, LabelledRows]  # dev, and test where there is one
    names: list[str]
    fingerprint: str
    facts: str  # for the header


def load(
    task: str,
    sources: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    say: Callable[[str], None] = print,
) -> TaskData:
    """Read and tokenize the data of `ner` or `classify`; `say` tells what is left out or cut.

    Raises UserError naming file and line, RunError for a hub.
    """
    if missing := [role for role in ("train", "dev") if role not in sources]:
        raise UserError(
            f"there is no {missing[0]} data: name a file or hf:NAME with --{missing[0]}, or all with --data"
        )
    sources = _without_unlabelled_test(
        sources, TAG_COLUMNS if task == "ner" else [label_column] if label_column else LABEL_COLUMNS, say
    )
    if task == "ner":
        examples = {role: read_sentences(source, role) for role, source in sources.items()}
    else:
        examples = {role: read_texts(source, role, text_columns, label_column) for role, source in sources.items()}
    names = label_names(examples["train"])
    sets = {}
    for role, some in examples.items():
        check_labels(some, names)
        encode = encode_sentences if task == "ner" else encode_texts
        sets[role] = encode(some, names, tokenizer, length)
    if cut := [f"{some.cut:,} of {len(some.gold):,} {role}" for role, some in sets.items() if some.cut]:
        say(f"texts cut to {length} tokens: {', '.join(cut)}: a larger --max-length reads more of them")
    train = sets.pop("train").rows
    digest = hashlib.blake2b(" ".join([train.fingerprint(), *names]).encode(), digest_size=8)
    for held_out in sets.values():
        digest.update(held_out.rows.fingerprint().encode())
    counts = " + ".join(f"{len(some):,} {role}" for role, some in examples.items())
    facts = f"{counts} examples, {len(names)} labels, {train.lengths.mean():.1f} tokens a row"
    return TaskData(train, sets, names, digest.hexdigest(), facts)


def _without_unlabelled_test(
    sources: dict[str, str], label_columns: Sequence[str], say: Callable[[str], None]
) -> dict[str, str]:
    """`sources` without the test split of --data hf:NAME where that has no labels. One named with --test stays."""
    test = sources.get("test")
    if not isinstance(test, OfData) or not test.startswith("hf:") or _has_labels(test, "test", label_columns):
        return sources
    say(f"{test}: its test split has no labels and is left out: --test names another")
    return {role: source for role, source in sources.items() if role != "test"}
