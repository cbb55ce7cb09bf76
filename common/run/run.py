"""A training run as its trainer sees it: batches, model, step, what is due, files. mnist_ddp/train.py shows all of it.

The loop belongs to the trainer; a Run never calls it. What only a flag asks for is in objects that a Run asks: members
that come and go, nodes that train by themselves, shares by speed, the largest micro-batch, and the trace of the log.
"""

import contextlib
import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset

from common.elastic.group import elastic_group
from common.join.members import Members
from common.join.process_group import Group, process_group
from common.launch import cli
from common.launch.layout import Worker
from common.record.checkpoint import WriteExtra
from common.record.folder import open_folder
from common.record.resume import resume
from common.record.trackers import Tracker
from common.run import beginning, order
from common.run.checkpointer import Checkpointer
from common.run.ending import Ending, handle_signals
from common.run.evaluation import EvaluationLoader, no_memory
from common.run.leaving import leave
from common.run.log import StepLog
from common.run.precision import Precision
from common.run.schedule import find_due, wants_evaluation
from common.state import Stateful
from common.uneven.ddp import UnevenDistributedDataParallel
from common.uneven.global_batches import GlobalBatchLoader
from common.uneven.guards.same import require_same_numbers
from common.uneven.options.balance import Balancer
from common.uneven.options.local_sgd import LocalSGD
from common.uneven.seeding import derive_seed, seed_noise

CALL_SECONDS = 15.0  # after which a rank says that it waits for the others' calls
NO_LINK_FLAGS = {"compress": "off", "sync_every": None, "outer_lr": 1.0, "outer_momentum": 0.0}  # of cli.add_link_flags


