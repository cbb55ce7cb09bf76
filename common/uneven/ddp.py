"""DistributedDataParallel for uneven ranks: gradients are summed over the ranks, once per optimizer step.

Each rank backpropagates

    loss_sum / global_count

where `loss_sum` is summed over its own samples and `global_count` counts the samples of the whole global batch, over
all ranks and micro-batches. The all-reduce adds these up, which gives exactly the gradient of the mean over the global
batch, whatever the ranks hold. Plain DDP averages over the ranks instead; there the same gradient comes from
`loss_sum * world_size / global_count`.
"""

import atexit
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # optimizers import it at first use; here it is imported before ranks are forked
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.errors import UserError
from common.uneven.global_batches import GlobalBatchLoader
from common.uneven.guards import assembly
from common.uneven.guards.gradients import IS_REDUCED, Guard, UnsummedGradients
from common.uneven.guards.layers import say_noise
from common.uneven.kept import unchanged
from common.uneven.options.compression import Summed, gradient_sum, sum_bucket, sum_numbers
from common.uneven.options.empty_batches import EmptyPartsApart
from common.uneven.options.global_batch import needs_whole_parts
from common.uneven.options.local_sgd import LocalSGD
from common.uneven.options.memory import is_out_of_memory
from common.uneven.options.timer import StepTimer

# Before Python shuts down. After a backward, a thread of the backend still needs the interpreter's lock, for what torch
# keeps there. A script that holds the lock and ends at that moment aborts: "terminate called without an active
# exception". The sleep gives the lock away.
REST_SECONDS = 0.1
# Buffers are the same on every rank, which the guard checks: they need no broadcast before each forward.
IS_NEWER = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
KEEP_BUFFERS = "forward_sync_buffers" if IS_NEWER else "broadcast_buffers"  # the option of DDP


