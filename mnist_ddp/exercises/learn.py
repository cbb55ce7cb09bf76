#!/usr/bin/env python3
"""Ten small programs with a mistake that people really make. Find it, mend it, and go on to the next one.

    learn.py                # run the next exercise that is not solved yet: on one rank, and on 3+1
    learn.py --hint         # a hint for it; again: the next hint
    learn.py --number 4     # another one
    learn.py --list         # the score
    learn.py --restart      # forget the score, and run the first one

You edit the file that it names. Solutions are in solutions/, for when you have found yours, or have had enough.
`git checkout mnist_ddp/exercises` brings the mistakes back, and --restart begins with the first one again.
"""

import argparse
import ast
import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
SCORE = Path("runs") / "learn.json"
NODES = (3, 1)  # ranks of each node
IDLE_SECONDS = 5.0  # in which all ranks together work for less than BUSY: they wait for one another for ever
BUSY = 0.2  # seconds of CPU time; one that waits may use a little
WANTS_TO_RUN = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)  # also where the machine gives it no time
LIMIT = 120.0  # seconds of a run
STACK = re.compile(r"most recent call first.*in <module>\n", re.DOTALL)  # a whole one, as faulthandler writes it
STACK_SECONDS = 10.0  # for a rank to write where it waits
SAME = 1e-9


@dataclass
class Played:
    """What the ranks of a run have said."""

    said: list[str]  # by rank
    codes: list[int | None]  # exit codes by rank; None for one that did not end
    stopped_in: dict[int, int]  # rank that did not end -> the line of the program in which it was stopped
    idle: bool  # they waited for one another; else they were stopped after LIMIT seconds

    @property
    def output(self) -> str:
        return "".join(self.said)

    def numbers(self, name: str) -> list[float]:
        """The numbers in lines such as "loss 2.31"."""
        return [float(found) for found in re.findall(rf"^{name} (\S+)$", self.output, re.MULTILINE)]


@dataclass
class Exercise:
    """What is wrong with `alone` (one rank) or `uneven` (3+1), as a sentence; None where nothing is."""

    name: str
    check: Callable[[Played, Played], str | None]
    hints: tuple[str, ...]

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.py"


def same_losses(alone: Played, uneven: Played) -> str | None:
    """The usual check: each loss is that of one process."""
    expected, found = alone.numbers("loss"), uneven.numbers("loss")
    if not expected or len(expected) != len(found):
        return f"one process has printed {len(expected)} losses, and 3+1 ranks {len(found)}"
    for step, (wanted, one) in enumerate(zip(expected, found, strict=True), start=1):
        if not abs(wanted - one) <= SAME:
            times = f"{one / wanted:.6g} times as much" if wanted else "another one"
            return f"the loss of step {step} is {wanted:.9f} on one process, and {one:.9f} on 3+1 ranks, {times}"
    return None


def orders_differ(alone: Played, uneven: Played) -> str | None:
    orders = re.findall(r"^first samples \d+ (.*)$", uneven.output, re.MULTILINE)
    if len(orders) < 3:
        return "the first samples of three epochs are not printed any more"
    return None if len(set(orders)) == len(orders) else f"two epochs begin with the same samples: {orders[0]}"


def same_losses_and_new_noise(alone: Played, uneven: Played) -> str | None:
    noises = re.search(r"^noises of 4 images in 2 epochs: (\d+) are different$", uneven.output, re.MULTILINE)
    if not noises:
        return "the line that counts different noises is gone"
    if noises[1] != "8":
        return f"4 images in 2 epochs must get 8 different noises, and get {noises[1]}"
    return same_losses(alone, uneven)


def each_image_once(alone: Played, uneven: Played) -> str | None:
    wanted, found = (re.findall(r"right \d+ of \d+", played.output) for played in (alone, uneven))
    if found and wanted and found[0] == wanted[0] and found[0].endswith(" of 359"):
        return None
    said = " and ".join(
        f'"{" ".join(one) or "nothing"}" on {where}' for one, where in ((wanted, "one process"), (found, "3+1 ranks"))
    )
    return f"it says {said}; there are 359 images (the network is not trained: few are right)"


def one_writer(alone: Played, uneven: Played) -> str | None:
    writers = uneven.output.count("writes the checkpoint")
    said = ", ".join(sorted(uneven.output.splitlines())[:2]) or "nothing is printed"
    return None if writers == 1 else f"the checkpoint is written by {writers} ranks, not by one: {said}"


def own_devices(alone: Played, uneven: Played) -> str | None:
    taken = sorted(re.findall(r"takes (cuda:\d+) of (node \d+)", uneven.output))
    wanted = sorted((f"cuda:{gpu}", f"node {node}") for node, gpus in enumerate(NODES) for gpu in range(gpus))
    return None if taken == wanted else f"the GPUs that are taken: {', '.join(' of '.join(one) for one in taken)}"


