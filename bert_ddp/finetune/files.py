"""Files of labelled examples: CoNLL, CSV, TSV and JSON lines.

Each reader raises UserError that names file and line where something is wrong.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_ddp.finetune.examples import Sentence
from common.errors import UserError
from common.files import parse_json, reading

CONLL = (".conll", ".txt", ".bio", ".iob")
TABLES = (".csv", ".tsv")
JSON_LINES = (".json", ".jsonl")
LONGEST_FIELD = 1 << 30  # characters; csv's own limit is that of a short document
ONE_A_LINE = ": write one object for each line, as `jq -c '.[]'` does with an array"
MARK = "\ufeff"  # with which some programs begin a file
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # JSON writes some characters as two halves
HALF_READ = re.compile("[\ud800-\udfff]")
CR_ENDS = r"there is a CR within the line: line ends must be LF or CR LF: convert them with `tr '\r' '\n'`"


def read_conll(path: Path) -> Iterator[Sentence]:
    """Sentences of a CoNLL file: the word in the first column, its label in the last, blank lines between sentences.

    Tabs separate the columns of a line that has one, spaces those of other lines. `-DOCSTART-` lines, as CoNLL-2003
    has them, are left out. Raises UserError for a line without a label, or with one that is not an entity tag.
    """
    lines: list[tuple[str, str, str, int]] = []  # word, tag, place, columns
    for number, line in _lines(path):
        if "\r" in line:
            raise UserError(f"{path}, line {number}: {CR_ENDS}")
        # Other spaces of Unicode are within words, such as the one in 10 000.
        fields = [field.strip(" ") for field in line.split("\t")] if "\t" in line else line.split(" ")
        fields = fields if "\t" in line else [field for field in fields if field]
        if not line.strip() or fields[0] == "-DOCSTART-":
            if lines:
                yield Sentence(*map(list, zip(*lines, strict=True)))
                lines = []
            continue
        place = f"{path}, line {number}"
        if not fields[0].strip():
            raise UserError(f"{place}: the label {fields[-1]!r} has no word: write a word and its label")
        if len(fields) < 2 or not fields[-1]:
            raise UserError(
                f"{place}: {fields[0]!r} has no label: write a word and its label, such as `Berlin B-location`"
            )
        lines.append((fields[0], checked_tag(fields[-1], place), place, len(fields)))
    if lines:
        yield Sentence(*map(list, zip(*lines, strict=True)))


def checked_tag(tag: str, place: str) -> str:
    """The tag itself. Raises UserError if it is not an entity tag."""
    if tag != "O" and not (tag[:2] in ("B-", "I-", "E-", "S-") and len(tag) > 2):
        raise UserError(f"{place}: the label {tag!r} is not an entity tag: use O, B-TYPE or I-TYPE (or E-, S-)")
    return tag


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, record) of each row of a .csv or .tsv file, or of each line of a .json or .jsonl file."""
    return _records_of_table(path) if path.suffix.lower() in TABLES else _records_of_json_lines(path)


def _records_of_table(path: Path) -> Iterator[tuple[str, dict]]:
    lines = (line + "\n" for _, line in _lines(path))
    csv.field_size_limit(LONGEST_FIELD)
    if path.suffix.lower() == ".tsv":  # as GLUE's files are: a quote is a character like any other
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.DictReader(lines, strict=True)
    begins = 1  # the line before a row's first one
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        names = [name for name in reader.fieldnames if name]
        if path.suffix.lower() == ".tsv" and names and all(name[:1] == name[-1:] == '"' for name in names):
            raise UserError(f"{path}, line 1: a quote is a character like any other in a .tsv: save it without quotes")
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{path}, line 1: two columns are called {twice[0]!r}: rename one")
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                more = "more" if None in row else "fewer"
                raise UserError(f"{place}: {more} fields than the header's {len(reader.fieldnames)}{delimiters(names)}")
            if sorted(value.strip().lstrip(MARK) for value in row.values()) == sorted(reader.fieldnames):
                raise UserError(f"{place}: the header once more: remove it, if two files were joined")
            yield place, row
            begins = reader.line_num
    except csv.Error as error:
        line, reason = reader.reader.line_num, str(error)
        if "new-line" in reason:
            reason = CR_ENDS
        elif "unexpected end" in reason:  # of the row that begins on the next line
            line, reason = begins + 1, "a quote that begins in this row is never closed"
        elif "expected after" in reason:
            reason = "after the closing quote of a text there must be a comma, and a quote within it is written twice"
        raise UserError(f"{path}, line {line}: {reason}") from None


def _records_of_json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            reason = CR_ENDS if "\r" in line else f"this is not JSON: {error}{_fix(line) if number == 1 else ''}"
            raise UserError(f"{path}, line {number}: {reason}") from None
        if not isinstance(row, dict):
            fix = (
                ": it is a text that holds JSON: unpack it with `jq -c fromjson`"
                if isinstance(row, str)
                else ONE_A_LINE
            )
            raise UserError(f"{path}, line {number}: this is not a JSON object{fix}")
        if HALF.search(line) and HALF_READ.search(json.dumps(row, ensure_ascii=False)):
            raise UserError(f"{path}, line {number}: half a character, such as of an emoji that was cut: complete it")
        yield f"{path}, line {number}", row


def delimiters(names: Sequence[str]) -> str:
    """What to do with a table that has one column, whose name holds what may separate others."""
    is_other = len(names) == 1 and any(mark in names[0] for mark in ",;\t|")
    return ": a .csv has commas between its columns, a .tsv tabs: convert it" * is_other


def _fix(first: str) -> str:
    """What to do with a file whose first line begins like this, and is no object."""
    return ONE_A_LINE if first.strip() in "[{" or first.startswith("[") else ": it is HTML" * first.startswith("<")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of a UTF-8 text file. Raises UserError where it is not one."""
    number = 0
    try:
        with reading(path, str(path), may_be_pipe=True), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise UserError(
                        f"{path}, line {number}: this is not a text file, or one in UTF-16: convert it to UTF-8"
                    )
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: this is not UTF-8 text ({error.reason}): convert it first") from None
