"""Why the ranks are to stop between two steps: a signal to one of them, or processes that wait to become members."""

import signal
from collections.abc import Callable

import torch.distributed as dist

from common.errors import Interrupted
from common.join.members import Members
from common.join.process_group import Group
from common.record.interrupts import Interrupts
from common.record.steps import ExchangedSteps


class Ending:
    """What one rank knows of it. All ranks learn of it in an exchange of steps, then save, and stop together."""

    def __init__(self, group: Group, members: Members):
        """From now on, signals are handled; where members may change, also between two generations."""
        self.members = members
        self.interrupted_by = members.must_end  # a signal and the rank that has received it; the same on every rank
        self.admits_members = False  # the same on every rank
        place = group.worker.rank, group.worker.local_rank == 0
        self.interrupts: Interrupts = members.interrupts or Interrupts(*place)
        self.interrupts.rank, self.interrupts.speaks = place
        self.interrupts.board = group.worker.board
        if members.may_change:
            members.interrupts = self.interrupts
        else:
            group.at_end.callback(self.interrupts.close)

    @property
    def is_due(self) -> bool:
        """Whether the ranks are to save and stop; the same on every rank."""
        return bool(self.interrupted_by) or self.admits_members

    def agree(self, steps: ExchangedSteps) -> None:
        """Take what all ranks have exchanged."""
        self.admits_members = self.admits_members or bool(steps.now["newcomers_wait"][0])  # as rank 0 knows
        for rank, number in enumerate(steps.now["signal"]):
            if number and not self.interrupted_by:
                self.interrupted_by = f"{signal.Signals(int(number)).name} on rank {rank}"
                self.interrupts.all_know = True

    def stop(self, step: int, finish: Callable[[], None]) -> None:
        """After a checkpoint of `step`, where it is due: let processes in that wait; or `finish()`, and raise
        Interrupted. Every rank must call this."""
        if self.interrupted_by:
            finish()
            dist.barrier()  # so that all ranks end at the same time: a launcher may end those that are left
            raise Interrupted(
                f"{self.interrupted_by}: ended after step {step}, which is saved; go on with --resume",
                same_on_every_rank=True,
            )
        if self.admits_members:
            self.members.let_in()
