"""A large text file, read a chunk of lines at a time."""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import is_structured, reading

TAB, BLANK, CR = b"\t", b"", b"\r"


@dataclass(frozen=True)
class LineFile:
    """A text file whose chunks of `chunk_lines` lines can be read in any order. Needs 8 bytes a chunk."""

    path: Path
    chunk_lines: int
    offsets: array  # byte at which each chunk begins, and the file's end
    lines: int
    fingerprint: str  # of the whole file
    holding: Counter[bytes]  # how many lines have a mask or a tab, or are blank; how many CR are within lines

    @property
    def chunks(self) -> int:
        return len(self.offsets) - 1

    def chunk(self, number: int) -> list[str]:
        """The lines of one chunk, without their line ends. Raises UserError where the file has changed."""
        with reading(self.path, f"--input {self.path}"), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != self.offsets[-1]:
                raise UserError(f"--input {self.path} has changed while its lines were answered: start again")
            file.seek(self.offsets[number])
            data = file.read(self.offsets[number + 1] - self.offsets[number])
        first = number * self.chunk_lines + 1
        lines = data.removesuffix(b"\n").split(b"\n")
        return [_decoded(line, self.path, first + index) for index, line in enumerate(lines)]


def open_lines(path: Path, chunk_lines: int, mask: str = "[MASK]") -> LineFile:
    """Find the chunks in one pass over the file. `mask` is the model's word for a masked one.

    Raises UserError if it is not UTF-8 text (the message names the line), is empty or cannot be read.
    """
    offsets, digest, number, position = array("Q", [0]), hashlib.blake2b(digest_size=8), 0, 0
    holding: Counter[bytes] = Counter()
    with reading(path, f"--input {path}"), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            position += len(line)
            if b"\0" in line:
                what = "this is not a text file, or one in UTF-16: convert it to UTF-8"
                raise UserError(f"--input {path}, line {number}: {what}")
            _decoded(line, path, number)
            holding[CR] += line.rstrip(b"\r\n").count(CR)
            holding.update(sign for sign in (mask.encode(), TAB) if sign in line)
            holding[BLANK] += not line.strip()
            if number % chunk_lines == 0:
                offsets.append(position)
    if not number:
        raise UserError(f"--input {path} is empty")
    if holding[CR] > (0 if number == 1 else number):
        ends = f"its lines end with CR alone, so {holding[CR] + number:,} would be read as {number:,}"
        raise UserError(f"--input {path}: {ends}: convert it with `tr '\\r' '\\n'`")
    if offsets[-1] < position:
        offsets.append(position)
    return LineFile(path, chunk_lines, offsets, number, digest.hexdigest(), holding)


def odd(lines: LineFile, task: str, mask: str = "[MASK]") -> Iterator[str]:
    """What is odd about the lines as a whole, in one line each."""
    path, holding = lines.path, lines.holding
    if is_structured(path):
        yield f"--input {path} is read as plain lines, with all its marks: give the texts alone, one a line"
    if holding[CR]:
        yield f"--input {path} has {holding[CR]:,} CR within lines, which end no line"
    if holding[BLANK] == lines.lines:
        yield f"--input {path} has blank lines alone"
    if task == "fill-mask" and not holding[mask.encode()]:
        yield f"--input {path} has no {mask} in any line, so no answer has a word"
    if task == "classify" and 0 < holding[TAB] < lines.lines:
        some = f"{holding[TAB]:,} of {lines.lines:,} lines"
        yield f"--input {path} has a tab, which separates a pair of texts, in {some} alone"


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}, line {number}: this is not UTF-8 text ({error.reason})") from None
