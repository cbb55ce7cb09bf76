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
from argparse import Namespace
from pathlib import Path

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.console import say
from common.errors import ExplainedError, UserError
from common.launch import values
from common.launch.parser import Parser
from common.predict import examples, figures
from common.predict.step import Cluster, Way, advice, predict, ways

MOST_SHOWN = 16  # ranks whose speeds are printed one by one


def flags() -> Parser:
    parser = Parser(__doc__)
    add, rate, by_rank = parser.add_argument, "RATE,LATENCY", "A,B,..."
    add("-g", "--gpus", type=values.gpus_per_node, metavar=by_rank, help="ranks of each node: 8,2")
    add("--speed", type=values.shares, metavar=by_rank, help="samples a second by rank: 8x210,2x120")
    fixed = "of a step besides, by rank: loading, the optimizer"
    add("--fixed-ms", type=values.shares, metavar=by_rank, help=fixed)
    add("--gradients", type=figures.size, metavar="SIZE", help="4 bytes for each weight: 440MB")
    add("--global-batch", type=values.positive_int, metavar="B", help="samples of a step")
    micro = "of a rank in a step: the last counts"
    add("--micro-batches", type=values.positive_int, default=1, metavar="N", help=micro)
    add("--link", type=figures.link, metavar=rate, help="between nodes: 1Gbit,0.2ms")
    add("--inside", type=figures.link, metavar=rate, default="80Gbit,0.02ms", help="within a node")
    add("--slow", type=values.slow_ranks, metavar="RANK=SPEED", help="a rank at a part of its speed: 3=0.25")
    add("--sync-every", type=values.positive_int, default=50, metavar="H", help="for that flag's rows")
    add("--run", type=Path, metavar="DIR", help="a run that has layout, speeds, gradients and batch")
    add("--doctor", type=Path, metavar="FILE", help="what the doctor's --json has printed, for --link")
    add("--examples", action="store_true", help="print tables for 8+2, 4 to 32, and 1,000 GPUs")
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
    ranks, slow = sum(args.gpus), args.slow or {}
    fixed, speeds = (some * ranks if len(some) == 1 else some for some in (args.fixed_ms or (0.0,), args.speed))
    if len(fixed) != ranks:
        raise UserError(f"--fixed-ms has {len(fixed)} numbers, but -g has {ranks} ranks: give each a number")
    if len(speeds) != ranks or min(speeds) <= 0:
        raise UserError(f"--speed has {len(speeds)} numbers, but -g has {ranks} ranks: give each a number above 0")
    if max(slow, default=0) >= ranks:
        raise UserError(f"--slow names rank {max(slow)}, but -g has ranks 0 to {ranks - 1}: name one of them")
    args.speed = tuple(speed * slow.get(rank, 1.0) for rank, speed in enumerate(speeds))
    args.fixed_ms = tuple(ms / slow.get(rank, 1.0) for rank, ms in enumerate(fixed))
    if len(args.gpus) > 1 and args.link is None:
        raise UserError("--link is missing: give rate and latency between the nodes, such as 1Gbit,0.2ms, or --doctor")


def report(args: Namespace) -> None:
    fixed, sizes = tuple(ms / 1e3 for ms in args.fixed_ms), (args.global_batch, args.gradients)
    cluster = Cluster(args.gpus, args.speed, fixed, args.inside, args.link or args.inside, args.measured)
    steps = {way: predict(cluster, *sizes, way, args.micro_batches) for way in ways(cluster, args.sync_every)}
    speeds = ", ".join(f"{speed:,.0f}" for speed in args.speed)
    if len(args.speed) > MOST_SHOWN:
        speeds = f"{min(args.speed):,.0f} to {max(args.speed):,.0f}"
    say(f"speeds     {speeds} samples a second by rank; gradients of {args.gradients / 1e6:,.1f} MB")
    rows = [["flags", "step", "computing", "exchange", "other", "waiting", "times as fast"]]
    for way, step in steps.items():
        other = step.seconds - max(step.computing) - step.exchange
        seconds = step.seconds, max(step.computing), step.exchange, other, max(step.waiting)
        cells = [f"{one * 1e3:,.1f} ms" for one in seconds]
        rows.append([way.flags, *cells, f"{steps[Way()].seconds / step.seconds:.2f}"])
    width = max(41, *(len(way.flags) for way in steps)) + 2
    for flags, *cells, times in rows:
        say(f"{flags:<{width}}{''.join(f'{cell:<11}' for cell in cells)}{times}")
    meaning = "step = computing (the slowest rank's) + exchange + other; waiting: the fastest rank for the slowest"
    say(f"           {meaning}\nadvice     {advice(steps)}")


if __name__ == "__main__":
    sys.exit(main())
