"""A training run as its trainer sees it: batches, model, step, what is due, files. mnist_ddp/train.py shows all of it.

    with Run(worker, args, name="mnist") as run:
        batches = run.global_batches(train_set)
        run.resume(net, optimizer=optimizer, scheduler=scheduler)
        model = run.wrap(net, compute_loss)
        while True:
            if run.evaluation_is_due:
                run.log_evaluation(**evaluate(net, run))
            if run.checkpoint_is_due:
                run.save()
            if run.is_done:
                break
            ...  # the step: next(batches), no_sync, backward, optimizer_step
            run.end_step()

The loop belongs to the trainer; a Run never calls it. What a flag asks for (shares by speed, nodes that train by
themselves, the largest micro-batch, a trace, members that come and go) happens in here, without a line in the trainer.
"""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset

from common.elastic.group import elastic_group
from common.errors import UserError
from common.join.members import Members
from common.join.process_group import Group, process_group
from common.launch import cli
from common.launch.layout import Worker
from common.launch.options import RunOptions
from common.record.folder import open_folder
from common.record.resume import require_all_schedulers, require_average, resume
from common.record.trackers import Tracker
from common.run.checkpointer import Checkpointer
from common.run.ending import Ending
from common.run.evaluation import EvaluationLoader
from common.run.log import StepLog
from common.run.precision import Precision
from common.state import Stateful
from common.uneven import ddp
from common.uneven.evaluation import EvaluationSampler
from common.uneven.global_batches import GlobalBatchLoader, StepBatch
from common.uneven.guards.same import require_same_numbers
from common.uneven.options.balance import Balancer
from common.uneven.options.local_sgd import LocalSGD
from common.uneven.options.memory import fitting_micro_batches
from common.uneven.seeding import derive_seed

NO_LINK_FLAGS = {"compress": "off", "sync_every": None, "outer_lr": 1.0, "outer_momentum": 0.0}  # of cli.add_link_flags


