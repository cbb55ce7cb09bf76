"""When a run writes checkpoints, and how its ranks wait for them."""

from functools import partial
from typing import TYPE_CHECKING, Any

from common.console import say
from common.errors import MembersChanged, RunError, in_one_line
from common.record import checkpoint
from common.record.background import BackgroundWriter
from common.record.resume import Averages, require_all_schedulers
from common.record.steps import ExchangedSteps
from common.state import Stateful, not_finite
from common.uneven.guards.same import ranks_that_differ

if TYPE_CHECKING:
    from common.run.run import Run

SAY_AFTER_SECONDS = 1.0  # of a wait for a checkpoint that is being written


class Checkpointer:
    """The checkpoints of one run. Every rank makes one and calls the same methods; rank 0 writes, and so do ranks that
    keep copies of the run's files."""

    def __init__(self, run: "Run", wants_one: bool):
        """`wants_one`: the disk that had the last checkpoint is gone."""
        self.group, self.members, self.options, self.log = run.group, run.members, run.options, run.log
        self.net, self.states, self.nodes, self.wants_one = run.net, run.states, run.nodes, wants_one
        self.unsaved_seconds = 0.0  # at the last exchange, by rank 0's clock; the same on every rank
        self.saved_step = run.step
        self.write_extra: checkpoint.WriteExtra | None = None  # that of the last checkpoint
        self.has_compared = self.has_said_differing = False
        self.averages: Averages | None = None  # from the first exchange on
        self.writer = BackgroundWriter() if self.options.async_save and self.log.output else None
        if self.writer:
            self.group.at_end.push(partial(self._end_writer, self.writer))

    def is_due(self, step: int, now: bool) -> bool:
        """True when --save-every, or `now`, has asked for a checkpoint since the last one, and all nodes have the same
        weights; the same on every rank."""
        self.wants_one = self.wants_one or now or self.saves(step)
        return self.wants_one and self.nodes.is_synchronized

    def saves(self, step: int) -> bool:
        """Whether --save-every asks for a checkpoint of this step."""
        return self.options.save_every.is_due(step, self.unsaved_seconds)

    def agree(self, steps: ExchangedSteps) -> None:
        """Take what all ranks have exchanged. At the first time, what is made only once has been made, and what one
        rank alone does has been done; later, each checkpoint compares the ranks. Every rank must call this."""
        self.unsaved_seconds = steps.now["unsaved_seconds"][0]
        if not self.averages:
            self.averages = Averages(self.net)
            self.averages.require_given(self.states)
            if not self.members.generation:
                require_all_schedulers(self.states)
        if not self.has_compared and self.nodes.is_synchronized:
            self.compare(steps.done[-1].step, self.states)

    def save(self, step: int, fields: dict[str, Any], into: str, write_extra: checkpoint.WriteExtra | None) -> None:
        """Rank 0 writes a checkpoint into the folder `into` of this run, see `checkpoint.save`, while the others wait;
        then those ranks that keep copies on disks of their own. Every rank must call this.

        With --async-save, training goes on as soon as the state has been copied to memory. The time that the ranks
        wait does not count as training, and --save-every counts from its end.
        """
        if name := not_finite(self.net):  # after a step whose gradient was finite
            raise RunError(
                f"after step {step}, {name} holds NaN or infinity, and is not saved; the checkpoints before it are "
                "intact: lower --lr, or look at the state of the optimizer",
                same_on_every_rank=True,
            )
        # In another folder than "checkpoints", the weights of one step alone.
        states, keep = (self.states, self.options.flags["keep"]) if into == "checkpoints" else ({}, 1)
        for model in self.log.timer.models:
            model.guard.state.require_same_buffers()
        self.compare(step, states)
        log, others_wait = self.log, self.group.others_wait(f"rank 0, which saves step {step}")
        with log.timer.span("checkpoint"), log.clock.saving(), others_wait, log.writing():
            if log.output:
                layout = {"layout": self.group.worker.layout.source, "shares": log.plan.shares}
                where = log.output.folder / into
                checkpoint.save(where, step, self.net, fields | layout, keep, write_extra, self.writer, **states)
        self.unsaved_seconds, self.wants_one = 0.0, False
        if states:
            self.saved_step, self.write_extra = step, write_extra
        self.members.note_saved(log.clock.saved_at)
        if self.averages:
            self.averages.require_given(self.states)

    def finish(self) -> None:
        """Wait until rank 0 has written the last checkpoint. Every rank must call this."""
        if self.options.async_save:
            finishes = self.group.others_wait("rank 0, which finishes the checkpoint")
            with self.log.clock.pause(), finishes, self.log.writing():
                if self.writer and self.log.output:
                    self.writer.finish()

    def _end_writer(self, writer: BackgroundWriter, _kind: object, error: BaseException | None, _trace: object) -> None:
        """As the group ends: wait until the last checkpoint is written. An error is printed after that, so it is named
        where the wait is long; no error of the writing is lost."""
        if not writer.wait(SAY_AFTER_SECONDS):
            waits = "waiting for the checkpoint that is being written"
            if error and not isinstance(error, MembersChanged):
                waits += f", before this rank ends with {in_one_line(error)}"
            say(waits, self.group.worker.rank)
            writer.wait()
        if writer.error:
            say(in_one_line(writer.error), self.group.worker.rank, error=True)

    def compare(self, step: int, states: dict[str, Stateful]) -> None:
        """Print which ranks' weights or states differ, which they must not. Every rank must call this."""
        self.has_compared = True
        may_differ = {id(one) for model in self.log.timer.models for one in model.guard.state.layout_dependent()}
        trees: dict[str, Any] = {"weights": list(self.net.parameters())}
        trees["buffers"] = [one for one in self.net.buffers() if id(one) not in may_differ]
        if not self.nodes.is_on:  # else each node has an optimizer of its own
            trees |= {f"state of {name}": one.state_dict() for name, one in states.items()}
        for what, ranks in ranks_that_differ(trees, self.group.device).items():
            if not self.has_said_differing:
                self.has_said_differing = True
                who = ", ".join(map(str, ranks))
                self.log.line(
                    f"warning: after step {step}, rank {who} has not the same {what} as the other ranks, bit by bit. "
                    "Does one rank alone take a step of an optimizer, a scheduler or an average, as under `if rank == "
                    "0`? Does a backward run outside of no_sync, or do ranks draw different numbers? Do GPUs of "
                    "different kinds round differently? Else it is an error of memory or of a device"
                )
