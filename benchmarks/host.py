#!/usr/bin/env python3
"""The host's part of a step: a whole trainer and minimal.py's loop beside a bare DDP loop, in turns in one process.

    host.py [--case mlp,bert,mnist] [--ranks 1,2] [--runs 1] [--turns 7] [--seconds 1.5] [--balance auto]

Where a step has little to compute, what the host does for it decides. `bert` has the 202 parameters of BERT-base at a
width of 8, `mlp` has 4, `mnist` is the trainer's network on 256 images; `bert-tiny` and `minilm` (--case) are as large
as what `make bert` pretrains, and half of what people fine-tune. All loops have the same batches, fused AdamW
and schedule; `bare` is DDP around them, `wrapper` the loop of mnist_ddp/minimal.py, `trainer` that of
mnist_ddp/train.py with its log. Each rank has a core of its own. The parts are microseconds of the median turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.launch import cli, start

BATCHES = {"mlp": 32, "bert": 8, "mnist": 256, "bert-tiny": 64, "minilm": 32}
# layers, width, heads, width of the dense layers, vocabulary, length of a sequence
BERTS = {"bert": (12, 8, 2, 8, 16, 4), "bert-tiny": (2, 128, 2, 512, 4000, 64), "minilm": (6, 384, 12, 1536, 4000, 32)}
SAMPLES = {"mlp": 8_000_000}  # of an epoch that never ends
MOST_STEPS = 1_000_000
WARM_UP = 20  # steps of each loop
BLOCKS = 10  # of each loop in a turn
LOOPS = ("bare", "wrapper", "trainer")


def parser() -> ArgumentParser:
    flags = cli.parser(__doc__)
    cli.add_batch_flags(flags, global_batch=256)
    cli.add_link_flags(flags)
    cli.add_training_flags(flags, epochs=1, lr=1e-3)
    cli.add_output_flags(flags)
    add_own_flags(flags)
    return flags


def add_own_flags(flags: ArgumentParser) -> None:
    flags.add_argument("--case", default="mlp,bert,mnist")
    flags.add_argument("--ranks", default="1,2")
    flags.add_argument("--runs", type=int, default=1, help="each of new processes, whose memory lies elsewhere")
    flags.add_argument("--turns", type=int, default=7, help="of a run")
    flags.add_argument("--seconds", type=float, default=1.5, help="of a turn")


def samples(case: str) -> int:
    return SAMPLES.get(case, 1_000_000)


def network(case: str) -> tuple[Any, Any, Callable]:
    """(a network, a data set whose batches are tuples of tensors, the summed loss)."""
    import torch
    from torch.nn.functional import cross_entropy

    from common.uneven.loading import BatchedDataset

    torch.manual_seed(0)
    if case in BERTS:
        from transformers import BertConfig, BertForMaskedLM

        names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
        *sizes, words, length = BERTS[case]
        size = dict(zip(names, (*sizes, words), strict=True))
        net: Any = BertForMaskedLM(BertConfig(**size, max_position_embeddings=length, hidden_dropout_prob=0.0))
        inputs, labels = torch.randint(words, (4096, length)), torch.randint(words, (4096, length))
    elif case == "mlp":
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
        inputs, labels = torch.randn(4096, 16), torch.randint(16, (4096,))
    else:
        from mnist_ddp.model import ConvNet

        net, inputs, labels = ConvNet(), torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,))

    class Samples(BatchedDataset):
        def __len__(self) -> int:
            return samples(case)

        def get_batch(self, indices: list[int]) -> Any:
            chosen = torch.tensor(indices, dtype=torch.int64) % len(inputs)
            return inputs[chosen], labels[chosen]

    def compute_loss(model: Any, batch: Any) -> Any:
        scores = model(batch[0]).logits.flatten(0, 1) if case in BERTS else model(batch[0])
        return cross_entropy(scores, batch[1].flatten(), reduction="sum")

    return net, Samples(), compute_loss


class Laps:
    """Seconds by part of a turn."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


def update(optimizer: Any, scheduler: Any, lap: Laps) -> None:
    optimizer.step()
    lap("optimizer")
    scheduler.step()
    lap("scheduler")
    optimizer.zero_grad()
    lap("zero_grad")


def bare_loop(net: Any, dataset: Any, compute_loss: Callable, args: Namespace, lap: Laps) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net)
    optimizer, scheduler = recipe(model)
    order = torch.randperm(samples(args.case))
    each, rank = args.global_batch // dist.get_world_size(), dist.get_rank()
    for begin in range(rank * each, len(order), args.global_batch):
        batch = dataset.get_batch(order[begin : begin + each].tolist())
        lap("loader")
        loss = compute_loss(model, batch) / each
        lap("forward")
        loss.backward()
        lap("backward")
        update(optimizer, scheduler, lap)
        yield


def wrapper_loop(net: Any, dataset: Any, compute_loss: Callable, args: Namespace, lap: Laps) -> Iterator[None]:
    from common.uneven import ddp
    from common.uneven.global_batches import GlobalBatchLoader

    batches = GlobalBatchLoader(dataset, args.global_batch)
    model = ddp.wrap(net, batches, compute_loss, pad_empty_batch=args.case in BERTS)
    optimizer, scheduler = recipe(model)
    for batch in batches:
        lap("loader")
        for micro, is_last in batch.micro_batches():
            with model.no_sync(enabled=not is_last):
                lap("guards")
                loss = compute_loss(model, micro) / batch.global_count
                lap("forward")
                loss.backward()
                lap("backward")
        lap("guards")
        update(optimizer, scheduler, lap)
        yield