def same_accuracy(alone: Played, uneven: Played) -> str | None:
    wanted, found = alone.numbers("accuracy"), uneven.numbers("accuracy")
    if wanted and wanted == found:
        return None
    said = [", ".join(map(str, one)) or "not printed" for one in (wanted, found)]
    return f"the accuracy on one process is {said[0]}, and {said[1]} on 3+1 ranks"


EXERCISES = (
    Exercise("01_mean_of_means", same_losses, (
        "Rank 3 holds 16 of 256 samples. By what does its cross_entropy divide their sum?",
        "DDP divides the sum of the ranks' gradients by 4. What must each rank's loss be, so that the result is the "
        "sum over all samples, divided by 256?",
        'reduction="sum", len(batch), and ranks. The line that prints the loss divides by ranks, too: does it have to?',
    )),
    Exercise("02_forgotten_set_epoch", orders_differ, (
        "The sampler shuffles. With what seed, in epoch 0 and in epoch 1?",
        "Look for a method of DistributedSampler that takes an epoch.",
    )),
    Exercise("03_forward_outside_no_sync", same_losses, (
        "Ranks 0 to 2 have three micro-batches, rank 3 has one. How many exchanges does each of them take part in?",
        "A forward prepares the exchange of the backward that follows, or prepares none; the second forward of all "
        "also agrees with the other ranks on the order of gradients. Which of the two lines is inside of no_sync()?",
    )),
    Exercise("04_padding_in_evaluation", each_image_once, (
        "359 is not a multiple of 4. What does DistributedSampler do with the rest (drop_last=False)?",
        "An evaluation has no exchange in each batch, so the ranks may have different numbers of images. Any iterable "
        "of indices may be a `sampler`.",
    )),
    Exercise("05_local_rank_0", one_writer, (
        "What is local_rank on the only process of node 1?",
        "Which number is 0 on one process of the whole run?",
    )),
    Exercise("06_device_of_a_rank", own_devices, (
        "4 ranks on 2 nodes: what is gpus_per_node? How many has each node really?",
        "The launcher tells each process its number on its node.",
    )),
    Exercise("07_a_collective_that_one_rank_skips", same_accuracy, (
        "Which ranks call evaluate()? What does it contain?",
        "A collective (all_reduce, broadcast, barrier) is for all ranks or for none.",
    )),
    Exercise("08_batch_norm", same_losses, (
        "Over which samples does BatchNorm take its mean on rank 3, and on one process?",
        "A layer that normalises each sample by itself does not mind how many there are.",
    )),
    Exercise("09_unseeded_augmentation", same_losses_and_new_noise, (
        "The generator goes on with each call. After how many calls does rank 3 draw the noise of its first image, and "
        "after how many does one process?",
        "A torch.Generator of its own for each image, with a seed that is made of ...",
        "With SEED + epoch + sample, sample 1 of epoch 0 and sample 0 of epoch 1 share a seed. Leave room for all "
        "samples between two epochs.",
    )),
    Exercise("10_checkpoint_without_the_optimizer", same_losses, (
        "The first two losses are right, and the third. Why is the third right?",
        "optimizer.state_dict()",
    )),
)  # fmt: skip


# --- running --------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import once what each rank would spend a second on."""
    import torch
    import torch._dynamo  # DDP imports it
    import torch.distributed
    from sklearn.datasets import load_digits

    load_digits()
    torch.set_num_threads(1)


def play(script: Path, nodes: tuple[int, ...]) -> Played:
    """Run a script once for each rank, as torchrun would on these nodes, but without the seconds of the import."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, processes = multiprocessing.get_context("fork"), []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(sum(nodes))]
        for node, count in enumerate(nodes):
            for local_rank in range(count):
                rank = sum(nodes[:node]) + local_rank
                environ: dict[str, object] = {
                    "RANK": rank,
                    "WORLD_SIZE": sum(nodes),
                    "LOCAL_RANK": local_rank,
                    "GROUP_RANK": node,
                }
                environ |= {"GROUP_WORLD_SIZE": len(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                process = context.Process(target=_be, args=(script, environ, logs[rank]))
                process.start()
                processes.append(process)
        idle = _idle_before_they_end(processes)
        codes = [one.exitcode for one in processes]
        asked = []
        for one, log in zip(processes, logs, strict=True):
            if one.is_alive() and one.pid:
                os.kill(one.pid, signal.SIGUSR1)  # it writes its stack, see _be
                asked.append(log)
        ends = time.monotonic() + STACK_SECONDS
        while not all(STACK.search(log.read_text()) for log in asked) and time.monotonic() < ends:
            time.sleep(0.05)
        for one in processes:
            one.kill()
            one.join()
        said = [log.read_text() for log in logs]
        stacks = {
            rank: re.findall(rf'File "{re.escape(str(script))}", line (\d+)', said[rank]) for rank in range(len(said))
        }
        stopped_in = {rank: int(lines[0]) for rank, lines in stacks.items() if codes[rank] is None and lines}
        return Played(said, codes, stopped_in, idle)


def _idle_before_they_end(processes: list) -> bool:
    """Wait until all have ended, or LIMIT is over: False. True as soon as none of them does anything any more."""
    ends = time.monotonic() + LIMIT
    used: dict[int, float] = {}  # pid -> CPU time; that of a process that has ended stays
    before, since, looks, wanted = 0.0, time.monotonic(), 0, 0
    while any(one.is_alive() for one in processes) and time.monotonic() < ends:
        time.sleep(0.1)
        states = []
        for one in processes:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(one.pid)
                times = process.cpu_times()
                used[one.pid] = max(used.get(one.pid, 0.0), times.user + times.system)
                states.append(process.status())
        looks, wanted = looks + 1, wanted + any(state in WANTS_TO_RUN for state in states)
        if time.monotonic() - since > IDLE_SECONDS:
            if sum(used.values()) - before < BUSY and wanted < looks / 4:
                return True
            before, since, looks, wanted = sum(used.values()), time.monotonic(), 0, 0
    return False


def _be(script: Path, environ: dict[str, object], log: Path) -> None:
    """What `python SCRIPT` does as one rank, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update({name: str(value) for name, value in environ.items()})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)
    sys.path.insert(0, str(HERE))
    runpy.run_path(str(script), run_name="__main__")
    time.sleep(0.1)  # for the threads of torch: a process that ends at once may abort


