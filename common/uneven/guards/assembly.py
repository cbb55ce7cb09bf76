"""What `ddp.wrap` refuses: loaders, options and models with which the result would depend on the layout."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from common.errors import UserError
from common.uneven.global_batches import GlobalBatchLoader
from common.uneven.guards.layers import refuse_batch_norm, refuse_strangers
from common.uneven.guards.same import description, require_same
from common.uneven.options.global_batch import needs_whole_parts


def require_global_batches(batches: object) -> None:
    """Raise UserError for anything but a GlobalBatchLoader, such as a DataLoader."""
    if isinstance(batches, GlobalBatchLoader):
        return
    what = "a DataLoader" if isinstance(batches, DataLoader) else f"a {type(batches).__name__}"
    raise UserError(
        f"wrap() got {what}, which knows neither the global batch nor empty parts, and what its data set draws at "
        "random would depend on the layout: write batches = GlobalBatchLoader(dataset, global_batch, seed=..., "
        "epochs=...) of common.uneven.global_batches, with collate= in place of collate_fn=, without batch_size, "
        "shuffle, sampler and drop_last, and with the other options as they are; then `for batch in batches:`"
    )


def refuse_options_of_ddp(options: Mapping[str, Any]) -> None:
    """Raise UserError for options that `wrap` does not have."""
    if options:
        raise UserError(
            f"wrap() has no {', '.join(options)}: it chooses DistributedDataParallel's own options, and every forward "
            "must use all parameters (add `0.0 * parameter.sum()` to the loss where one is not used)"
        )


def refuse_together(whole_parts: bool, pad_empty_batch: bool, no_micro_batches: bool, is_apart: bool) -> None:
    """Raise UserError for options of `wrap` that exclude one another. `whole_parts`: a layer of the model needs the
    global batch. `is_apart`: each node trains by itself."""
    if whole_parts and pad_empty_batch:
        raise UserError(
            "wrap(..., pad_empty_batch=True) would count its row of zeros in the statistics of a GlobalBatchNorm: let "
            "the model take an empty batch, or use GroupNorm",
            same_on_every_rank=True,
        )
    if is_apart and (no_micro_batches or whole_parts):
        raise UserError(
            "--sync-every lets each node train by itself, but statistics or a loss over the global batch need "
            "every rank in every step: leave it out",
            same_on_every_rank=True,
        )


def require_alike(net: torch.nn.Module, batches: GlobalBatchLoader, layout_dependent: Collection[str]) -> None:
    """Raise UserError for a plan, a model or data that are not the same on every rank, or that know the layout. Every
    rank must call this."""
    require_same({"the plan": batches.plan, **description(net)})
    if "the data" not in layout_dependent:
        fix = "every rank must read the same data, in the same order. If the machines only decode them differently, "
        fix += "name it in wrap(..., layout_dependent=['the data'])"
        require_same({"the data": batches.data_fingerprint()}, fix)
    refuse_strangers(net, layout_dependent)
    refuse_batch_norm(net, layout_dependent)


def require_number(loss: torch.Tensor) -> None:
    """Raise UserError where the loss of an empty batch is not finite, as that of a mean is."""
    if not loss.isfinite().all():
        raise UserError(
            f"the loss of an empty batch, which a rank with an empty part has, is {loss.sum().item()}: return the sum "
            'over the samples (reduction="sum"), which the loop divides by the global count, and not a mean',
            same_on_every_rank=True,
        )


def empty_batch_problem(
    error: Exception, net: torch.nn.Module, compute: Callable[[int], Any], pad_empty_batch: bool
) -> Exception:
    """What to raise where the model has raised `error` for an empty batch. `compute(rows)` computes a loss."""
    if needs_whole_parts(net):  # its forward exchanges sums, which may have failed for other reasons
        return error
    with torch.no_grad():
        compute(1)  # where this fails too, it is not for want of samples
    fix = "give wrap(..., pad_empty_batch=True), or correct the function that wrap was given"
    if pad_empty_batch:
        fix = "it also refuses the row of zeros that pad_empty_batch=True gives it instead: correct the model, or the "
        fix += "function that wrap was given"
    problem = str(error).strip().splitlines()[0]
    return UserError(
        f"the model refuses an empty batch ({problem}), which a rank with an empty part has: {fix}",
        same_on_every_rank=True,
    )