def trainer_loop(run: Any, net: Any, dataset: Any, compute_loss: Callable, lap: Laps) -> Iterator[None]:
    batches = run.global_batches(dataset)
    optimizer, scheduler = recipe(net)
    run.resume(net, optimizer=optimizer, scheduler=scheduler)
    model = run.wrap(net, compute_loss, pad_empty_batch=run.args.case in BERTS)
    while not run.is_done:
        lap("due")
        batch = next(batches)
        lap("loader")
        for micro, is_last in batch.micro_batches():
            with model.no_sync(enabled=not is_last):
                lap("guards")
                with run.autocast():
                    loss_sum = compute_loss(model, micro)
                lap("forward")
                run.backward(loss_sum / batch.global_count)
                lap("backward")
        lap("guards")
        run.optimizer_step(optimizer)
        lap("optimizer")
        scheduler.step()
        lap("scheduler")
        optimizer.zero_grad()
        lap("zero_grad")
        run.end_step()
        lap("log")
        yield


def recipe(model: Any) -> tuple[Any, Any]:
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import OneCycleLR

    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    return optimizer, OneCycleLR(optimizer, 1e-3, total_steps=MOST_STEPS)


def measure(worker: Any, args: Namespace) -> None:
    """What each rank runs: all loops in turns. Rank 0 writes each turn's microseconds a step, and those of parts."""
    import torch.distributed as dist

    from common.run import Run

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker.local_rank % len(cores)]})
    warnings.filterwarnings("ignore", message="an optimizer trains parameters")  # the bare loop's
    args.global_batch = BATCHES[args.case]
    with Run(worker, args, name="host") as run:
        laps = {loop: Laps() for loop in LOOPS}
        loops: dict[str, Iterator[None]] = {
            "bare": bare_loop(*network(args.case), args, laps["bare"]),
            "wrapper": wrapper_loop(*network(args.case), args, laps["wrapper"]),
            "trainer": trainer_loop(run, *network(args.case), laps["trainer"]),
        }
        for loop in loops.values():
            for _ in range(WARM_UP):
                next(loop)
        began = time.perf_counter()
        for _ in range(WARM_UP):
            next(loops["bare"])
        known = [(time.perf_counter() - began) / WARM_UP]
        dist.broadcast_object_list(known)
        steps = max(3, int(args.seconds / BLOCKS / known[0]))  # of a block
        for one in laps.values():
            one.seconds.clear()
        took: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        parts: dict[str, list[dict[str, float]]] = {loop: [] for loop in LOOPS}
        for _ in range(args.turns):
            seconds = dict.fromkeys(LOOPS, 0.0)
            for block in range(BLOCKS):  # short ones, because the machine is faster at one time than at another
                for loop in LOOPS if block % 2 == 0 else reversed(LOOPS):
                    dist.barrier()
                    laps[loop].last = began = time.perf_counter()
                    for _ in range(steps):
                        next(loops[loop])
                    seconds[loop] += time.perf_counter() - began
            for loop in LOOPS:
                took[loop].append(seconds[loop] / (BLOCKS * steps) * 1e6)
                each = laps[loop].seconds.items()
                parts[loop].append({part: all_of / (BLOCKS * steps) * 1e6 for part, all_of in each})
                laps[loop].seconds.clear()
        if worker.is_main:
            (Path(args.out_dir) / "found.json").write_text(json.dumps({"took": took, "parts": parts}))
        run.total_steps = run.step


def run_once(case: str, ranks: int, args: Namespace, more: list[str]) -> dict[str, dict[str, list]]:
    """What `measure` writes, of new processes."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-g", ranks, "--device", "cpu", "--case", case, "--out-dir", folder, "--save-every", "10h"]
        flags += ["--turns", args.turns, "--seconds", args.seconds, *more]
        command = [sys.executable, __file__, *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"host.py: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads((Path(folder) / "found.json").read_text())


def show(case: str, ranks: int, args: Namespace, more: list[str]) -> None:
    runs = [run_once(case, ranks, args, more) for _ in range(args.runs)]
    took, parts = (
        {loop: [turn for one in runs for turn in one[what][loop]] for loop in LOOPS} for what in ("took", "parts")
    )
    names = list(dict.fromkeys(part for loop in reversed(LOOPS) for turn in parts[loop] for part in turn))
    for loop in LOOPS:
        ratio = statistics.median(a / b for a, b in zip(took[loop], took["bare"], strict=True))
        cells = [f"{statistics.median(turn.get(part, 0.0) for turn in parts[loop]):.0f}" for part in names]
        head = "| case | ranks | loop | µs a step | of bare | " + " | ".join(names) + " |"
        if loop == "bare":
            print(f"{head}\n{'| --- ' * (head.count('|') - 1)}|")
        time_us = statistics.median(took[loop])
        print(f"| {case} | {ranks} | {loop} | {time_us:.0f} | {ratio:.2f} | {' | '.join(cells)} |", flush=True)
    if args.runs > 1:
        each = [
            statistics.median(a / b for a, b in zip(one["took"]["trainer"], one["took"]["bare"], strict=True))
            for one in runs
        ]
        print(f"\nThe trainer's ratio by run: {' '.join(f'{ratio:.2f}' for ratio in each)}")
    print()


def main() -> None:
    from benchmarks.machine import describe

    own = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_own_flags(own)
    args, more = own.parse_known_args()  # `more` are the trainer's
    for case in args.case.split(","):
        for ranks in map(int, args.ranks.split(",")):
            show(case, ranks, args, more)
    print(f"Medians of {args.runs * args.turns} turns in {args.runs} runs. {describe()}")


if __name__ == "__main__":
    if "-g" in sys.argv:  # as `show` starts it
        start.main(parser(), "benchmarks.host:measure", cli.check_training)
    else:
        main()
