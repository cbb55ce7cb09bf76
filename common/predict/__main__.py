#!/usr/bin/env python3
"""How long would a step take on these machines, and what would make it faster? Starts nothing.

    python -m common.predict -g 8,2 --speed 8x210,2x120 --gradients 440MB --global-batch 1024 --link 10Gbit,0.1ms
    python -m common.predict --run runs/bert-0001 --link 100Mbit,20ms          # speeds and sizes of a run
    python -m common.predict --run runs/bert-0001 --link 1Gbit,1ms --slow 3=0.25
    python -m common.predict --run runs/bert-0001 --doctor doctor.json         # the link that the doctor has measured
    python -m common.predict --examples                                        # tables for clusters of other people

--speed is in samples a second of forward and backward, for each rank: time a few steps on one GPU of each kind. The
model is in common/predict/step.py. It knows no loading, and no time that the exchange takes from the computing.
From any folder: python common/predict/__main__.py, by its path.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.console import say
from common.errors import ExplainedError, UserError
from common.launch import cli, values
from common.predict import examples, figures
from common.predict.step import Cluster, Way, advice, predict, ways

MOST_SHOWN = 16  # ranks whose speeds are printed one by one


def flags() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=cli.Formatter, allow_abbrev=False)
    parser.add_argument("-g", "--gpus", type=values.gpus_per_node, metavar="A,B,...", help="ranks of each node: 8,2")
    parser.add_argument("--speed", type=values.shares, metavar="A,B,...", help="samples a second by rank: 8x210,2x120")
    parser.add_argument(
        "--fixed-ms", type=values.shares, metavar="A,B,...", help="of a step besides, by rank: loading, the optimizer"
    )
    parser.add_argument("--gradients", type=figures.size, metavar="SIZE", help="4 bytes for each weight: 440MB")
    parser.add_argument("--global-batch", type=values.positive_int, metavar="B", help="samples of a step")
    parser.add_argument(
        "--micro-batches", type=values.positive_int, default=1, metavar="N", help="of a rank in a step: the last counts"
    )
    parser.add_argument("--link", type=figures.link, metavar="RATE,LATENCY", help="between nodes: 1Gbit,0.2ms")
    parser.add_argument(
        "--inside", type=figures.link, metavar="RATE,LATENCY", default="80Gbit,0.02ms", help="within a node"
    )
    parser.add_argument(
        "--slow", type=values.slow_ranks, metavar="RANK=SPEED", help="a rank at a part of its speed: 3=0.25"
    )
    parser.add_argument("--sync-every", type=values.positive_int, default=50, metavar="H", help="for that flag's rows")
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run that has layout, speeds, gradients and batch")
    parser.add_argument("--doctor", type=Path, metavar="FILE", help="what the doctor's --json has printed, for --link")
    parser.add_argument("--examples", action="store_true", help="print tables for 8+2, 4 to 32, and 1,000 GPUs")
    return parser


def main() -> int:
    parser = flags()
    args = parser.parse_args()
    if args.examples:
        say(examples.tables())
        return 0
    try:
        complete(args)
        report(args)
    except ExplainedError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")
    return 0


def complete(args: Namespace) -> None:
    """Take what was not typed from the run and the doctor. Raises UserError for what is missing or does not match."""
    found = figures.of_doctor(args.doctor) if args.doctor else {}
    measured = found.pop("measured", ())
    known = found | (figures.of_run(args.run) if args.run else {})
    for name, value in known.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # An exchange takes another time with another number of ranks, or another link.
    args.measured = measured if (args.gpus, args.link) == (found.get("gpus"), found.get("link")) else ()
    for name in ("gpus", "speed", "gradients", "global_batch"):
        if getattr(args, name) is None:
            flag = "-g" if name == "gpus" else f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is missing: give it, or a run that has it with --run")
    ranks = sum(args.gpus)
    args.fixed_ms = args.fixed_ms or (0.0,) * ranks
    args.speed, args.fixed_ms = (some * ranks if len(some) == 1 else some for some in (args.speed, args.fixed_ms))
    if len(args.fixed_ms) != ranks:
        raise UserError(f"--fixed-ms has {len(args.fixed_ms)} numbers, but -g has {ranks} ranks: give each a number")
    if len(args.speed) != ranks or min(args.speed) <= 0:
        raise UserError(f"--speed has {len(args.speed)} numbers, but -g has {ranks} ranks: give each a number above 0")
    args.slow = args.slow or {}
    if args.slow and max(args.slow) >= ranks:
        raise UserError(f"--slow names rank {max(args.slow)}, but -g has ranks 0 to {ranks - 1}: name one of them")
    parts = [args.slow.get(rank, 1.0) for rank in range(ranks)]
    args.speed = tuple(speed * part for speed, part in zip(args.speed, parts, strict=True))
    args.fixed_ms = tuple(ms / part for ms, part in zip(args.fixed_ms, parts, strict=True))
    if len(args.gpus) > 1 and args.link is None:
        raise UserError("--link is missing: give rate and latency between the nodes, such as 1Gbit,0.2ms, or --doctor")


def report(args: Namespace) -> None:
    link = args.link or args.inside
    fixed = tuple(ms / 1e3 for ms in args.fixed_ms)
    cluster = Cluster(args.gpus, args.speed, fixed, args.inside, link, args.measured)
    sizes = args.global_batch, args.gradients
    offered = ways(cluster, args.sync_every)
    steps = {way: predict(cluster, *sizes, way, args.micro_batches) for way in offered}
    equal = steps[Way()]
    speeds = ", ".join(f"{speed:,.0f}" for speed in args.speed)
    if len(args.speed) > MOST_SHOWN:
        speeds = f"{min(args.speed):,.0f} to {max(args.speed):,.0f}"
    say(f"speeds     {speeds} samples a second by rank; gradients of {args.gradients / 1e6:,.1f} MB")
    names = "step", "computing", "exchange", "other", "waiting"
    width = max(41, *(len(way.flags) for way in offered)) + 2
    lines = [f"{'flags':<{width}}{''.join(f'{name:<11}' for name in names)}times as fast"]
    for way, step in steps.items():
        other = step.seconds - max(step.computing) - step.exchange
        cells = [_ms(one) for one in (step.seconds, max(step.computing), step.exchange, other, max(step.waiting))]
        lines.append(
            f"{way.flags:<{width}}{''.join(f'{cell:<11}' for cell in cells)}{equal.seconds / step.seconds:.2f}"
        )
    say("\n".join(lines))
    say(
        "           step = computing (the slowest rank's) + exchange + other; waiting: the fastest rank for the slowest"
    )
    say(f"advice     {advice(steps)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
