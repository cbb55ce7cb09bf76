"""What a training run asks of its members: whether they may change, and what it keeps in case they do.

`Members` is the answer where they never change, and does nothing; `ElasticMembers` that of --elastic.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.elastic.copies import ranks_with_copies, send_files
from common.elastic.membership import LetIn, Membership
from common.elastic.state import InMemoryState, restore_from_members
from common.join.process_group import Group
from common.state import Stateful


class Members:
    """The ranks of a run, which stay until it ends. Methods without a note are local."""

    may_change = False
    generation = 0  # changes of the members so far
    cause = ""  # of the last change
    must_end = ""  # why the run must save and end: too few members are left
    newcomers_wait = False  # and may be let in between two steps, as this rank knows
    keeps_copy = False  # of the run's files, on a disk of this rank's node
    saved_at: float | None = None  # when the last checkpoint was written, before the members changed
    unwritten: Sequence[Any] = ()  # steps of the generation before, which rank 0 may not have written
    interrupts: Any = None  # what handles signals, over all generations

    def folder(self) -> Path | None:
        """That of a run that goes on; None for one that begins. Every rank must call this."""
        return None

    def open_folder(self, folder: Path, resume: str | None, newest_step: Callable[[Path], int] | None) -> Path:
        """The folder that rank 0 has chosen, on every rank that needs it. `newest_step(folder)` is that of a folder's
        newest checkpoint, or 0; without it, nothing is to be written. Every rank must call this."""
        return folder

    def restore(self, folder: Path, model: torch.nn.Module, states: dict[str, Stateful]) -> int | None:
        """Fill `model` and `states` from the memory of the members. Returns the optimizer steps done, or None where
        this generation is the first. Every rank must call this."""
        return None

    def keep(self, folder: Path, step: int, model: torch.nn.Module, states: dict[str, Stateful]) -> None:
        """Keep this state in memory from now on."""

    def send_files(self, folder: Path) -> None:
        """Give the files of rank 0 so far to the ranks that keep copies. Every rank must call this."""

    def note_step(self, step: int, noted: list[Any]) -> None:
        """Optimizer step `step` is done; `noted` are the steps since the last exchange."""

    def note_exchange(self, exchanged: list[Any]) -> None:
        """All ranks know of these steps, and rank 0 is about to write them."""

    def note_saved(self, saved_at: float) -> None:
        """A checkpoint has been written."""

    def let_in(self) -> None:
        """Between two steps: end this generation, and let processes in that wait. Every rank must call this."""


class ElasticMembers(Members):
    """Ranks that may be lost, and come (--elastic)."""

    may_change = True

    def __init__(self, group: Group, membership: Membership):
        self.group, self.membership = group, membership
        self.generation, self.cause, self.must_end = membership.generation, membership.cause, membership.ends
        self.copies: list[int] = []  # ranks with files on their node's own disk

    @property
    def state(self) -> InMemoryState | None:
        return self.membership.state

    @property
    def newcomers_wait(self) -> bool:  # type: ignore[override]
        return self.membership.newcomers_wait

    @property
    def keeps_copy(self) -> bool:  # type: ignore[override]
        return self.group.worker.rank in self.copies

    @property
    def saved_at(self) -> float | None:  # type: ignore[override]
        return self.state.saved_at if self.state else None

    @property
    def unwritten(self) -> Sequence[Any]:  # type: ignore[override]
        return self.state.unwritten if self.state else ()

    @property
    def interrupts(self) -> Any:
        return self.membership.interrupts

    @interrupts.setter
    def interrupts(self, interrupts: Any) -> None:
        self.membership.interrupts = interrupts

    def folder(self) -> Path | None:
        if not self.generation:
            return None
        known: list[Any] = [None] * self.group.worker.world_size
        dist.all_gather_object(known, self.state and self.state.folder)
        return next(filter(None, known), None)

    def open_folder(self, folder: Path, resume: str | None, newest_step: Callable[[Path], int] | None) -> Path:
        named = [folder]
        dist.broadcast_object_list(named, src=0)  # any rank may have to go on with the run's files
        if newest_step:
            self.copies = ranks_with_copies(self.group, self.generation, named[0], resume, newest_step)
        return named[0]

    def restore(self, folder: Path, model: torch.nn.Module, states: dict[str, Stateful]) -> int | None:
        if not self.generation:
            return None
        state = restore_from_members(self.group, self.state, folder, model, states)
        if state is None:
            return None
        self.membership.state = state
        return state.step

    def keep(self, folder: Path, step: int, model: torch.nn.Module, states: dict[str, Stateful]) -> None:
        self.membership.state = InMemoryState(folder, step, model, states)

    def send_files(self, folder: Path) -> None:
        send_files(self.group, folder, self.copies)

    def note_step(self, step: int, noted: list[Any]) -> None:
        assert self.state
        self.state.step, self.state.noted = step, noted

    def note_exchange(self, exchanged: list[Any]) -> None:
        assert self.state
        self.state.exchanged, self.state.noted = exchanged, []
        self.state.unwritten = []  # rank 0 wrote them when it opened the files

    def note_saved(self, saved_at: float) -> None:
        assert self.state
        self.state.saved_at = saved_at

    def let_in(self) -> None:
        raise LetIn
