"""What a supervisor and its workers tell each other; and workers that have died are replaced, from the supervisor that
has imported their code already (--elastic)."""

import time
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

from common.console import say
from common.launch.layout import Worker

SOON_SECONDS = 30.0  # after its start: a worker that ends so soon
MOST_SOON = 3  # times in a row is not replaced any more
MOST_CHARACTERS = 256  # of an address


STARTS, WAITS, WORKS, FINISHES, ENDED, FAILED = range(6)  # what a worker does


class Board:
    """Memory that a supervisor shares with its workers. Without locks: a worker that is killed could hold one."""

    def __init__(self, context: BaseContext, workers: list[Worker]):
        self.first = workers[0].local_rank
        self._leader: Any = context.RawArray("c", MOST_CHARACTERS)
        self._signal: Any = context.RawValue("i", 0)
        self._doing = context.RawArray("b", len(workers))
        self._ranks = context.RawArray("i", [worker.rank for worker in workers])

    @property
    def leader(self) -> str:
        """Where the rank that leads the members can be reached; empty before all have joined (--elastic)."""
        return self._leader.value.decode()

    @leader.setter
    def leader(self, address: str) -> None:
        self._leader.value = address.encode()

    @property
    def signal(self) -> int:
        """The number of the signal to the supervisor, with which it asks its workers to end; 0 before one came."""
        return self._signal.value

    def note_signal(self, number: int) -> None:
        self._signal.value = number

    def note(self, worker: Worker, doing: int) -> None:
        """Note what this worker does: it STARTS; it WAITS to be let into a run under way; it WORKS; it FINISHES what it
        writes, before it ends or joins again; it has ENDED, as the run does; it has FAILED alone, with an error that it
        has explained, and the others go on. In the last two cases it is not replaced."""
        self._doing[self._index(worker)] = doing

    def doing(self, worker: Worker) -> int:
        return self._doing[self._index(worker)]

    def note_rank(self, worker: Worker) -> None:
        """The rank that this worker has now, among members that have changed."""
        self._ranks[self._index(worker)] = worker.rank

    def rank_of(self, worker: Worker) -> int:
        return self._ranks[self._index(worker)]

    def _index(self, worker: Worker) -> int:
        placed = worker.membership.original if worker.membership else worker
        return placed.local_rank - self.first


class Replacing:
    """Decides which workers are replaced."""

    def __init__(self, board: Board):
        self.board = board
        self.started: dict[int, float] = {}  # by rank
        self.soon: dict[int, int] = {}  # by rank: how often it has ended soon after its start
        self.left_out: set[int] = set()  # ranks that are not started again, while the others of the node go on

    def note_start(self, worker: Worker) -> None:
        self.started[worker.rank] = time.monotonic()

    def successor(self, worker: Worker, exit_code: int, cause: str) -> Worker | None:
        """The worker to start in place of one that has ended; None where it ended by itself, or does so each time."""
        doing = self.board.doing(worker)
        if not exit_code or doing in (ENDED, FAILED) or (doing == WAITS and exit_code > 0):
            return None
        is_soon = time.monotonic() - self.started[worker.rank] < SOON_SECONDS
        self.soon[worker.rank] = self.soon.get(worker.rank, 0) + 1 if is_soon else 0
        if self.soon[worker.rank] >= MOST_SOON:
            often = f"{MOST_SOON} times within {SOON_SECONDS:.0f} s of its start"
            self.leave_out(worker, f"has ended {often}")
            return None
        say(f"rank {self.board.rank_of(worker)} {cause}: starting another process for it")
        return replace(worker, predecessor=cause)

    def leave_out(self, worker: Worker, why: str) -> None:
        say(f"rank {worker.rank} {why}: it is left out")
        self.left_out.add(worker.rank)
