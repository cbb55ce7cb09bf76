"""Combinations of flags that cannot work, refused before anything is started. Imports no torch."""

import argparse

from common.errors import UserError
from common.launch.layout import Layout
from common.launch.reading import count


def check_training(args: argparse.Namespace, layout: Layout) -> None:
    """Refuse combinations of flags that cannot work, before anything is started. Raises UserError."""
    if args.eval_only and args.resume is None:
        raise UserError(
            "--eval-only has nothing to evaluate: name a checkpoint with --resume PATH, or --resume for the last"
        )
    if "compress" in args:
        _check_links(args)
    if args.elastic:
        _check_elastic(args, layout)
    for flag, numbers in (("--shares", args.shares), ("--micro-batch", args.micro_batch)):
        if isinstance(numbers, tuple) and len(numbers) != layout.world_size:
            raise UserError(
                f"{flag} has {count(len(numbers), 'number')}, but the job has {count(layout.world_size, 'rank')}: "
                "give each rank one"
            )


def _check_elastic(args: argparse.Namespace, layout: Layout) -> None:
    """Raises UserError where a loss could not be survived."""
    if layout.launched:
        raise UserError(
            f"--elastic {args.elastic} under {layout.source}, which ends a job that has lost a process: leave it out, "
            "and let the restarted job go on with --resume; or start with -n, -g and -i"
        )
    if not (layout.hosts_store and layout.init_method.startswith("tcp://")):
        raise UserError(f"--elastic {args.elastic} needs a tcp:// address to meet at, not {layout.init_method}")
    if args.elastic > layout.world_size:
        raise UserError(
            f"--elastic {args.elastic}, but the job has {count(layout.world_size, 'rank')}: give how many must be left"
        )
    if getattr(args, "sync_every", None):
        raise UserError("--elastic with --sync-every: the nodes' own weights would be lost with them: leave one out")


def _check_links(args: argparse.Namespace) -> None:
    if args.compress != "off" and args.precision == "fp64":
        raise UserError(
            f"--compress {args.compress} with --precision fp64: fp64 is for proofs, which are exact: leave one out"
        )
    if args.on_nan == "skip" and args.sync_every:
        raise UserError("--on-nan skip with --sync-every: what it keeps of a step would be spoilt: leave one out")
    for name, value, default in (("outer-lr", args.outer_lr, 1.0), ("outer-momentum", args.outer_momentum, 0.0)):
        if value != default and not args.sync_every:
            raise UserError(f"--{name} {value} without --sync-every, whose outer step it is of: give both")
    if args.sync_every and args.precision == "fp16":
        raise UserError("--sync-every with --precision fp16: the nodes' loss scales would differ: use bf16")
