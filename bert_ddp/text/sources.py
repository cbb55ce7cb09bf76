"""Where text comes from: files, folders and globs, data sets by name, and Python's own prose.

A *document* is a block of lines between blank lines. Text is read in UTF-8, line by line, in bounded memory.
"""

import codecs
import filecmp
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.errors import UserError
from common.files import is_structured, reading

PYTHON_DOCS = "python-docs"
HDF5_SUFFIXES = (".hdf5", ".h5")
BEGINNING = 4096  # bytes of a file
LONGEST_DOCUMENT = 1 << 20  # characters; a longer block is cut, so that memory stays bounded
ROWS_TO_LOOK_AT = 1000
LINE_END = re.compile(r"\r\n|\r|\n")
LONE_CR = re.compile(r"\r(?!\r*(?:\n|$))")  # ends a line in files of old Macs


def find_files(corpus: Iterable[str], flag: str = "--corpus") -> list[Path]:
    """The files that the names given to a flag stand for, in a fixed order; data sets by name (`hf:...`) are not files.

    A folder stands for all .txt, .hdf5 and .h5 files below it, in capitals too. Raises UserError if a name matches no
    file.
    """
    files: list[Path] = []
    for name in corpus:
        if is_no_file(name):
            continue
        path = Path(name)
        with reading(path, f"{flag} {name}"):
            if path.is_dir():
                found = list(_files_below(path))
            elif path.is_file():
                found = [path]
            else:
                matches = glob.glob(name, recursive=True)  # noqa: PTH207
                found = [Path(match) for match in matches if Path(match).is_file()]
        if not found:
            raise UserError(
                f"{flag} {name} names no file: give a file, a folder with .txt or .hdf5 files below it, a glob in "
                f"quotes, hf:NAME,CONFIG, or {PYTHON_DOCS}, which needs no download"
            )
        files += sorted(found)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """The .txt, .hdf5 and .h5 files below a folder, also below links to folders. Raises OSError for a folder that
    cannot be read. A link to a file that is not there is returned: whoever reads it says so."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()  # a link leads back
            continue
        seen.add(real)
        files = [Path(place, name) for name in names if Path(name).suffix.lower() in (".txt", *HDF5_SUFFIXES)]
        yield from (file for file in files if file.is_file() or file.is_symlink())


def odd_files(corpus: Iterable[Path], held_out: Iterable[Path]) -> Iterator[str]:
    """What is odd about the files as a whole, in one line each."""
    corpus, held_out = list(corpus), list(held_out)
    if both := next(_alike(corpus, held_out), None):
        yield f"{both} is trained on and held out: its evaluation says nothing about other text"
    if twice := [file for file in corpus if corpus.count(file) > 1]:
        yield f"{twice[0]} is named twice: what is held out of it is trained on too"
    elif copy := next(_alike(corpus), None):
        yield f"{copy} is in --corpus too: what is held out of the one is trained on in the other"
    if structured := [file for file in (*corpus, *held_out) if is_structured(file)]:
        yield f"{structured[0]} is read as plain text, with all its marks: hf:FOLDER reads a column `text`"


def _alike(files: Iterable[Path], others: Iterable[Path] | None = None) -> Iterator[str]:
    """Each of `files` that is one of the others, or has the same content, in words. Without others, those before it."""
    known: dict[tuple[int, int], list[Path]] = {}  # by size and first bytes, so that few are compared

    def group(file: Path) -> list[Path]:
        with file.open("rb") as opened:
            return known.setdefault((file.stat().st_size, hash(opened.read(BEGINNING))), [])

    for other in others or ():
        group(other).append(other)
    for file in files:
        same = group(file)
        if twin := next((one for one in same if one == file or filecmp.cmp(one, file, shallow=False)), None):
            yield str(file) if file == twin else f"{file}, which has the content of {twin},"
        elif others is None:
            same.append(file)


def data_set_files(corpus: Iterable[str]) -> list[Path]:
    """The files of data sets (`hf:...`) that are local folders, in a fixed order; one on the hub has no files here."""
    folders = [Path(_data_set(name)[0]) for name in corpus if name.startswith("hf:")]
    return [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*")) if file.is_file()]


def _data_set(name: str) -> tuple[str, str | None, str]:
    """(path, configuration, split) of `hf:NAME[,CONFIG[,SPLIT]]`."""
    path, *rest = name.removeprefix("hf:").split(",")
    config, split = (*rest, None, None)[:2]
    return path, config or None, split or "train"


def is_no_file(name: str) -> bool:
    """True for a name that is not a path, such as `hf:...`."""
    return name.startswith("hf:") or name == PYTHON_DOCS


def is_hdf5(files: list[Path]) -> bool:
    """True if these are HDF5 shards and not text. Raises UserError for a mixture."""
    shards = [file for file in files if file.suffix.lower() in HDF5_SUFFIXES]
    if shards and len(shards) < len(files):
        other = next(file for file in files if file.suffix.lower() not in HDF5_SUFFIXES)
        raise UserError(f"--corpus names both HDF5 shards ({shards[0]}) and text ({other}): give one kind")
    return bool(shards)


def documents(corpus: Iterable[str], advance: Callable[[int], object] = lambda size: None) -> Iterator[str]:
    """Every document of every source, in order. Calls `advance(bytes)` as it reads.

    Raises UserError for what is not text, naming file and line.
    """
    for name in corpus:
        if name == PYTHON_DOCS:
            yield from _blocks(_python_docs())
        elif name.startswith("hf:"):
            yield from _from_datasets(name)
        else:
            for file in find_files([name]):
                yield from _blocks(_lines(file, advance))


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """The documents of these lines; one longer than the limit is cut."""
    block: list[str] = []
    size = 0
    for line in lines:
        text = line.strip()
        if text:
            block.append(text)
            size += len(text)
        if block and (not text or size > LONGEST_DOCUMENT):
            yield "\n".join(block)
            block, size = [], 0
    if block:
        yield "\n".join(block)


def _lines(file: Path, advance: Callable[[int], object]) -> Iterator[str]:
    """The lines of a file; one that is longer than the limit comes in several pieces."""
    wrong = f"--corpus {file}, line {{}} is not UTF-8 text: convert it, or leave it out"
    # The limit may cut a character in two: the decoder keeps its first part.
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(file, f"--corpus {file}"), file.open("rb") as stream:
        number = 1
        while piece := stream.readline(LONGEST_DOCUMENT):
            advance(len(piece))
            try:
                text = decoder.decode(piece)
            except UnicodeDecodeError:
                raise UserError(wrong.format(number)) from None
            if "\0" in text:
                raise UserError(wrong.format(number))
            yield from LONE_CR.split(text)
            number += piece.endswith(b"\n")
        if decoder.getstate()[0]:
            raise UserError(wrong.format(number))


def _python_docs() -> Iterator[str]:
    """Half a megabyte of English that comes with Python: what `help("topics")` shows."""
    from pydoc_data.topics import topics

    for topic in topics.values():
        yield from topic.splitlines()
        yield ""


def _from_datasets(name: str) -> Iterator[str]:
    """The documents of `hf:NAME[,CONFIG[,SPLIT]]`, from the hub or a folder. Rows are lines if some of the first 1,000
    are blank, as in wikitext, and none of these has several lines; otherwise they are whole documents."""
    import datasets  # here, because the flags' defaults come from this file, and --help must not wait for it

    path, config, split = _data_set(name)
    try:
        rows = datasets.load_dataset(path, config, split=split)  # on disk; read several times
    except Exception as error:  # the network, the hub and its client raise many kinds
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        fix = "put files such as train.jsonl into it" if Path(path).is_dir() else "check the name and the network"
        raise UserError(f"--corpus {name} could not be loaded ({reason[:200]}): {fix}, or give files") from None
    if "text" not in rows.column_names:
        raise UserError(f"--corpus {name} has no column `text`, only {', '.join(rows.column_names)}: give another one")
    kind = getattr(rows.features["text"], "dtype", "of several values")
    if kind not in ("string", "large_string", "string_view"):
        raise UserError(f"--corpus {name} has a column `text` that is {kind}, not string: give another data set")
    # A row without a value (null) has no text, and does not mean that rows are lines.
    first = [text for text in rows[:ROWS_TO_LOOK_AT]["text"] if text is not None]
    most_lines = max((sum(bool(line.strip()) for line in _lines_of(text)) for text in first), default=0)
    if most_lines < 2 and not all(text.strip() for text in first):
        yield from _blocks(line for row in rows for line in _lines_of(row["text"] or ""))
    else:
        for row in rows:
            yield from _blocks(_lines_of(row["text"] or ""))


def _lines_of(text: str) -> list[str]:
    """As `splitlines`, which would also split at some of Unicode's spaces; a blank text is one blank line."""
    *lines, last = LINE_END.split(text)
    return [*lines, last] if last or not lines else lines
