"""A large text file, read a chunk of lines at a time."""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError


@dataclass(frozen=True)
class LineFile:
    """A text file whose chunks of `chunk_lines` lines can be read in any order. Needs 8 bytes a chunk."""

    path: Path
    chunk_lines: int
    offsets: array  # byte at which each chunk begins, and the file's end
    lines: int
    fingerprint: str  # of the whole file

    @property
    def chunks(self) -> int:
        return len(self.offsets) - 1

    def chunk(self, number: int) -> list[str]:
        """The lines of one chunk, without their line ends."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            data = file.read(self.offsets[number + 1] - self.offsets[number])
        first = number * self.chunk_lines + 1
        lines = data.removesuffix(b"\n").split(b"\n")
        return [_decoded(line, self.path, first + index) for index, line in enumerate(lines)]


def open_lines(path: Path, chunk_lines: int) -> LineFile:
    """Find the chunks in one pass over the file.

    Raises UserError if it is not UTF-8 text (the message names the line), is empty or cannot be read.
    """
    offsets, digest, number, position = array("Q", [0]), hashlib.blake2b(digest_size=8), 0, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                position += len(line)
                if b"\0" in line:
                    raise UserError(f"--input {path}, line {number}: this is not a text file")
                _decoded(line, path, number)
                if number % chunk_lines == 0:
                    offsets.append(position)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from None
    if not number:
        raise UserError(f"--input {path} is empty")
    if offsets[-1] < position:
        offsets.append(position)
    return LineFile(path, chunk_lines, offsets, number, digest.hexdigest())


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}, line {number}: this is not UTF-8 text ({error.reason})") from None