def judge(exercise: Exercise, script: Path) -> str | None:
    """What is wrong; None when the exercise is solved."""
    alone, uneven = play(script, (1,)), play(script, NODES)
    for name, played in (("one process", alone), ("3+1 ranks", uneven)):
        failed = [rank for rank, code in enumerate(played.codes) if code]
        if failed:
            last = played.said[failed[0]].strip().splitlines()[-1:] or ["nothing"]
            return f"on {name}, rank {failed[0]} has failed. It says: {last[0]}"
        if None in played.codes:
            places = ", ".join(f"rank {rank} in line {line}" for rank, line in played.stopped_in.items())
            found = "ranks wait for ever" if played.idle else f"ranks have not ended after {LIMIT:.0f} seconds"
            return f"on {name}, {found}: {places}"
    return exercise.check(alone, uneven)


# --- the score ------------------------------------------------------------------------------------------------------


def read_score() -> dict:
    try:
        return json.loads(SCORE.read_text())
    except (OSError, ValueError):
        return {"solved": [], "hints": {}}


def write_score(score: dict) -> None:
    SCORE.parent.mkdir(exist_ok=True)
    SCORE.write_text(json.dumps(score))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hint", action="store_true", help="a hint for the next exercise; again: the next hint")
    parser.add_argument("--number", type=int, choices=range(1, len(EXERCISES) + 1), help="this exercise")
    parser.add_argument("--list", action="store_true", help="which are solved")
    parser.add_argument("--restart", action="store_true", help="forget which are solved, and begin anew")
    args = parser.parse_args()
    if args.restart:
        SCORE.unlink(missing_ok=True)
    score = read_score()
    open_ones = [one for one in EXERCISES if one.name not in score["solved"]]
    if args.list or not (open_ones or args.number):
        for one in EXERCISES:
            hints = score["hints"].get(one.name, 0)
            state = "solved" if one.name in score["solved"] else "open"
            print(f"{state:8}{one.name}" + f"  ({hints} hint{'s' * (hints > 1)})" * bool(hints))
        print(f"{len(EXERCISES) - len(open_ones)} of {len(EXERCISES)} solved")
        if not open_ones:
            print("Go on with docs/labs.md. --number 4 runs one again; --restart begins with the first one.")
        return 0
    exercise = EXERCISES[args.number - 1] if args.number else open_ones[0]
    path = exercise.path.relative_to(Path.cwd()) if exercise.path.is_relative_to(Path.cwd()) else exercise.path
    if args.hint:
        given = min(score["hints"].get(exercise.name, 0) + 1, len(exercise.hints))
        score["hints"][exercise.name] = given
        write_score(score)
        print(f"{path}, hint {given} of {len(exercise.hints)}: {exercise.hints[given - 1]}")
        return 0
    print(f"{path}: it runs on one process, then on 3+1 ranks, for some ten seconds", flush=True)
    prepare()
    problem = judge(exercise, exercise.path)
    if problem:
        print(f"    {problem}.\nMend the file and run this again; --hint gives a hint.")
        return 1
    score["solved"] = sorted({*score["solved"], exercise.name})
    write_score(score)
    solution = HERE / "solutions" / path.name
    why = " ".join((ast.get_docstring(ast.parse(solution.read_text())) or "").split())
    print(
        f"    solved, {len(score['solved'])} of {len(EXERCISES)}. {why}\nA solution is in {path.parent}/solutions, too."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
