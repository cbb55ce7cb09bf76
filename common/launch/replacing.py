"""Workers that have died are replaced, from the supervisor that has imported their code already (--elastic)."""

import time
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

from common.console import say
from common.launch.layout import Worker

SOON_SECONDS = 30.0  # after its start: a worker that ends so soon
MOST_SOON = 3  # times in a row is not replaced any more
MOST_CHARACTERS = 256  # of an address


class Board:
    """Memory that a supervisor shares with its workers."""

    def __init__(self, context: BaseContext, workers: list[Worker]):
        self.first = workers[0].rank
        self._leader: Any = context.Array("c", MOST_CHARACTERS)
        self._ended = context.Array("b", len(workers))  # by itself: with an error that it has explained

    @property
    def leader(self) -> str:
        """Where the rank that leads the members can be reached; empty before all have joined."""
        return self._leader.value.decode()

    @leader.setter
    def leader(self, address: str) -> None:
        self._leader.value = address.encode()

    def note_end(self, worker: Worker) -> None:
        """This worker ends because the run does: it is not to be replaced."""
        self._ended[self._index(worker)] = 1

    def has_ended(self, worker: Worker) -> bool:
        return bool(self._ended[self._index(worker)])

    def _index(self, worker: Worker) -> int:
        rank = worker.membership.original.rank if worker.membership else worker.rank
        return rank - self.first


class Replacing:
    """Decides which workers are replaced."""

    def __init__(self, board: Board):
        self.board = board
        self.started: dict[int, float] = {}  # by rank
        self.soon: dict[int, int] = {}  # by rank: how often it has ended soon after its start
        self.left_out: set[int] = set()  # ranks that are not started again, while the others of the node go on

    def note_start(self, worker: Worker) -> Worker:
        """The worker, with the board."""
        self.started[worker.rank] = time.monotonic()
        return replace(worker, board=self.board)

    def successor(self, worker: Worker, exit_code: int, cause: str) -> Worker | None:
        """The worker to start in place of one that has ended; None where it ended by itself, or does so each time."""
        if not exit_code or self.board.has_ended(worker):
            return None
        is_soon = time.monotonic() - self.started[worker.rank] < SOON_SECONDS
        self.soon[worker.rank] = self.soon.get(worker.rank, 0) + 1 if is_soon else 0
        if self.soon[worker.rank] >= MOST_SOON:
            often = f"{MOST_SOON} times within {SOON_SECONDS:.0f} s of its start"
            say(f"rank {worker.rank} has ended {often}: it is left out")
            self.left_out.add(worker.rank)
            return None
        say(f"rank {worker.rank} {cause}: starting another process for it")
        return replace(worker, predecessor=cause)