class UnevenDistributedDataParallel(DistributedDataParallel):
    """What `wrap` returns: DistributedDataParallel that sums, with a guard for each step (guards/gradients.py)."""

    def __init__(
        self,
        net: torch.nn.Module,
        timer: StepTimer,
        guard: Guard,
        sum_gradients: Callable[[dist.GradBucket], Summed],
        **options: Any,
    ):
        super().__init__(net, **options)  # sends rank 0's buffers
        self.timer, self.guard, self.sum_gradients = timer, guard, sum_gradients
        # Weak: DDP's C++ keeps what it is given here, and no garbage collector would find a circle through it.
        self.register_comm_hook(weakref.ref(self), _sum_over_ranks)
        guard.watch(timer, self.process_group)
        for parameter in net.parameters():
            if parameter.requires_grad:
                setattr(parameter, IS_REDUCED, True)
        self.is_alone = dist.get_world_size() == 1

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not self.guard.in_micro_batch:
            raise UserError(
                "the wrapped model runs outside of its own `with model.no_sync(enabled=not is_last)`: put forward and "
                "backward of a micro-batch inside. For anything else use the module itself, frozen or under "
                "torch.no_grad()"
            )
        if self.is_alone:  # there is nothing to exchange, and nothing to prepare for it
            return self.module(*inputs, **named)
        return super().forward(*inputs, **named)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Use around forward *and* backward of every micro-batch, with `enabled=False` for the last one of a step:
        its backward sums the gradients over the ranks, and those before it accumulate them on each rank.

        Forward must be inside, because DDP decides there whether the next backward exchanges.

        Raises UserError where the last backward has not reached every parameter, where gradients would be summed
        twice, where training has changed a buffer, where a layer that needs the whole global batch gets a micro-batch,
        where memory is too small for the micro-batch, and for a loop that does not take its batches from the loader
        that `wrap` was given.
        """
        timer, guard, is_last = self.timer, self.guard, not enabled
        if not timer.is_marked("loaded") or timer.cut_item != timer.item:
            raise UserError(
                "this loop does not take its batches from the GlobalBatchLoader that wrap() was given: write "
                "`batch = next(batches)` and `for micro, is_last in batch.micro_batches():`"
            )
        if guard.reduced_item and guard.begun_item != timer.item:  # the first micro-batch, or the only one
            guard.require_no_gradients(same_step=guard.reduced_item == timer.item)
        guard.begun_item = 0 if is_last else timer.item
        timer.unmark("ready")
        timer.tell("pass")
        guard.begin_micro_batch(is_last)
        try:
            with self.micro_batch(exchanges=is_last):
                yield
        except RuntimeError as error:  # a MemoryError is Python's, and need not be of the micro-batch's size
            if not is_out_of_memory(error):
                raise
            raise guard.too_large(error) from error
        timer.tell("passed")
        if is_last:
            if self.is_alone:
                timer.mark("ready")
            timer.mark("reduced")
            guard.reduced_item = timer.item
        guard.end_micro_batch(is_last)

    @contextmanager
    def micro_batch(self, exchanges: bool = True) -> Iterator[None]:
        """Allow forward in the body, after which backward `exchanges` gradients or not."""
        guard, before = self.guard, (self.guard.in_micro_batch, self.require_backward_grad_sync)
        guard.in_micro_batch = True
        if exchanges != before[1]:  # to set an attribute of a module takes 10 us
            self.require_backward_grad_sync = exchanges
        try:
            yield
        finally:
            guard.in_micro_batch = before[0]
            if exchanges != before[1]:
                self.require_backward_grad_sync = before[1]


def wrap(
    net: torch.nn.Module,
    batches: GlobalBatchLoader,
    compute_loss: Callable[[torch.nn.Module, Any], Any],
    compiled: bool | str = False,
    pad_empty_batch: bool = False,
    no_micro_batches: bool = False,
    layout_dependent: Collection[str] = (),
    compress: str = "off",
    nodes: LocalSGD | None = None,
    **of_ddp: Any,
) -> UnevenDistributedDataParallel:
    """`net` in DistributedDataParallel, with rank 0's weights on every rank. Every rank must call this.

    `compute_loss(model, micro)` is that of the loop: it returns the summed loss of a micro-batch, or a tuple that
    begins with it. It is called here with an empty batch of `batches`. DDP rebuilds its buckets in its second forward,
    with an exchange, which changes the order of summation. So two backwards are done here, and their gradients are
    thrown away: a resumed run is bit-identical to one that was not interrupted, and ranks with different numbers of
    micro-batches enter their collectives in the same order.

    With `pad_empty_batch`, the model never gets an empty batch: one row of zeros goes through it instead, and none
    comes out. With `no_micro_batches`, they are refused: for a loss over the global batch. `compiled`: run the model
    by torch.compile; "dynamic" where rows differ in length. `compress` says how gradients are summed (compression.py).
    With `nodes` they are summed over the ranks of a node only, and `compress` is for the nodes' changes
    (local_sgd.py).

    Raises UserError, by name, for what would make the result depend on the layout: a model or a plan that is not the
    same on every rank, a model in DDP already, BatchNorm, a generator of the model's own, parameters that backward
    does not reach. `layout_dependent` names layers, buffers and generators that may.
    """
    assembly.require_global_batches(batches)
    assembly.refuse_options_of_ddp(of_ddp)
    timer, apart = batches.timer, nodes if nodes and nodes.is_on else None
    assembly.require_alike(net, batches, layout_dependent)
    assembly.refuse_together(needs_whole_parts(net), pad_empty_batch, no_micro_batches, is_apart=apart is not None)
    if apart:
        apart.start(compress)
    wrapped = UnevenDistributedDataParallel(
        EmptyPartsApart(net, compiled, pad_empty_batch) if compiled or pad_empty_batch else net,
        timer,
        Guard(net, layout_dependent, no_micro_batches),
        apart.sum_gradients if apart else gradient_sum(compress),
        device_ids=[timer.device] if timer.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        process_group=apart.group if apart else None,
        **{KEEP_BUFFERS: False},
    )

    def compute(rows: int) -> Any:
        return compute_loss(wrapped, batches.sample_batch(rows))

    with wrapped.micro_batch(), unchanged(net):
        for _ in range(2):
            loss = _loss_of_empty_batch(compute, wrapped, pad_empty_batch)
            if not (no_micro_batches or needs_whole_parts(net)):  # of which no rank alone may have nothing
                assembly.require_number(loss)
            loss.backward()
            has_exchanged = wrapped.is_alone or timer.is_marked("ready")
            wrapped.guard.require_all_reached(has_exchanged, same_on_every_rank=True)
    wrapped.zero_grad()
    timer.forget()
    _prepare_process()
    timer.models.add(wrapped)
    net.register_forward_pre_hook(say_noise)
    return wrapped


@functools.cache
def _prepare_process() -> None:
    """What `wrap` needs once in a process."""
    atexit.register(time.sleep, REST_SECONDS)
    unsummed = UnsummedGradients()
    register_optimizer_step_pre_hook(lambda *step: unsummed(*step) if dist.get_world_size() > 1 else None)


def _loss_of_empty_batch(
    compute: Callable[[int], Any], model: UnevenDistributedDataParallel, pad_empty_batch: bool
) -> torch.Tensor:
    try:
        return loss_of(compute(0))
    except (RuntimeError, ValueError, IndexError) as error:
        problem = error
    raise assembly.empty_batch_problem(problem, model.module, compute, pad_empty_batch)


def loss_of(computed: Any) -> torch.Tensor:
    """The loss of what a `compute_loss` returns: it alone, or a tuple that begins with it."""
    return computed[0] if isinstance(computed, tuple) else computed


def _sum_over_ranks(
    which: "weakref.ref[UnevenDistributedDataParallel]", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: sums a bucket of a model. Notes when this rank's last gradients are ready."""
    model = which()
    assert model is not None  # its backward runs
    timer, sum_gradients = model.timer, model.sum_gradients
    if bucket.is_last():
        timer.mark("ready")
        model.guard.exchanges += 1
    if timer.at_exchange and bucket.index() == 0:
        numbers = timer.at_exchange()
        if sum_gradients is sum_bucket and bucket.buffer().dtype in (torch.float32, torch.float64):
            return sum_bucket(bucket, beside=numbers)
        sum_numbers(numbers)
    return sum_gradients(bucket)
