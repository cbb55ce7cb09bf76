"""A large file of lines in chunks, computed by many ranks and joined in order; what is done stays done.

    PARTS/NAME-FINGERPRINT/chunk-00000000.jsonl      the answers to one chunk of lines, whole or not there
    OUTPUT                                           all chunks in order, at the end

Chunks are taken from a common counter, so a faster rank does more of them. A run that starts again finds the chunks
of the one before and computes the others. Rank 0 reads a chunk where its own file system has it (a shared folder),
and gets it over the network from a rank that has it where not.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import RunError, UserError
from common.join.process_group import Group
from common.record.report import say

CHUNKS_A_ROUND = 64  # sent between two waits for rank 0, which writes them
SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class LineFile:
    """A text file whose chunks of `chunk_lines` lines can be read one by one; memory: eight bytes a chunk."""

    path: Path
    chunk_lines: int
    offsets: array  # byte at which each chunk begins, and the file's end
    lines: int
    fingerprint: str

    @property
    def chunks(self) -> int:
        return len(self.offsets) - 1

    def chunk(self, number: int) -> list[str]:
        """The lines of one chunk, without their ends. Raises UserError where one is not UTF-8."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            data = file.read(self.offsets[number + 1] - self.offsets[number])
        first = number * self.chunk_lines
        return [_decoded(line, self.path, first + index) for index, line in enumerate(_split(data), start=1)]


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}, line {number}: this is not UTF-8 text ({error.reason})") from None


def open_lines(path: Path, chunk_lines: int) -> LineFile:
    """Find the chunks in one pass over the file. Raises UserError where it is empty, unreadable or no text."""
    offsets, digest, lines, position = array("Q", [0]), hashlib.blake2b(digest_size=8), 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                lines, position = lines + 1, position + len(line)
                if b"\0" in line:
                    raise UserError(f"--input {path}, line {lines}: this is not a text file")
                _decoded(line, path, lines)
                if lines % chunk_lines == 0:
                    offsets.append(position)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from None
    if not lines:
        raise UserError(f"--input {path} is empty")
    if offsets[-1] < position:
        offsets.append(position)
    return LineFile(path, chunk_lines, offsets, lines, digest.hexdigest())