class Run:
    """One run on this rank. Every rank makes one, and calls the same methods in the same order."""

    # What it asks, from the beginning,
    group: Group
    members: Members
    # with the data and the model,
    batches: GlobalBatchLoader
    nodes: LocalSGD
    net: torch.nn.Module
    # and once the model is wrapped; the last two not with --eval-only
    model: UnevenDistributedDataParallel
    micro_batches: Sequence[int | None]  # of each rank
    balancer: Balancer
    log: StepLog
    checkpointer: Checkpointer
    ending: Ending

    def __init__(self, worker: Worker, args: Namespace, name: str, trackers: Iterable[Tracker] = ()):
        """`name` is that of the folder below runs/; `trackers` get every row of metrics.jsonl, on rank 0 only."""
        self.worker, self.name, self.trackers = worker, name, trackers
        self.args = Namespace(**NO_LINK_FLAGS | vars(args))
        self.step = self.total_steps = 0  # optimizer steps done, and after which the run is done
        self.data_fingerprint: dict[str, Any] = {}  # what a checkpoint to resume from must have too
        self.facts: dict[str, object] = {}  # further lines of the header
        self.states: dict[str, Stateful] = {}  # what a checkpoint has besides the weights
        self.evaluation_is_due = self.checkpoint_is_due = False  # now, before the next step
        self.rates: list[float | torch.Tensor] = []  # of all groups of parameters, in the step that is not noted yet
        self.held_out: list[EvaluationLoader] = []
        self.summary: dict[str, object] = {}  # what the last row of metrics.jsonl has besides what each run has
        self.stopped_clock = contextlib.ExitStack()  # for an evaluation that is due

    def __enter__(self) -> "Run":
        self._entered = self._enter()
        return self._entered.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        return self._entered.__exit__(*raised)

    @contextlib.contextmanager
    def _enter(self) -> Iterator["Run"]:
        options = cli.join_options(self.args)
        joining: Any = elastic_group if options.elastic else process_group
        with joining(self.worker, options) as joined:
            self.group, self.members = joined if options.elastic else (joined, Members())
            if self.members.generation:  # the others would take a signal for the loss of this rank
                handle_signals(self.group, self.members)
            self.device = self.group.device
            self.precision = Precision(self.args.precision, self.device, self.args.on_nan)
            self.options = cli.run_options(self.args, self.name)
            self.seed("anything")  # that a trainer draws before it seeds
            try:
                yield self
            except RuntimeError as error:  # a MemoryError is Python's, and need not be of the batch's size
                if found := no_memory(self, error):
                    raise found from error
                raise
            if hasattr(self, "ending"):  # training has begun
                leave(self)

    # --- data ----------------------------------------------------------------------------------------------------

    def first_on_node(self, what: str) -> AbstractContextManager[None]:
        """The first worker of each node runs the body, then the node's others. Every rank must call this."""
        return self.group.first_on_node(what)

    def agree(self, **values: object) -> None:
        """Raise UserError on every rank unless these are the same on all; and, at --resume, those of the checkpoint.
        Every rank must call this."""
        self.group.agree(**values)
        self.data_fingerprint |= values

    def describe(self, **facts: object) -> None:
        """Further lines of the header, such as data="mnist: 60,000 images"."""
        self.facts |= facts

    def global_batches(self, dataset: Dataset, **options: Any) -> GlobalBatchLoader:
        """The loader of the training set, see GlobalBatchLoader for `options`. Call it once."""
        args, size = self.args, cli.global_batch(self.args, self.worker.world_size)
        place = {"shares": args.shares, "device": self.device, "dtype": self.precision.dtype}
        self.batches = GlobalBatchLoader(dataset, size, seed=args.seed, epochs=args.epochs, **place, **options)
        self.total_steps = min(self.batches.total_steps, args.max_steps or self.batches.total_steps)
        return self.batches

    def evaluation_loader(self, dataset: Dataset, **options: Any) -> EvaluationLoader:
        """Batches of a held-out set, on the device, each sample on exactly one rank. Ranks may get different numbers of
        batches, so a loop over it must contain no collective. `options` are further ones of DataLoader."""
        self.held_out.append(EvaluationLoader(self, dataset, **options))
        return self.held_out[-1]

    @functools.cached_property
    def dynamic_batches(self) -> Callable[[], Iterator[int]] | None:
        """With --balance auto, numbers of batches that are each given to one rank, so that fast ranks evaluate more."""
        return self.group.shared_counter("evaluation") if self.args.balance == "auto" else None

    @property
    def eval_batch(self) -> int:
        """The samples that a rank evaluates at once, once `wrap` has been called."""
        return cli.eval_batch(self.args, self.micro_batches)

    # --- model ---------------------------------------------------------------------------------------------------

    def seed(self, purpose: str) -> None:
        """Seed the generators of torch, numpy and Python for one purpose, such as "weights": alike on every layout."""
        seed_noise(self.device, derive_seed(self.args.seed, purpose))

    def resume(self, net: torch.nn.Module, settings: dict[str, Any] | None = None, **states: Stateful) -> None:
        """Load the checkpoint that --resume asks for. `states` are what a step changes besides the weights of `net`:
        all optimizers and schedulers, an average of the weights (see common.state.Stateful). `settings` must be those
        of the checkpoint, as flags must. Every rank must call this, before `wrap`."""
        order.before_resume(self)
        args, batches, self.net = self.args, self.batches, net
        if self.members.prepares:  # the members will give it their state
            return
        outer = args.sync_every, args.outer_lr, args.outer_momentum, args.timeout
        self.nodes = LocalSGD(net, batches.sampler, batches.timer, self.group.ranks_of_nodes, *outer)
        self.optimizers = WeakSet(one for one in states.values() if isinstance(one, torch.optim.Optimizer))
        self.states = {**states, "scaler": self.precision.scaler, **self.nodes.states}
        self.config = cli.config(args) | {"global_batch": batches.plan.global_batch} | (settings or {})
        self.folder = open_folder(self.group, self.members, self.options)
        where = self.group, self.members, self.options, self.folder
        self.step = batches.step = resume(*where, net, self.states, self.data_fingerprint, self.config)

    def wrap(
        self,
        net: torch.nn.Module,
        compute_loss: Callable[[torch.nn.Module, Any], Any],
        untrained_loss: float | None = None,
        dynamic: bool = False,
        **options: Any,
    ) -> UnevenDistributedDataParallel:
        """`net` in DistributedDataParallel, and the files of the run opened. Every rank must call this, after `resume`.

        `compute_loss(model, micro)` returns the summed loss of a micro-batch, or a tuple that begins with it. The first
        loss must be near `untrained_loss`, such as ln(10) for a guess among ten classes. `dynamic`: rows differ in
        length, which --compile should know. `options` are further ones of `ddp.wrap`.
        """
        order.before_wrap(self)
        self.model = beginning.wrap_model(self, net, compute_loss, dynamic, **options)
        order.watch_optimizers(self)
        beginning.open_files(self, untrained_loss)
        return self.model

    # --- the step ------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager:
        """Use around forward: the types of --precision."""
        return self.precision.autocast()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, scaled up under fp16. What it is given in a step, over all micro-batches and
        ranks, is the loss of the step in the log."""
        if self.evaluation_is_due:
            self.stopped_clock.close()  # the trainer has not evaluated
        order.before_backward(self)
        self.precision.backward(loss, **options)

    def optimizer_step(
        self, *optimizers: torch.optim.Optimizer, clip_norm: float = float("inf"), model: torch.nn.Module | None = None
    ) -> None:
        """Clip the gradients of the wrapped model, or of `model`, by their common norm, and take a step of each
        optimizer. Together these must train all of its parameters, and no others.

        Raises UserError where the step before has had no `end_step`.
        """
        order.before_optimizer_step(self, optimizers)
        rates = [group["lr"] for one in optimizers for group in one.param_groups]
        # Copies, because a scheduler writes into tensors; None, as Adafactor has it, is no number that could be noted.
        self.rates += [math.nan if rate is None else rate + 0.0 for rate in rates]
        which = self.model if model is None else model
        self.members.note_update()
        self.grad_norm = self.precision.step(which, clip_norm, *optimizers, round_of_checks=self.batches.timer.round)

    def end_step(self) -> None:
        """The optimizer step is done: note it, and find out what is due. Every rank must call this.

        Every 1 to 5 seconds the ranks exchange what they have noted. Raises RunError for a loss that is not finite, and
        UserError for a step that an optimizer has taken by itself.
        """
        order.before_end_step(self)
        batch, self.step = self.batches.last, self.batches.last.step + 1
        ends = self.step == self.total_steps or self.ending.ends_run
        evaluates = self.nodes.end_step(wants_evaluation(self, self.step), now=ends)
        self.log.note(self.step, self.rates[0], sum(self.rates), self.grad_norm, batch.global_count)
        self.rates = []
        self.balancer.end_step(self.step, batch.work)  # every few steps, the ranks exchange their speeds
        find_due(self, evaluates)

    # --- what is due ---------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.total_steps

    def has_reached(self, measure: str, target: float | None) -> bool:
        """Whether the last evaluation's `measure` is at least `target`, which the log then says. Never for None."""
        return target is not None and self.log.has_reached(measure, target)

    def log_evaluation(self, **numbers: float) -> None:
        """Write what an evaluation after this step has found, such as loss=, accuracy= and count=. Every rank must call
        this, with the same numbers, which must be those of all ranks; else it raises UserError."""
        self._all_call("run.log_evaluation()")
        require_same_numbers(numbers, f"the evaluation after step {self.step}")
        self.stopped_clock.close()
        self.evaluation_is_due = False
        self.log.evaluation(self.step, [one.sampler.samples for one in self.held_out], **numbers)

    def save(self, into: str = "checkpoints", write_extra: WriteExtra | None = None, **numbers: float) -> None:
        """Write a checkpoint. `write_extra(folder)` adds files to it. Every rank must call this.

        Into another folder than "checkpoints" go the weights alone, of one step only, with `numbers` in its state.json.
        Raises Interrupted where a signal has asked for the end of the run.
        """
        order.before_save(self)
        self._all_call("run.save()")
        fields = self.data_fingerprint | self.config | {"precision": self.precision.name} | numbers
        self.checkpointer.save(self.step, fields, into, write_extra)
        if into == "checkpoints":
            self.checkpoint_is_due = False
            self.ending.stop(self.step, self.checkpointer.finish)

    def _all_call(self, what: str) -> None:
        """Wait until all ranks have come to `what`: a rank that is alone there would meet another collective."""
        waits = f"all ranks, each of which must call {what}: is one alone in an evaluation?"
        with self.group.run_independently(waits, CALL_SECONDS):
            pass

    def finish_saving(self) -> None:
        """Wait until rank 0 has written the last checkpoint. Every rank must call this."""
        if hasattr(self, "checkpointer"):
            self.checkpointer.finish()

    def pause(self) -> AbstractContextManager[None]:
        """Use around work between two steps that is not training."""
        return self.log.pause()

    def line(self, text: str) -> None:
        """One line from rank 0."""
        self.log.line(text)

    def summarize(self, **numbers: object) -> None:
        """What the last row of metrics.jsonl has besides what each run has."""
        self.summary |= numbers
