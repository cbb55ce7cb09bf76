"""When a run writes checkpoints, and how its ranks wait for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.join.members import Members
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record import checkpoint
from common.record.background import BackgroundWriter
from common.run.log import StepLog
from common.state import Stateful
from common.uneven.guards.same import ranks_that_differ


class Checkpointer:
    """The checkpoints of one run. Every rank makes one and calls the same methods; rank 0 writes, and so do ranks that
    keep copies of the run's files."""

    def __init__(self, group: Group, members: Members, options: RunOptions, log: StepLog, wants_one: bool):
        """`wants_one`: the disk that had the last checkpoint is gone."""
        self.group, self.members, self.options, self.log, self.wants_one = group, members, options, log, wants_one
        self.unsaved_seconds = 0.0  # at the last exchange, by rank 0's clock; the same on every rank
        self.has_said_differing = False  # of weights
        self.writer: BackgroundWriter | None = None  # where this rank writes, with --async-save
        if options.async_save and log.output:
            self.writer = BackgroundWriter()
            group.at_end.callback(self.writer.wait)

    def is_due(self, step: int, now: bool) -> bool:
        """True when --save-every, or `now`, has asked for a checkpoint since the last one; the same on every rank."""
        self.wants_one = self.wants_one or now or self.options.save_every.is_due(step, self.unsaved_seconds)
        return self.wants_one

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        fields: dict[str, Any],
        states: dict[str, Stateful],
        keep: int | None = None,
        write_extra: Callable[[Path], None] | None = None,
        into: str = "checkpoints",
    ) -> None:
        """Rank 0 writes a checkpoint into the folder `into` of this run, see `checkpoint.save`, while the others wait;
        then those ranks that keep copies on disks of their own. Every rank must call this.

        With --async-save, training goes on as soon as the state has been copied to memory. The time that the ranks
        wait does not count as training, and --save-every counts from its end.
        """
        self.compare(step, model, states)
        log, others_wait = self.log, self.group.others_wait(f"rank 0, which saves step {step}")
        with log.timer.span("checkpoint"), log.clock.saving(), others_wait, log.writing():
            if log.output:
                layout = {"layout": self.group.worker.layout.source, "shares": log.plan.shares}
                where = log.output.folder / into
                checkpoint.save(where, step, model, fields | layout, keep, write_extra, self.writer, **states)
        self.unsaved_seconds, self.wants_one = 0.0, False
        self.members.note_saved(log.clock.saved_at)

    def finish(self) -> None:
        """Wait until rank 0 has written the last checkpoint. Every rank must call this."""
        if self.options.async_save:
            finishes = self.group.others_wait("rank 0, which finishes the checkpoint")
            with self.log.clock.pause(), finishes, self.log.writing():
                if self.writer and self.log.output:
                    self.writer.finish()

    def compare(self, step: int, net: torch.nn.Module, states: dict[str, Stateful]) -> None:
        """Print which ranks' weights or states differ, which they must not. Every rank must call this."""
        trees: dict[str, Any] = {"weights": list(net.parameters())}
        if not self.options.flags.get("sync_every"):  # else each node has an optimizer of its own
            trees |= {f"state of {name}": one.state_dict() for name, one in states.items()}
        for what, ranks in ranks_that_differ(trees, self.group.device).items():
            if not self.has_said_differing:
                self.has_said_differing = True
                who = ", ".join(map(str, ranks))
                self.log.line(
                    f"warning: after step {step}, rank {who} has not the same {what} as the other ranks, bit by bit. "
                    "Does one rank alone take a step of an optimizer, a scheduler or an average, as under `if rank == "
                    "0`? Do GPUs of different kinds round differently? Else it is an error of memory or of a device"
                )
