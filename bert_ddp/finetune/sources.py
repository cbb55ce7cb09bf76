"""Where the labelled examples come from, and reading them.

A *source* is a file, or `hf:name,config` (a data set on the hub, or a folder that `datasets` reads):

    ner        .conll .txt .bio .iob   one "word label" a line, blank lines between sentences; or .json .jsonl
    classify   .csv .tsv .json .jsonl  a column of text, or two for pairs, and a column of labels
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bert_ddp.finetune import files, hub, whole
from bert_ddp.finetune.examples import Sentence, Text
from common.errors import UserError
from common.files import reading

WORD_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("ner_tags", "tags", "labels")
TEXT_COLUMNS = ("text", "sentence", "sentence1")
LABEL_COLUMNS = ("label", "labels", "class")

Example = TypeVar("Example", Sentence, Text)


@dataclass(frozen=True)
class DataOptions:
    """Which data to read, as the flags say."""

    task: str  # ner or classify
    data: str | None = None  # a folder with files named train, dev and test, or hf:NAME
    named: Mapping[str, str | None] = field(default_factory=dict)  # role -> the source that a flag of its own names
    text_columns: Sequence[str] | None = None  # one name, or two for pairs; None finds them
    label_column: str | None = None  # None finds it

    @property
    def label_columns(self) -> Sequence[str]:
        """Names that the column of labels may have; the first that is there counts."""
        if self.task == "ner":
            return TAG_COLUMNS
        return [self.label_column] if self.label_column else LABEL_COLUMNS


def data_options(args: Namespace) -> DataOptions:
    """What the flags of fine-tuning say."""
    named = {"train": args.train, "dev": args.dev, "test": args.test}
    return DataOptions(args.task, args.data, named, args.text_column, args.label_column)


def find_sources(options: DataOptions) -> dict[str, str]:
    """The source of each role (train, dev, test): the named one, or else one in the folder or data set `data`.

    A role without a source is left out. Raises UserError if `data` is neither a folder nor a data set, RunError where
    the hub does not answer.
    """
    data, found = options.data, {}
    if data and hub.is_hub(data):
        found = dict.fromkeys(hub.SPLITS, data)
        if not options.named.get("test") and not hub.has_split(data, "test"):
            del found["test"]
    elif data:
        with reading(Path(data), f"--data {data}"):
            is_folder = Path(data).is_dir()
        if not is_folder:
            raise UserError(
                f"--data {data}: there is no such folder: give one with train, dev and test files, or hf:NAME"
            )
        for role in hub.SPLITS:
            if paths := _of_role(data, role, options.task):
                found[role] = str(paths[0])
    return found | {role: source for role, source in options.named.items() if source}


def _of_role(data: str, role: str, task: str) -> list[Path]:
    """The files of a role in a folder, first those of the kinds that the task reads."""
    own, other = (files.CONLL, files.TABLES) if task == "ner" else (files.TABLES, files.CONLL)
    known = (*own, *files.JSON_LINES, *other)
    paths = [path for stem in hub.SPLITS[role] for path in Path(data).glob(f"{stem}.*") if path.suffix.lower() in known]
    return sorted(paths, key=lambda path: (path.suffix.lower() in other, path))


def odd_files(options: DataOptions, sources: Mapping[str, str]) -> Iterator[str]:
    """What is odd about the files of the roles, in one line each."""
    for role, source in sources.items():
        files_ = _of_role(options.data, role, options.task) if options.data and not hub.is_hub(options.data) else []
        if len(files_) > 1 and str(files_[0]) == source:
            yield f"{source} is the {role} data, and {files_[1]} is not read: --{role} names another"


def odd_columns(options: DataOptions, sources: Mapping[str, str]) -> Iterator[str]:
    """A line for a column of text that is not read."""
    if options.task == "ner" or options.text_columns or Path(sources["train"]).is_fifo():  # a pipe is read once only
        return
    place, row = next(_records(sources["train"], "train"))
    read = _text_columns(row, place)
    names = {*read, next((name for name in options.label_columns if name in row), None)}
    for name in [name for name, value in row.items() if isinstance(value, str) and len(value.split()) > 2]:
        if name not in names:
            yield f"{place}: column {name} holds text too, and is not read: --text-column {read[0]},{name} reads both"


def has_unlabelled_test(options: DataOptions, sources: Mapping[str, str]) -> bool:
    """True if the test split of --data hf:NAME has no labels. A test set that --test names must have them."""
    test = sources.get("test")
    if test is None or options.named.get("test") or not hub.is_hub(test):
        return False
    return not hub.has_labels(test, "test", options.label_columns)


def read_sentences(source: str, role: str) -> list[Sentence]:
    """Labelled sentences for `--task ner`. Raises UserError that names file and line where one is wrong."""
    path = Path(source)
    if hub.is_hub(source):
        examples = [_sentence(row, place) for place, row in hub.read_records(source, role)]
    elif path.suffix.lower() in files.JSON_LINES:
        examples = [_sentence(row, place) for place, row in files.read_records(path)]
    elif path.suffix.lower() in files.TABLES:
        raise UserError(f"{source}: --task ner reads CoNLL files (.conll, .txt, .bio, .iob), .jsonl, and hf:NAME")
    else:
        examples = list(files.read_conll(path))
    if examples and not any(sentence.words for sentence in examples):
        raise UserError(f"{source} holds no labelled word ({role}): its sentences are empty: is it the right file?")
    whole.check_sentences(_not_empty(examples, source), source, role)
    return examples


def read_texts(source: str, role: str, text_columns: Sequence[str] | None, label_column: str | None) -> list[Text]:
    """Labelled texts for `--task classify`. `text_columns` are one name, or two for pairs; None finds them.

    Raises UserError that names file and line where one is wrong.
    """
    texts, columns, label = [], text_columns, label_column
    for place, row in _records(source, role):
        columns = columns or _text_columns(row, place)
        label = label or _column(row, LABEL_COLUMNS, place, "--label-column")
        for name, flag in [*((name, "--text-column") for name in columns), (label, "--label-column")]:
            _column(row, (name,), place, flag)
        values = [_as_text(row[name], place, name) for name in columns]
        texts.append(Text(values[0], values[1] if len(values) > 1 else None, _class(row[label], place, label), place))
    whole.check_texts(_not_empty(texts, source), source, role, columns or (), label or "")
    return texts


def _records(source: str, role: str) -> Iterator[tuple[str, dict]]:
    if hub.is_hub(source):
        return hub.read_records(source, role)
    if Path(source).suffix.lower() not in (*files.TABLES, *files.JSON_LINES):
        raise UserError(f"{source}: --task classify reads .csv, .tsv, .json and .jsonl, and hf:NAME")
    return files.read_records(Path(source))


def _sentence(row: dict, place: str) -> Sentence:
    words = row[_column(row, WORD_COLUMNS, place, "tokens")]
    tags = row[_column(row, TAG_COLUMNS, place, "tags")]
    if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
        raise UserError(f"{place}: words and tags are not two lists of one length")
    if wrong := [word for word in words if not isinstance(word, str | int | float) or isinstance(word, bool)]:
        raise UserError(f"{place}: the word {wrong[0]!r} is not text")
    checked = [files.checked_tag(str(tag), place) for tag in tags]
    return Sentence([str(word) for word in words], checked, [place] * len(words))


def _text_columns(row: dict, place: str) -> list[str]:
    first = _column(row, TEXT_COLUMNS, place, "--text-column")
    return [first, "sentence2"] if first == "sentence1" and "sentence2" in row else [first]


def _column(row: dict, names: Sequence[str], place: str, flag: str) -> str:
    """The first of `names` that the record has. Raises UserError, which names the flag where `flag` is one."""
    found = next((name for name in names if name in row), None)
    if found is None:
        has = ", ".join(map(str, row))
        fix = f": the first line of a table names its columns; name yours with {flag}" if flag.startswith("--") else ""
        fix = files.delimiters(list(row)) or fix
        raise UserError(f"{place}: there is no column {' or '.join(names)} among {has}{fix}")
    return found


def _class(value: object, place: str, column: str) -> str:
    """A class's name. A number with a fraction is none, and neither is a list."""
    name = str(value).strip()
    if value is None or not name or value != value:  # NaN
        raise UserError(f"{place}: the label is missing (column {column})")
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not value.is_integer()):
        raise UserError(f"{place}: the label {value!r} is not one class (column {column}): give text or a whole number")
    return name


def _as_text(value: object, place: str, column: str) -> str:
    if not isinstance(value, str):
        fix = ""
        if value is None and hub.is_hub(place):
            fix = (
                ": in a .csv, `datasets` takes words such as None, NA and null for missing values: name the file itself"
            )
        raise UserError(f"{place}: column {column} is {value!r}, which is not text{fix}")
    return value


def _not_empty(examples: list[Example], source: str) -> list[Example]:
    if not examples:
        raise UserError(f"{source} holds no examples: is it the right file?")
    return examples