class Run:
    """One run on this rank. Every rank makes one, and calls the same methods in the same order."""

    group: Group
    members: Members
    device: torch.device
    precision: Precision
    options: RunOptions
    batches: GlobalBatchLoader
    log: StepLog
    checkpointer: Checkpointer
    ending: Ending
    nodes: LocalSGD
    folder: Path
    model: ddp.UnevenDistributedDataParallel

    def __init__(self, worker: Worker, args: Namespace, name: str, trackers: Iterable[Tracker] = ()):
        """`name` is that of the folder below runs/; `trackers` get every row of metrics.jsonl, on rank 0 only."""
        self.worker, self.name, self.trackers = worker, name, trackers
        self.args = Namespace(**NO_LINK_FLAGS | vars(args))
        self.step = 0  # optimizer steps done
        self.total_steps = 0  # after which the run is done
        self.data_fingerprint: dict[str, Any] = {}  # what a checkpoint to resume from must have too
        self.facts: dict[str, object] = {}  # further lines of the header
        self.states: dict[str, Stateful] = {}  # what a checkpoint has besides the weights
        self.evaluation_is_due = self.checkpoint_is_due = False  # now, before the next step
        self.has_said_reached, self.is_first_exchange = False, True
        self.lr: float | torch.Tensor | None = None  # of the step that is not noted yet
        self._summary: dict[str, object] = {}
        self._stopped_clock = contextlib.ExitStack()  # for an evaluation that is due

    def __enter__(self) -> "Run":
        self._entered = self._enter()
        return self._entered.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> Any:
        return self._entered.__exit__(kind, error, at)

    @contextlib.contextmanager
    def _enter(self) -> Iterator["Run"]:
        options = cli.join_options(self.args)
        with contextlib.ExitStack() as stack:
            if options.elastic:
                self.group, self.members = stack.enter_context(elastic_group(self.worker, options))
            else:
                self.group, self.members = stack.enter_context(process_group(self.worker, options)), Members()
            self.device = self.group.device
            self.precision = Precision(self.args.precision, self.device, self.args.on_nan)
            self.options = cli.run_options(self.args, self.name)
            yield self
            if hasattr(self, "ending"):  # training has begun
                self.checkpointer.finish()
                self.ending.interrupts.close()
                self.log.summary(self.step, **self._summary)

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
        self.batches = GlobalBatchLoader(
            dataset,
            cli.global_batch(self.args, self.worker.world_size),
            seed=self.args.seed,
            epochs=self.args.epochs,
            shares=self.args.shares,
            device=self.device,
            dtype=self.precision.dtype,
            **options,
        )
        total = self.batches.total_steps
        self.total_steps = min(total, self.args.max_steps or total)
        return self.batches

    def evaluation_loader(self, dataset: Dataset, **options: Any) -> EvaluationLoader:
        """Batches of a held-out set, on the device, each sample on exactly one rank. Ranks may get different numbers of
        batches, so a loop over it must contain no collective. `options` are further ones of DataLoader."""
        place = self.worker.rank, self.worker.world_size
        sampler = EvaluationSampler(len(dataset), *place, 1, self.dynamic_batches)  # type: ignore[arg-type]
        return EvaluationLoader(dataset, sampler, lambda: self.eval_batch, self.device, self.precision.dtype, **options)

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
        """Seed torch's generators for one purpose, such as "weights": the same on every layout."""
        torch.manual_seed(derive_seed(self.args.seed, purpose))

    def resume(self, net: torch.nn.Module, settings: dict[str, Any] | None = None, **states: Stateful) -> None:
        """Load the checkpoint that --resume asks for. `states` are what a step changes besides the weights of `net`:
        all optimizers and schedulers, an average of the weights (see common.state.Stateful). `settings` must be those
        of the checkpoint, as flags must. Every rank must call this, before `wrap`."""
        if not hasattr(self, "batches"):
            raise UserError(
                "run.resume() before run.global_batches(train_set), the loader whose steps are to be trained: a "
                "DataLoader of one's own cannot take its place"
            )
        args, timer, sampler = self.args, self.batches.timer, self.batches.sampler
        outer = args.sync_every, args.outer_lr, args.outer_momentum, args.timeout
        self.net = net
        self.nodes = LocalSGD(net, sampler, timer, self.group.ranks_of_nodes, *outer)
        self.states = {**states, "scaler": self.precision.scaler, **self.nodes.states}
        self.config = cli.config(args) | {"global_batch": self.batches.plan.global_batch} | (settings or {})
        self.folder = open_folder(self.group, self.members, self.options)
        where = self.group, self.members, self.options, self.folder
        self.step = resume(*where, net, self.states, self.data_fingerprint, self.config)
        self.batches.step = self.step

    def wrap(
        self,
        net: torch.nn.Module,
        compute_loss: Callable[[torch.nn.Module, Any], Any],
        untrained_loss: float | None = None,
        dynamic: bool = False,
        **options: Any,
    ) -> ddp.UnevenDistributedDataParallel:
        """`net` in DistributedDataParallel, and the files of the run opened. Every rank must call this, after `resume`.

        `compute_loss(model, micro)` returns the summed loss of a micro-batch, or a tuple that begins with it. The first
        loss must be near `untrained_loss`, such as ln(10) for a guess among ten classes. `dynamic`: rows differ in
        length, which --compile should know. `options` are further ones of `ddp.wrap`.
        """
        if not hasattr(self, "net"):
            raise UserError(
                "run.wrap() before run.resume(net, optimizer=..., scheduler=...), also where nothing is resumed"
            )
        args, plan = self.args, self.batches.plan
        self.micro_batches = cli.micro_batches(args, self.worker.world_size) or self._fitting(net, compute_loss)
        self.batches.micro_batch = self.micro_batches[self.worker.rank]
        self.model = model = ddp.wrap(
            net,
            self.batches,
            compute_loss,
            compiled="dynamic" if args.compile and dynamic else args.compile,
            compress=args.compress,
            nodes=self.nodes,
            **options,
        )
        timer = self.batches.timer
        self.balancer = Balancer(plan, self.batches.sampler, timer, model, on=args.balance == "auto")
        facts = {"micro_batches": self.micro_batches, **self.facts}
        given = plan, timer, self.options, self.precision, untrained_loss, self.trackers
        self.log = StepLog(self.group, self.members, *given)
        if args.eval_only:
            self.evaluation_is_due, self.total_steps = True, self.step
            return model
        has_checkpoints = self.log.open_together(self.folder, self.step, self.total_steps, **facts)
        after_member_change = self.step > 0 and self.members.generation > 0
        lost_all = after_member_change and not has_checkpoints  # the disk that had them is gone
        self.checkpointer = Checkpointer(self.group, self.members, self.options, self.log, wants_one=lost_all)
        self.ending = Ending(self.group, self.members)
        if after_member_change:  # what was due after the last step may not have been done
            self._note_due(self._epoch_ends_or_eval_every, self._wants_checkpoint and self.nodes.is_synchronized)
        return model

    def _fitting(self, net: torch.nn.Module, compute_loss: Callable[[torch.nn.Module, Any], Any]) -> list[int]:
        """The largest micro-batch of each rank, for --micro-batch auto."""

        def trial(rows: int) -> None:
            with self.autocast():
                loss = ddp.loss_of(compute_loss(net, self.batches.sample_batch(rows)))
            loss.backward()

        plan = self.batches.plan
        most = plan.global_batch if self.args.balance == "auto" else plan.shares[self.worker.rank]
        pace = self.group.run_independently("the largest micro-batch of each rank")
        return fitting_micro_batches(net, trial, most, pace)

    # --- the step ------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager:
        """Use around forward: the types of --precision."""
        return self.precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, scaled up under fp16. What it is given in a step, over all micro-batches and ranks, is the
        loss of the step in the log."""
        self._stopped_clock.close()  # where a trainer has not evaluated
        self.precision.backward(loss)

    def optimizer_step(
        self,
        *optimizers: torch.optim.Optimizer,
        clip_norm: float = float("inf"),
        model: torch.nn.Module | None = None,
    ) -> None:
        """Clip the gradients of the wrapped model, or of `model`, by their common norm, and take a step of each
        optimizer. Together these must train all of its parameters, and no others.

        Raises UserError where the step before has had no `end_step`.
        """
        if self.batches.last.step != self.step:
            raise UserError(f"step {self.step + 1} has had no run.end_step(): call it at the end of each step")
        self.lr = optimizers[0].param_groups[0]["lr"]
        self.grad_norm = self.precision.step(self.model if model is None else model, clip_norm, *optimizers)

    def end_step(self) -> None:
        """The optimizer step is done: note it, and find out what is due. Every rank must call this.

        Every 1 to 5 seconds the ranks exchange what they have noted. Raises RunError for a loss that is not finite, and
        UserError for a step that an optimizer has taken by itself.
        """
        if self.lr is None:
            raise UserError(
                "this step has had no run.optimizer_step(optimizer, clip_norm=...): write that in place of "
                "optimizer.step(), which knows nothing of --clip-norm, --on-nan and fp16"
            )
        batch: StepBatch = self.batches.last
        self.step = batch.step + 1
        ends = self.step == self.total_steps or self.ending.is_interrupted
        evaluates = self.nodes.end_step(self._epoch_ends_or_eval_every, now=ends)
        self.log.note(self.step, self.lr, self.grad_norm, batch.global_count)
        self.lr = None
        self.balancer.end_step(batch.work)  # every few steps, the ranks exchange their speeds
        self._note_due(evaluates, self._wants_checkpoint and self.nodes.is_synchronized)

    def _note_due(self, evaluates: bool, saves: bool) -> None:
        if (saves or evaluates or self.log.is_due) and (steps := self.log.exchange(self.ending.interrupts.received)):
            self.checkpointer.unsaved_seconds = steps.unsaved_seconds
            self.ending.agree(steps)
            if self.is_first_exchange:
                self.is_first_exchange = False
                self._look_once()
            for done in steps.done:
                self.precision.require_finite(done.step, done.loss, done.grad_norm)
        self.evaluation_is_due = evaluates and self.log.evaluated_step != self.step
        self.checkpoint_is_due = saves
        if self.evaluation_is_due:
            self._stopped_clock.enter_context(self.log.pause())  # its time does not count as training

    def _look_once(self) -> None:
        """What is made only once has been made by the end of the first step, and what one rank alone does has been
        done. Later, each checkpoint compares the ranks. Every rank must call this."""
        if not self.members.generation:
            require_all_schedulers(self.states)
            require_average(self.states, self.net)
        if self.nodes.is_synchronized:
            self.checkpointer.compare(self.step, self.net, self.states)

    @property
    def _epoch_ends(self) -> bool:
        return self.step == self.total_steps or self.step % self.batches.steps_per_epoch == 0

    @property
    def _epoch_ends_or_eval_every(self) -> bool:
        every = getattr(self.args, "eval_every", None)
        return self._epoch_ends or bool(every and self.step % every == 0)

    @property
    def _wants_checkpoint(self) -> bool:
        return self.checkpointer.is_due(self.step, now=self._epoch_ends or self.ending.is_due)

    # --- what is due ---------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.total_steps

    def has_reached(self, measure: str, target: float | None) -> bool:
        """Whether the last evaluation's `measure` is at least `target`, which the log then says. Never for None."""
        if target is None or self.log.last_eval.get(measure, -float("inf")) < target:
            return False
        if not self.has_said_reached:
            self.has_said_reached = True
            self.line(f"reached {target:.2%} after {self.log.clock.seconds:.1f} s of training")
        return True

    def log_evaluation(self, **numbers: float) -> None:
        """Write what an evaluation after this step has found, such as loss=, accuracy= and count=. Every rank must call
        this, with the same numbers, which must be those of all ranks; else it raises UserError."""
        require_same_numbers(numbers, f"the evaluation after step {self.step}")
        self._stopped_clock.close()
        self.evaluation_is_due = False
        self.log.evaluation(self.step, **numbers)

    def save(
        self,
        into: str = "checkpoints",
        write_extra: Callable[[Path], None] | None = None,
        **numbers: float,
    ) -> None:
        """Write a checkpoint. `write_extra(folder)` adds files to it. Every rank must call this.

        Into another folder than "checkpoints" go the weights alone, of one step only, with `numbers` in its state.json.
        Raises Interrupted where a signal has asked for the end of the run.
        """
        if not hasattr(self, "checkpointer"):
            raise UserError(
                "--eval-only writes no checkpoint: call run.save() after a step, or where run.checkpoint_is_due"
            )
        is_main = into == "checkpoints"
        states, keep = (self.states, self.args.keep) if is_main else ({}, 1)
        fields = self.data_fingerprint | self.config | {"precision": self.precision.name} | numbers
        self.checkpointer.save(self.step, self.net, fields, states, keep, write_extra, into)
        if is_main:
            self.checkpoint_is_due = False
            self.ending.stop(self.step, self.checkpointer.finish)

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
        self._summary |= numbers
