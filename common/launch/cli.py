"""The flags that all trainers share, in groups, and the option records built from them. Imports no torch.

Every flag answers three questions. The answer to the last two is "yes" unless the parser says otherwise:

    which group of --help        add_batch_flags, add_training_flags, ...
    same on every node?          the join compares it, unless `may_differ` names it
    same in a resumed run?       a checkpoint compares it, unless `may_change` names it

So a new flag is compared everywhere until its author says that it need not be.
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import reading
from common.launch import values
from common.launch.combinations import check_training as check_training  # trainers hand it to start.main
from common.launch.options import JoinOptions, LayoutFlags, RunOptions
from common.launch.parser import Parser

JOIN_TIMEOUT_SECONDS = 300.0
# may differ between the nodes of one job
MAY_DIFFER = {
    *("node_rank", "master_addr", "master_port", "interface", "join_timeout"),
    *("distributed_init_method", "distributed_gpus", "distributed_rank", "distributed_no_spawn", "device_id"),
    *("out_dir", "device", "oversubscribe", "no_plot", "tensorboard", "secret_file", "join", "stop"),
}
LAYOUT = {field.name for field in fields(LayoutFlags)}
# may change when a run is resumed: where and how it computes, and how long, but not what it optimises
MAY_CHANGE = {
    *LAYOUT,
    *("interface", "join_timeout", "timeout", "work_timeout", "backend", "secret_file", "elastic"),
    *("global_batch", "batch_per_gpu", "micro_batch", "shares", "balance", "eval_batch"),
    *("max_steps", "precision", "compile", "compress"),
    *("out_dir", "resume", "save_every", "async_save", "keep", "eval_only", "log_every"),
    *("no_plot", "tensorboard", "trace", "unit", "on_nan", "stop"),
}
NOT_FLAGS = {"may_differ", "may_change"}  # defaults that this module keeps in the parser


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the layout flags."""
    result = Parser(description)
    add_layout_flags(result)
    result.set_defaults(may_differ=MAY_DIFFER, may_change=MAY_CHANGE)
    return result


def may_differ(parser: argparse.ArgumentParser, *names: str) -> None:
    """Do not compare these flags, such as paths, between the nodes. Compare what they point to with `Group.agree`.

    They may also change in a resumed run: the checkpoint's identity covers what they point to.
    """
    parser.set_defaults(may_differ=parser.get_default("may_differ") | set(names))
    may_change(parser, *names)


