#!/usr/bin/env python3
"""What --async-save, --elastic, --trace and --balance auto cost: the same run with and without, in turns.

    costs.py [--turns 3] [--only async,balance-bert] [--steps 500]

`async`: BERT-small on one rank with a free core, a checkpoint every 10 steps, against no checkpoints. `async-busy`: on
two ranks that need all cores. `mnist` and `bert`: 3+1 ranks with --elastic and nothing that happens, against without.
`mnist-two`: the same of 1+1 ranks, which disturb each other less on two cores. `trace`: all steps of 3+1 ranks, against
none. `balance-mnist` and `balance-bert`: 1+1 ranks of the same speed with --balance auto, against equal shares. Seconds
count from the header to the last line, so that all that a run does is in them, the writing of a trace too; in brackets,
those of the training alone, without evaluations and checkpoints (digits have six steps an epoch, and a checkpoint after
each), and the seconds that all processes have computed.

`turns`: what --elastic adds to a step (the loss beside the gradients) and --balance auto (the ranks' times, exchanged
every 5 to 50 steps), on in half of the steps of one run, so that a machine that is faster at one time than at another
disturbs it less.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from benchmarks.played import PlayedRun
from benchmarks.processes import ended

MNIST, BERT = ROOT / "mnist_ddp" / "mnist-distributed.py", ROOT / "bert_ddp" / "bert-distributed.py"
DIGITS = ["--device", "cpu", "--dataset", "digits", "--global-batch", 256, "--epochs", 10_000, "--max-steps", 1500]
TEXT = ["--device", "cpu", "--dropout", 0, "--vocab-size", 4000, "--global-batch", 16, "--held-out", 0.01]
SMALL = [*TEXT, "--preset", "small", "--sequence-length", 128, "--max-steps", 30, "--keep", 1]
TINY = [*TEXT, "--preset", "tiny", "--sequence-length", 64, "--global-batch", 64, "--max-steps", 150]
BESIDE: dict[str, list] = {
    "no checkpoints": ["--save-every", "10h"],
    "every 10 steps": ["--save-every", 10],
    "beside": ["--save-every", 10, "--async-save"],
}
MEMBERS: dict[str, list] = {"off": [], "--elastic 2": ["--elastic", 2]}
BALANCED: dict[str, list] = {"off": [], "--balance auto": ["--balance", "auto"]}
TRACED: dict[str, list] = {"off": [], "--trace 1500": ["--trace", 1500]}
CASES: dict[str, tuple[Path, tuple[int, ...], list, dict[str, list]]] = {
    "async": (BERT, (1,), SMALL, BESIDE),
    "async-busy": (BERT, (1, 1), SMALL, BESIDE),
    "mnist": (MNIST, (3, 1), DIGITS, MEMBERS),
    "mnist-two": (MNIST, (1, 1), DIGITS, MEMBERS),
    "bert": (BERT, (3, 1), TINY, MEMBERS),
    "trace": (MNIST, (3, 1), DIGITS, TRACED),
    "balance-mnist": (MNIST, (1, 1), DIGITS, BALANCED),
    "balance-bert": (BERT, (1, 1), TINY, BALANCED),
}


def computed() -> float:
    """Seconds of all processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(script: Path, gpus: tuple[int, ...], flags: list, cache: Path) -> tuple[float, float, float]:
    """(seconds of the whole run, seconds of its steps, seconds computed by all processes)."""
    before = computed()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--cache-dir", cache] if script == BERT else []
        run = PlayedRun(script, gpus, Path(folder) / "run", *flags, *more)
        with ended(run.nodes):
            codes = [node.wait() for node in run.nodes]
        said = {text: when for when, line in run.lines for text in ("] files  ", "] done  ") if text in line}
        began = min(when for when, line in run.lines if "] files  " in line)
        if any(codes) or len(said) < 2:
            raise SystemExit(run.said())
        (summary,) = run.rows("summary")
        return said["] done  "] - began, summary["seconds"], computed() - before