class Parts:
    """This rank's view of the chunks that are done."""

    def __init__(self, group: Group, folder: Path, chunks: int):
        """Makes the folder. Every rank must call this; where one cannot, all raise the same UserError."""
        self.group, self.folder, self.chunks = group, folder, chunks
        with group.first_on_node("the folder of the parts"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"{folder}, where parts of the answers go, cannot be made on {socket.gethostname()}: "
                    f"{error.strerror}: name another folder with --shared-dir (or --output)"
                ) from None

    def _path(self, number: int) -> Path:
        return self.folder / f"chunk-{number:08d}.jsonl"

    def owners(self) -> dict[int, int]:
        """chunk -> the lowest rank that sees it. Every rank must call this."""
        mine = [int(path.stem.removeprefix("chunk-")) for path in self.folder.glob("chunk-*.jsonl")]
        everyone: list[list[int]] = [None] * self.group.worker.world_size
        dist.all_gather_object(everyone, mine)
        return {number: rank for rank in reversed(range(len(everyone))) for number in everyone[rank]}

    def compute(self, lines: LineFile, answer: Callable[[list[str]], list[dict]]) -> int:
        """Compute the chunks that are missing, each on one rank. Returns how many were done before. Collective."""
        done = self.owners()
        missing = [number for number in range(self.chunks) if number not in done]
        self._announce(len(done))
        said = time.monotonic()
        # who finds no chunk left waits while others compute their last, and a chunk may be large
        with self.group.each_at_its_own_pace("the chunks that other ranks still compute") as hear_of_failures:
            while (turn := self.group.store.add("predict/next", 1) - 1) < len(missing):
                hear_of_failures()
                number = missing[turn]
                first = number * lines.chunk_lines + 1
                answers = enumerate(answer(lines.chunk(number)), first)
                rows = (json.dumps({"line": line, **row}, ensure_ascii=False) for line, row in answers)
                self._write(number, "".join(f"{row}\n" for row in rows))
                if self.group.worker.is_main and time.monotonic() - said > SAY_EVERY_SECONDS:
                    said = time.monotonic()
                    say(self.group.worker, f"about {len(done) + turn + 1:,} of {self.chunks:,} chunks")
        return len(done)

    def _announce(self, done: int) -> None:
        if self.group.worker.is_main and done:
            say(self.group.worker, f"{done:,} of {self.chunks:,} chunks were done before, and are kept")

    def _write(self, number: int, text: str) -> None:
        """The chunk appears whole or not at all, whenever this process ends."""
        aside = self.folder / f".writing-{number}-{self.group.worker.rank}-{os.getpid()}"
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path(number))
        except OSError as error:
            aside.unlink(missing_ok=True)
            where = f"{self.folder} on {socket.gethostname()}"  # every rank says it, wherever it happened
            raise RunError(f"{where} cannot be written: {error.strerror}; what is done there stays") from None

    def join(self, output: Path) -> int:
        """Write all chunks in order to `output` on rank 0; it appears whole or not at all. Collective.

        Returns how many chunks came over the network.
        """
        owners, file = self.owners(), None
        aside = output.with_name(f".{output.name}.joining")
        with self.group.others_wait("rank 0, which opens --output"), _writing(output):
            if self.group.worker.is_main:
                output.parent.mkdir(parents=True, exist_ok=True)
                file = aside.open("wb")
        try:
            for start in range(0, self.chunks, CHUNKS_A_ROUND):
                problem = None
                for number in range(start, min(start + CHUNKS_A_ROUND, self.chunks)):
                    try:
                        data = self._bring(number, owners[number])
                        if file and not problem:
                            file.write(data)
                    except (OSError, RunError) as error:
                        problem = problem or error  # said after this round: the other ranks are sending it
                with self.group.others_wait("rank 0, which writes --output"), _writing(output):
                    if problem:
                        raise problem
            # a disk may take minutes for what the system has buffered
            with self.group.others_wait("rank 0, which completes --output"), _writing(output):
                if file:
                    file.flush()
                    os.fsync(file.fileno())
                    aside.replace(output)
        finally:
            if file:
                with contextlib.suppress(OSError):  # of a full disk, which has been said
                    file.close()
                aside.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)  # of a shared folder several ranks clear the same
        return sum(owner > 0 for owner in owners.values())

    def _bring(self, number: int, owner: int) -> bytes:
        """The bytes of a chunk on rank 0, from its own file system or from `owner`; on other ranks nothing of use.

        Raises RunError on rank 0 where the owner cannot read them.
        """
        rank, device = self.group.worker.rank, self.group.device
        data = b""
        if rank == owner:
            with contextlib.suppress(OSError):
                data = self._path(number).read_bytes()
        if rank == owner != 0:
            dist.send(torch.tensor([len(data)], device=device), dst=0)
            if data:
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), dst=0)
        elif rank == 0 != owner:
            size = torch.zeros(1, dtype=torch.int64, device=device)
            dist.recv(size, src=owner)
            if size:
                received = torch.empty(int(size), dtype=torch.uint8, device=device)
                dist.recv(received, src=owner)
                data = received.cpu().numpy().tobytes()
        if rank == 0 and not data:
            host = self.group.views[owner]["host"]
            raise RunError(f"{self._path(number)} on {host} cannot be read: remove it there, and start again")
        return data


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turn a full or missing disk under --output into one line."""
    try:
        yield
    except OSError as error:
        where = f"--output {output} on {socket.gethostname()}"  # every rank says it
        raise RunError(f"{where} cannot be written: {error.strerror}; the parts stay") from None