def may_change(parser: argparse.ArgumentParser, *names: str) -> None:
    """Let these flags change when a run is resumed, because they do not change what is optimised."""
    parser.set_defaults(may_change=parser.get_default("may_change") | set(names))


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layout: which processes, where (leave out under torchrun)").add_argument
    add("-n", "--nodes", type=values.positive_int, metavar="N", help="number of nodes")
    add("-g", "--gpus", type=values.gpus_per_node, metavar="A,B,...", help="GPUs of each node, such as 8,2")
    add("-i", "--node-rank", type=values.natural_int, metavar="K", help="this node's number; 0 is the master")
    add("--master-addr", metavar="HOST", help="where node 0 is; node 0 finds its own address")
    add("--master-port", type=values.port, metavar="PORT", help="port of node 0 (29500)")
    add("--interface", metavar="NAME", help="network interface, for gloo and NCCL; found automatically")
    add(
        "--join-timeout",
        type=values.positive_float,
        default=JOIN_TIMEOUT_SECONDS,
        metavar="S",
        help="wait for missing nodes",
    )
    add(
        "--timeout",
        type=values.positive_float,
        default=600.0,
        metavar="S",
        help="limit of a collective, and of a rank that is stopped or has no heartbeat",
    )
    add(
        "--work-timeout",
        type=values.positive_float,
        default=7200.0,
        metavar="S",
        help="limit of one rank's own work, such as a download, that the others wait for",
    )
    add(
        "--secret-file", type=Path, metavar="FILE", help="let in no process without this secret, the same on every node"
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any")
    add(
        "--backend",
        "--distributed-backend",
        choices=("auto", "nccl", "gloo", "mpi", "ucc"),
        default="auto",
        help="collectives",
    )
    add("--oversubscribe", action="store_true", help="let ranks share GPUs over gloo, for study")
    _add_hetseq_flags(parser)


def _add_hetseq_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layout, with HetSeq's and fairseq's flags (instead of -n, -g and -i)").add_argument
    add("--distributed-init-method", metavar="URL", help="where all meet: tcp://HOST:PORT, file:///PATH or env://")
    add("--distributed-world-size", type=values.positive_int, metavar="W", help="processes of all nodes")
    add("--distributed-gpus", type=values.positive_int, metavar="G", help="processes to start here")
    add("--distributed-rank", type=values.natural_int, metavar="R", help="rank of the first process here")
    add("--distributed-no-spawn", action="store_true", help="this process is the one of that rank")
    add(
        *("--device-id", "--local-rank", "--local_rank"),
        type=values.natural_int,
        metavar="D",
        help="GPU of this one process",
    )


def add_batch_flags(parser: argparse.ArgumentParser, global_batch: int) -> None:
    group = parser.add_argument_group("batches (samples per optimizer step; the result does not depend on the layout)")
    either, add = group.add_mutually_exclusive_group().add_argument, group.add_argument
    # Its default is text: argparse takes a number that is the default's own object, as small ones are, for left out.
    batch = str(global_batch)
    either("--global-batch", type=values.positive_int, default=batch, metavar="B", help="over all ranks")
    either("--batch-per-gpu", type=values.positive_int, metavar="B", help="instead: global batch = B x ranks")
    add(
        "--micro-batch",
        type=values.micro_batch,
        metavar="B|A,B,...|auto",
        help="most samples in one forward, on every rank, or on each: 32,32,16 or 8x32,2x16; auto: what fits",
    )
    add(
        "--shares",
        type=values.shares,
        metavar="A,B,...",
        help="each rank's weight in the global batch: 4,4,1 or 8x1,2x0.5",
    )
    add("--balance", choices=("off", "auto"), default="off", help="auto: shares follow the ranks' speeds in training")
    add("--eval-batch", type=values.positive_int, default=1000, metavar="B", help="samples a rank evaluates at once")


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("slow links between the nodes").add_argument
    add(
        "--compress",
        choices=("off", "bf16"),
        default="off",
        help="bf16: exchange gradients (with --sync-every, changes of weights) rounded; changes the result a little",
    )
    add(
        "--sync-every",
        type=values.positive_int,
        metavar="H",
        help="let each node train by itself, and average the nodes' changes every H steps: another optimisation",
    )
    add("--outer-lr", type=values.positive_float, default=1.0, metavar="X", help="of --sync-every's outer step")
    add("--outer-momentum", type=values.probability, default=0.0, metavar="X", help="Nesterov's, of the outer step")


def add_training_flags(
    parser: argparse.ArgumentParser, epochs: int, lr: float, decayed: str = "all weights"
) -> argparse._ArgumentGroup:
    """`decayed` says which weights the trainer's optimizer decays."""
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--epochs", type=values.positive_int, default=epochs, help="passes over the training data")
    add("--max-steps", type=values.positive_int, metavar="S", help="stop after so many optimizer steps")
    add("--lr", type=values.positive_float, default=lr, help="peak learning rate")
    add("--weight-decay", type=values.non_negative_float, default=0.01, help=f"AdamW's, on {decayed}")
    add("--clip-norm", type=values.positive_float, default=math.inf, metavar="X", help="clip the gradient's norm")
    add("--seed", type=values.natural_int, default=0, help="of weights, order, masks and dropout")
    add("--precision", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="fp64 is for proofs")
    on_nan = "end at a gradient that is not finite, or leave its step out"
    add("--on-nan", choices=("stop", "skip"), default="stop", help=on_nan)
    add("--compile", action="store_true", help="torch.compile the model")
    add_outside_flags(parser).add_argument(
        "--elastic",
        type=values.positive_int,
        metavar="MIN",
        help="when ranks are lost, or leave at Ctrl-C, go on with those that are left, at least MIN; let others in",
    )
    return group


def add_outside_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("members that come and go")
    joins = "add this machine, with -g processes, to a run with --elastic: HOST:PORT is in its log, DIR is its folder; "
    joins += "flags that are left out are the run's; waits for --join-timeout"
    group.add_argument("--join", type=values.host_and_port_or_folder, metavar="HOST:PORT|DIR", help=joins)
    group.add_argument(
        "--stop", type=values.host_and_port_or_folder, metavar="HOST:PORT|DIR", help="let that run save and end"
    )
    return group


def add_warmup_flag(group: argparse._ArgumentGroup, default: str) -> None:
    """Its value is for `steps_of`."""
    help = "steps until the peak of --lr; or a part of all, as in 10%%"
    group.add_argument("--warmup-steps", type=values.steps_or_percent, default=default, metavar="S", help=help)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--out-dir", type=Path, metavar="DIR", help="runs/NAME-0001, the next free number, when left out")
    add("--resume", nargs="?", const="auto", metavar="auto|PATH", help="continue from a checkpoint, on any layout")
    add(
        "--save-every",
        type=values.save_every,
        default="15m",
        metavar="500|10m|1h",
        help="steps, minutes or hours between checkpoints; each epoch's end has one too",
    )
    add(
        "--async-save",
        action="store_true",
        help="write checkpoints beside the training; rank 0 needs memory on the CPU for a second copy",
    )
    add("--keep", type=values.positive_int, default=3, metavar="K", help="checkpoints to keep")
    add("--eval-only", action="store_true", help="evaluate the checkpoint of --resume and end")
    add("--log-every", type=values.positive_int, default=1, metavar="S", help="steps between rows of metrics.jsonl")
    add("--no-plot", action="store_true", help="leave out curves.png, which takes a moment at the end")
    add("--tensorboard", action="store_true", help="write TensorBoard files too")
    add(
        "--trace",
        type=values.positive_int,
        metavar="S",
        help="write what every rank does in S steps: trace.json for Perfetto, and trace.png",
    )


# --- values from several flags -----------------------------------------------------------------------------------


def after_change(args: argparse.Namespace, originals: tuple[int, ...], started: int) -> argparse.Namespace:
    """The flags for ranks that were `originals` when the job was started with `started` ranks: with the same global
    batch, and their own shares and micro-batches."""
    changed = argparse.Namespace(**vars(args))
    if getattr(args, "batch_per_gpu", None):
        changed.global_batch, changed.batch_per_gpu = args.batch_per_gpu * started, None
    for name in ("shares", "micro_batch"):
        if isinstance(numbers := getattr(args, name, None), tuple):
            # A process that has joined since has a middling share, and the smallest micro-batch, which fits anywhere.
            other = min(numbers) if name == "micro_batch" else sum(numbers) / len(numbers)
            mine = (numbers[rank] if rank < len(numbers) else other for rank in originals)
            setattr(changed, name, tuple(mine))
    return changed


def global_batch(args: argparse.Namespace, world_size: int) -> int:
    """Samples per optimizer step over all ranks, from --global-batch or --batch-per-gpu."""
    return args.batch_per_gpu * world_size if args.batch_per_gpu else args.global_batch


def micro_batches(args: argparse.Namespace, world_size: int) -> list[int | None]:
    """For each rank, the most samples in one forward, None for all at once; an empty list for `auto`."""
    if args.micro_batch == "auto":
        return []
    return list(args.micro_batch) if isinstance(args.micro_batch, tuple) else [args.micro_batch] * world_size


def eval_batch(args: argparse.Namespace, fitting: Sequence[int | None]) -> int:
    """The samples that a rank evaluates at once, the same on every rank. With `--micro-batch auto` no more than fit on
    each; `fitting` are then the micro-batches that were found."""
    return (
        min([args.eval_batch, *(size for size in fitting if size)]) if args.micro_batch == "auto" else args.eval_batch
    )


def config(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that must not change when a run is resumed: all but those in `may_change`."""
    return {name: plain(value) for name, value in vars(args).items() if name not in args.may_change | NOT_FLAGS}


def steps_of(value: int | float, total_steps: int) -> int:
    """The value of a flag of type `steps_or_percent` as a number of steps."""
    return value if isinstance(value, int) else round(value * total_steps)


def layout_flags(args: argparse.Namespace) -> LayoutFlags:
    """The flags that decide the layout."""
    return LayoutFlags(**{name: getattr(args, name) for name in LAYOUT if name in args})


def join_options(args: argparse.Namespace) -> JoinOptions:
    """How to join. `agreed_flags` are those that must be the same on every node, as a person would type them."""
    compared_as_layout = {"gpus", "nodes"}
    unchecked = args.may_differ | NOT_FLAGS | compared_as_layout
    agreed = {name: value for name, value in vars(args).items() if name not in unchecked}
    return JoinOptions(
        backend=args.backend,
        interface=args.interface,
        oversubscribe=args.oversubscribe,
        join_timeout_seconds=args.join_timeout,
        timeout_seconds=args.timeout,
        work_timeout_seconds=args.work_timeout,
        secret=secret(args.secret_file),
        elastic=getattr(args, "elastic", None),
        flags=_flags(args),
        agreed_flags={f"--{name.replace('_', '-')}": shown(value) for name, value in agreed.items()},
    )


def secret(file: Path | None) -> bytes:
    """What is in --secret-file, else in UNEVEN_DDP_SECRET. Raises UserError for an empty or unreadable file."""
    if file is None:
        if os.environ.get("UNEVEN_DDP_SECRET") == "":
            raise UserError("UNEVEN_DDP_SECRET is set, but empty: give it a value, or unset it")
        return os.environ.get("UNEVEN_DDP_SECRET", "").encode()
    with reading(file, f"--secret-file {file}", may_be_pipe=True):
        found = file.read_bytes().strip()
    if not found:
        raise UserError(f"--secret-file {file} is empty: fill it, for example with `openssl rand -hex 32`")
    return found


def run_options(args: argparse.Namespace, name: str) -> RunOptions:
    """What a run of the trainer `name` writes, and where."""
    typed = {field.name for field in fields(RunOptions)} - {"name", "flags"}
    return RunOptions(
        name=name, flags=_flags(args), **{field: getattr(args, field) for field in typed if field in args}
    )


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """All flags, as JSON types."""
    return {name: plain(value) for name, value in vars(args).items() if name not in NOT_FLAGS}


def shown(value: object) -> str:
    """A flag's value as a person would type it: (8, 2) as 8,2."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def plain(value: object) -> Any:
    """A flag's value as a JSON type. JSON has no infinity and no NaN: these become "inf" and "nan"."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | bool | None) else str(value)
