"""The answers to a large file, chunk by chunk: computed by many ranks and joined in order.

    PARTS/chunk-00000000.jsonl      the answers to one chunk of lines, complete or absent
    OUTPUT                          all chunks in order, at the end

Ranks take chunks from a shared counter, so a faster rank does more of them. A run that starts again keeps the chunks
of the run before and computes the others. Rank 0 reads a chunk from its own file system where that has it (a shared
folder), and otherwise gets it over the network from a rank that has it.
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from bert_ddp.predict.lines import LineFile
from common.console import say
from common.errors import RunError, UserError
from common.join.process_group import Group
from common.join.waiting import Every

CHUNKS_A_ROUND = 64  # sent between two waits for rank 0, which writes them
SAY_EVERY_SECONDS = 10.0


class Parts:
    """This rank's view of the chunks that are done."""

    def __init__(self, group: Group, folder: Path, chunks: int):
        """Make the folder. Every rank must call this; where one cannot make it, all raise the same UserError."""
        self.group, self.folder, self.chunks = group, folder, chunks
        with group.first_on_node("the folder of the parts"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"{folder}, where parts of the answers go, cannot be made on {socket.gethostname()}: "
                    f"{error.strerror}: name another folder with --shared-dir (or --output)"
                ) from None

    def owners(self) -> dict[int, int]:
        """chunk -> the lowest rank that sees it. Every rank must call this."""
        mine = [int(path.stem.removeprefix("chunk-")) for path in self.folder.glob("chunk-*.jsonl")]
        everyone: list[Any] = [None] * self.group.worker.world_size
        dist.all_gather_object(everyone, mine)
        return {number: rank for rank in reversed(range(len(everyone))) for number in everyone[rank]}

    def compute(self, lines: LineFile, answer: Callable[[list[str]], list[dict]]) -> int:
        """Compute the chunks that are missing, each on one rank. Returns how many an earlier run has done.

        Every rank must call this.
        """
        done, is_main = self.owners(), self.group.worker.is_main
        missing = [number for number in range(self.chunks) if number not in done]
        if is_main and done:
            say(f"{len(done):,} of {self.chunks:,} chunks were done before, and are kept", rank=0)
        is_time_to_speak = Every(SAY_EVERY_SECONDS)
        # a rank that finds no chunk left waits while others compute their last, and a chunk may be large
        with self.group.run_independently("the chunks that other ranks still compute") as raise_failure:
            while (turn := self.group.store.add("predict/next", 1) - 1) < len(missing):
                raise_failure()
                number = missing[turn]
                first = number * lines.chunk_lines + 1
                answers = enumerate(answer(lines.chunk(number)), first)
                rows = (json.dumps({"line": line, **row}, ensure_ascii=False) for line, row in answers)
                self._write(number, "".join(f"{row}\n" for row in rows))
                if is_main and is_time_to_speak():
                    say(f"about {len(done) + turn + 1:,} of {self.chunks:,} chunks", rank=0)
        return len(done)

    def join(self, output: Path) -> int:
        """Write all chunks in order to `output` on rank 0, completely or not at all, and remove the parts.

        Returns how many chunks came over the network. Every rank must call this.
        """
        owners, is_main = self.owners(), self.group.worker.is_main
        aside = output.with_name(f".{output.name}.joining")
        file: BinaryIO | None = None
        with self._rank_0_writes(output):
            if is_main:
                output.parent.mkdir(parents=True, exist_ok=True)
                file = aside.open("wb")
        try:
            for start in range(0, self.chunks, CHUNKS_A_ROUND):
                numbers = range(start, min(start + CHUNKS_A_ROUND, self.chunks))
                problem = self._copy(file, {number: owners[number] for number in numbers})
                with self._rank_0_writes(output):
                    if problem:
                        raise problem
            with self._rank_0_writes(output):  # writing the system's buffers to disk may take minutes
                if file:
                    file.flush()
                    os.fsync(file.fileno())
                    aside.replace(output)
        finally:
            if file:
                with contextlib.suppress(OSError):  # of a full disk, which has been reported
                    file.close()
                aside.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)  # several ranks clear the same shared folder
        return sum(owner > 0 for owner in owners.values())

    def _path(self, number: int) -> Path:
        return self.folder / f"chunk-{number:08d}.jsonl"

    def _write(self, number: int, text: str) -> None:
        """Write a chunk completely or not at all, even if this process is killed."""
        aside = self.folder / f".writing-{number}-{self.group.worker.rank}-{os.getpid()}"
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path(number))
        except OSError as error:
            aside.unlink(missing_ok=True)
            where = f"{self.folder} on {socket.gethostname()}"  # every rank prints the message
            raise RunError(f"{where} cannot be written: {error.strerror}; what is done there is kept") from None

    def _copy(self, file: BinaryIO | None, owners: dict[int, int]) -> OSError | RunError | None:
        """Copy these chunks to rank 0's `file`. Returns the first error: the other ranks still send.

        Every rank must call this.
        """
        problem: OSError | RunError | None = None
        for number, owner in owners.items():
            data = self._bring(number, owner)
            try:
                if file and not problem:
                    if not data:
                        host = self.group.views[owner]["host"]
                        raise RunError(
                            f"{self._path(number)} on {host} cannot be read: remove it there, and start again"
                        )
                    file.write(data)
            except (OSError, RunError) as error:
                problem = error
        return problem

    def _bring(self, number: int, owner: int) -> bytes:
        """The bytes of a chunk on rank 0, from its own file system or from the rank `owner`; none if that cannot read
        them. Rank 0 and the owner must call this."""
        rank, data = self.group.worker.rank, b""
        if rank == owner:
            with contextlib.suppress(OSError):
                data = self._path(number).read_bytes()
        if rank == owner != 0:
            dist.send_object_list([data], dst=0, device=self.group.device)
        elif rank == 0 != owner:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=owner, device=self.group.device)
            data = received[0]
        return data

    @contextlib.contextmanager
    def _rank_0_writes(self, output: Path) -> Iterator[None]:
        """The other ranks wait until rank 0 has run the body. An OSError there becomes a RunError on every rank."""
        with self.group.others_wait("rank 0, which writes --output"):
            try:
                yield
            except OSError as error:
                where = f"--output {output} on {socket.gethostname()}"  # every rank prints the message
                raise RunError(f"{where} cannot be written: {error.strerror}; the parts are kept") from None