IN_TURNS = '''"""The trainer, with something on in half of its steps; notes when each ended, and if it is on next."""

import json
import time

from common.run.log import StepLog
from common.uneven.options.balance import Balancer
from mnist_ddp.train import train as train_always

note, summary, end_step, steps, exchanged = StepLog.note, StepLog.summary, Balancer.end_step, [], []


def note_in_turns(self, step, *rest, **more):
    note(self, step, *rest, **more)
    if not exchanged:
        exchanged.append(self.timer.at_exchange)
    is_on = {way}
    steps.append((time.perf_counter(), is_on))
    if {elastic}:
        self.timer.at_exchange = exchanged[0] if is_on else None  # in the next step


def end_step_in_turns(self, step, work):
    return end_step(self, step, work) if steps and steps[-1][1] else False


def summary_of_turns(self, step, **numbers):
    if self.output:
        (self.output.folder / "steps.json").write_text(json.dumps(steps))
    summary(self, step, **numbers)


StepLog.note, StepLog.summary = note_in_turns, summary_of_turns
if not {elastic}:
    Balancer.end_step = end_step_in_turns


def train(worker, args):
    train_always(worker, args)
'''


STEPS_PER_EPOCH = 6  # of 1,438 digits
TURNS: dict[str, tuple[list, str]] = {  # flags, and in which steps they are on
    "--elastic 2": (["--elastic", 2], "step % 2 == 0"),
    "--balance auto": (["--balance", "auto"], "step // 60 % 2 == 0"),  # it exchanges times every 5 to 50 steps
}


def show_turns(name: str, gpus: tuple[int, ...], steps: int) -> None:
    """Print how much longer a step takes with what `name` adds to it."""
    more, way = TURNS[name]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "turns_ddp"
        package.mkdir()
        (package / "train.py").write_text(IN_TURNS.format(way=way, elastic="elastic" in name))
        script = package / MNIST.name
        script.write_text(MNIST.read_text().replace("mnist_ddp.train:train", "turns_ddp.train:train"))
        run = PlayedRun(script, gpus, Path(folder) / "run", *DIGITS, "--max-steps", steps, "--save-every", "10h", *more)
        with ended(run.nodes):
            codes = [node.wait() for node in run.nodes]
        if any(codes):
            raise SystemExit(run.said())
        ends = json.loads((run.folder / "steps.json").read_text())
    took: dict[bool, list[float]] = {False: [], True: []}
    for step in range(101, len(ends) + 1):  # the first ones warm up
        if step % STEPS_PER_EPOCH > 1:  # the last batch of an epoch is smaller, and before the first it evaluates
            (before, was_on), (now, _) = ends[step - 2], ends[step - 1]
            took[was_on].append(1000 * (now - before))
    without, with_it = (statistics.median(one) for one in took.values())
    # The standard error of a median; without the slowest steps, in which something else has run.
    errors = [1.25 * statistics.stdev(sorted(one)[: -len(one) // 50]) / math.sqrt(len(one)) for one in took.values()]
    print(
        f"turns: {name}, {'+'.join(map(str, gpus))} ranks: {without:.3f} ms a step, with it {with_it:.3f}: "
        f"{with_it / without:.4f} of it, +- {math.hypot(*errors) / without:.4f} "
        f"({len(took[False])} steps without, {len(took[True])} with it)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, help="of each run, in place of its own")
    args = parser.parse_args()
    print(describe())
    if not args.only or "turns" in args.only.split(","):
        for name in TURNS:
            for gpus in (1, 1), (3, 1):
                show_turns(name, gpus, args.steps or 4000)
    with tempfile.TemporaryDirectory() as cache:
        for name, (script, gpus, flags, ways) in CASES.items():
            if args.only and name not in args.only.split(","):
                continue
            found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
            for turn in range(args.turns):
                for way, more in ways.items() if turn % 2 == 0 else reversed(ways.items()):
                    steps = ["--max-steps", args.steps] if args.steps else []
                    found[way].append(seconds(script, gpus, [*flags, *steps, *more], Path(cache)))
            base = next(iter(ways))
            for way, times in found.items():
                pairs = [*zip(times, found[base], strict=True)]
                whole, *parts = (statistics.median(a[part] / b[part] for a, b in pairs) for part in range(3))
                spread = ", ".join(f"{total:.1f} [{training:.1f}, {cpu:.1f}]" for total, training, cpu in times)
                ratios = ", ".join(f"{part:.3f}" for part in parts)
                print(f"{name}: {way}: {spread} s; {whole:.3f} [{ratios}] of {base}", flush=True)


if __name__ == "__main__":
    main()
