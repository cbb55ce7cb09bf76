"""What a training run asks of its members: whether they may change, and what it keeps in case they do."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from common.state import Stateful


class Members:
    """The ranks of a run, which stay until it ends, so there is nothing to keep. `common.elastic.run.ElasticMembers` is
    what they are with --elastic. Methods without a note are local."""

    may_change = False
    generation = 0  # changes of the members so far
    cause = ""  # of the last change
    prepares = False  # this process loads its data and builds its model alone, before it is let into a run under way
    must_end = ""  # why the run must save and end: too few members are left
    newcomers_wait = False  # and may be let in between two steps, as this rank knows
    asked_to_stop = False  # somebody has asked for the end of the run (--stop), as this rank knows
    keeps_copy = False  # of the run's files, on a disk of this rank's node
    saved_at: float | None = None  # when the last checkpoint was written, before the members changed
    unwritten: Sequence[Any] = ()  # steps of the generation before, which rank 0 may not have written
    interrupts: Any = None  # what handles signals, over all generations

    def have_loaded(self, loaded: dict[str, str]) -> None:
        """Note what this process has loaded, by name, which all ranks must have alike. One that `prepares` then waits
        until it is let in, and does not return. Every rank must call this."""

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

    def note_update(self) -> None:
        """An optimizer is about to change weights, before its step is done."""

    def note_step(self, step: int, noted: list[Any]) -> None:
        """Optimizer step `step` is done; `noted` are the steps since the last exchange."""

    def note_exchange(self, exchanged: list[Any]) -> None:
        """All ranks know of these steps, and rank 0 is about to write them."""

    def note_saved(self, saved_at: float) -> None:
        """A checkpoint has been written."""

    def can_go_on_without(self, ranks: Collection[int]) -> bool:
        """Whether the run goes on when these ranks leave it; the same on every rank."""
        return False

    def change(self, leaving: Collection[int], why: str) -> None:
        """Between two steps: end this generation. Processes that wait are let in, and the ranks `leaving` leave;
        `why` says why. Every rank must call this."""
