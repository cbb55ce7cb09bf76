"""Files of others: what cannot be read, or is not the file itself, is said in one line."""

import codecs
import contextlib
import json
import os
import re
import select
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError

PIPE_SECONDS = 30.0  # for somebody to write into a pipe
STRUCTURED = (".json", ".jsonl", ".csv", ".tsv", ".html", ".xml")
MARKUP = re.compile(rb'\s*(<!doctype|<html|<\?xml|\{\s*"|\[\s*\{)')
BEGINNING = 256  # bytes of a file


@contextlib.contextmanager
def reading(path: Path, name: str, may_be_pipe: bool = False, may_be_packed: bool = False) -> Iterator[None]:
    """The body reads a file of others, or looks for it. Raises UserError where the system does not let it, and where
    the file is only a pointer of git-lfs, or packed: it would read as text, or as damaged; and for a pipe, which can be
    read once only, and not at all while nobody writes into it. `name` is the file with its flag."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # since Python 3.14, `exists` and its like hide why a path cannot be looked at
        refuse_stand_in(path, name, may_be_packed)
        with contextlib.ExitStack() as opened:
            if path.is_fifo():
                if not may_be_pipe:
                    raise UserError(f"{name} is a pipe: give a file, which can be read again")
                opened.enter_context(_written(path, name))
            yield
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def _written(pipe: Path, name: str) -> Iterator[None]:
    """Wait until somebody writes into the pipe, which is open in the body. Raises UserError where nobody does."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
            raise UserError(f"{name} is a pipe into which nobody has written for {PIPE_SECONDS:.0f} s: give a file")
        yield
    finally:
        os.close(descriptor)


def refuse_stand_in(path: Path, name: str, may_be_packed: bool = False) -> None:
    """Raise UserError for a pointer of git-lfs, and for a file that is packed; OSError where it cannot be read."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        first = file.read(20)
    if first.startswith(b"version https://git-"):
        raise UserError(f"{name} is a git-lfs pointer and not the file itself: fetch it with `git lfs pull`")
    if first.startswith(b"\x1f\x8b\x08") and not may_be_packed:
        raise UserError(f"{name} is packed with gzip: unpack it with `gunzip`")


def is_structured(path: Path) -> bool:
    """Whether a file is JSON, a table, HTML or XML by its name, or JSON, HTML or XML by how it begins."""
    if path.suffix.lower() in STRUCTURED:
        return True
    with path.open("rb") as file:
        return bool(MARKUP.match(file.read(BEGINNING).removeprefix(codecs.BOM_UTF8).lower()))


def parse_json(text: str) -> Any:
    """What `text` says in JSON. Raises ValueError for what is none, and where an object has a name twice: of its two
    values `json` alone would take the last one. Raises RecursionError where it is too deep."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"an object has {next(name for name in names if names.count(name) > 1)!r} twice")
        return found

    return json.loads(text, object_pairs_hook=once)


def is_locked(file: int | IO[str]) -> bool:
    """Lock this file, for as long as it is open. False where another process has locked it; True where the file system
    knows no locks."""
    import fcntl  # which Windows does not have

    with contextlib.suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
