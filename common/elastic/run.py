"""What a run keeps in case its members change (--elastic): all that the rooms above see of this one."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.elastic.copies import ranks_with_copies, send_files
from common.elastic.members import enter
from common.elastic.membership import Change, Membership
from common.elastic.outside import say_how_to_join
from common.elastic.state import InMemoryState, restore_from_members
from common.join.members import Members
from common.join.process_group import Group
from common.state import Stateful


class ElasticMembers(Members):
    """Ranks that may be lost, and come (--elastic)."""

    may_change = True

    def __init__(self, group: Group, membership: Membership):
        self.group, self.membership = group, membership
        self.generation, self.cause, self.must_end = membership.generation, membership.cause, membership.ends
        self.copies: list[int] = []  # ranks with files on their node's own disk

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return bool(self.membership.prepares_for)

    @property
    def state(self) -> InMemoryState | None:
        return self.membership.state

    @property
    def newcomers_wait(self) -> bool:  # type: ignore[override]
        return self.membership.newcomers_wait

    @property
    def asked_to_stop(self) -> bool:  # type: ignore[override]
        return self.membership.asked_to_stop

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

    def have_loaded(self, loaded: dict[str, str]) -> None:
        self.membership.loaded = loaded
        if self.prepares:
            raise enter(self.membership)

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
        if self.group.worker.is_main:
            say_how_to_join(self.membership, folder)
        send_files(self.group, folder, self.copies)

    def note_update(self) -> None:
        assert self.state
        self.state.is_torn = True

    def note_step(self, step: int, noted: list[Any]) -> None:
        assert self.state
        self.state.note_step(step, noted)

    def note_exchange(self, exchanged: list[Any]) -> None:
        assert self.state
        self.state.exchanged, self.state.noted = exchanged, []
        self.state.unwritten = []  # rank 0 wrote them when it opened the files
        self.state.find_changing()

    def note_saved(self, saved_at: float) -> None:
        assert self.state
        self.state.saved_at = saved_at

    def can_go_on_without(self, ranks: Collection[int]) -> bool:
        assert self.membership.options.elastic
        return self.group.worker.world_size - len(ranks) >= self.membership.options.elastic

    def change(self, leaving: Collection[int], why: str) -> None:
        raise Change(leaving, why)
