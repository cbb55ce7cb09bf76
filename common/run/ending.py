"""Why the ranks are to stop between two steps: a signal to one of them, or processes that wait to become members."""

import signal
from collections.abc import Callable

import torch.distributed as dist

from common.errors import Interrupted
from common.join.members import Members
from common.join.process_group import Group
from common.record.interrupts import Interrupts
from common.record.steps import ExchangedSteps

STOP = -1  # in place of a signal's number: --stop


def handle_signals(group: Group, members: Members) -> Interrupts:
    """From now on, signals are noted; where members may change, also between two generations."""
    place = group.worker.rank, group.worker.local_rank == 0
    interrupts: Interrupts = members.interrupts or Interrupts(*place)
    interrupts.rank, interrupts.speaks = place
    interrupts.board = group.worker.board
    if members.may_change:
        members.interrupts = interrupts
    else:
        group.at_end.callback(interrupts.close)
    return interrupts


class Ending:
    """What one rank knows of it. All ranks learn of it in an exchange of steps, then save, and stop together."""

    def __init__(self, group: Group, members: Members):
        self.members = members
        # The same on every rank: a signal and the rank that has received it, and the ranks that leave because of it, or
        # none where the run ends; and whether processes are let in.
        self.interrupted_by, self.leaving = members.must_end, list[int]()
        self.admits_members = False
        self.nodes = group.ranks_of_nodes
        self.rank = group.worker.rank
        self.interrupts = handle_signals(group, members)

    @property
    def signal(self) -> int:
        """The number of the signal that this rank has received, STOP where the run is asked to end, or 0."""
        return STOP if self.members.asked_to_stop else self.interrupts.received

    @property
    def is_due(self) -> bool:
        """Whether the ranks are to save and stop; the same on every rank."""
        return bool(self.interrupted_by) or self.admits_members

    @property
    def ends_run(self) -> bool:
        """Whether no more steps are to come; the same on every rank."""
        return bool(self.interrupted_by) and not self.leaving

    def agree(self, steps: ExchangedSteps) -> None:
        """Take what all ranks have exchanged."""
        self.admits_members = self.admits_members or bool(steps.now["newcomers_wait"][0])  # as rank 0 knows
        received = {rank: int(number) for rank, number in enumerate(steps.now["signal"]) if number}
        if not received or self.interrupted_by:
            return
        rank, number = min(received.items(), key=lambda one: one[1] != STOP)
        self.interrupted_by = "--stop" if number == STOP else f"{signal.Signals(number).name} on rank {rank}"
        # A supervisor asks one worker after the other: a signal to one is a signal to its node.
        nodes = [node for node in self.nodes if not received.keys().isdisjoint(node)]
        leaving = sorted(rank for node in nodes for rank in node)
        self.leaving = leaving if number != STOP and self.members.can_go_on_without(leaving) else []
        if self.members.may_change and number != STOP and not self.leaving and len(nodes) < len(self.nodes):
            self.interrupted_by += ", without whose node too few ranks are left (--elastic)"
        self.interrupts.all_know = not self.leaving or self.rank in self.leaving

    def stop(self, step: int, finish: Callable[[], None]) -> None:
        """After a checkpoint of `step`, where it is due: `finish()`, and let processes in that wait and ranks leave, or
        raise Interrupted. Every rank must call this."""
        if not self.is_due:
            return
        finish()
        if self.ends_run:
            dist.barrier()  # so that all ranks end at the same time: a launcher may end those that are left
            raise Interrupted(
                f"{self.interrupted_by}: ended after step {step}, which is saved; go on with --resume",
                same_on_every_rank=True,
            )
        self.members.change(self.leaving, self.interrupted_by)
