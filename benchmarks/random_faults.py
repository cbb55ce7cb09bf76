#!/usr/bin/env python3
"""Many random faults in one long run with --elastic: its weights, and the memory, descriptors and threads it holds.

    random_faults.py [--faults 200] [--seed 1] [--picture docs/random-faults.png]

The nodes of `-n 3 -g 2,1,1` run on this machine, in float64. The seed draws the events: after which step, whom, and
what: a worker, a supervisor or all of a node ended by SIGKILL, a worker by SIGSEGV, a worker stopped, a machine that
joins with one or two processes, one that leaves, as at Ctrl-C. There are at most eight ranks. A quarter of the events
comes within the steps or the joining right after the one before. A node whose supervisor has ended, or that has left a
worker out, is started again a moment later. A majority that can go on is always left. Compares all losses and the
final weights with those of an undisturbed run. About forty minutes for 200 faults on two cores.
"""

import argparse
import collections
import contextlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil
from safetensors.torch import load_file

from benchmarks.machine import describe
from benchmarks.played import PROCESS_ENDED, PlayedRun
from common.record.metrics import read_metrics

GPUS = (2, 1, 1)
FLAGS = ["--device", "cpu", "--dataset", "digits", "--precision", "fp64", "--global-batch", 256, "--epochs", 100_000]
FLAGS += ["--timeout", 5, "--join-timeout", 60]
FLAGS += ["--lr", "1e-4"]  # more makes rounding grow in so long a run, on any layout: see docs/faults.md
STEPS_BETWEEN = (150, 450)
STEPS_SOON = (0, 20)
KINDS = ("kill worker", "segv worker", "stop worker", "kill supervisor", "kill node", "join", "leave")
WEIGHTS = (4, 1, 2, 2, 3, 5, 3)
MOST_RANKS = 8
STALLED_SECONDS = 120.0
SCRIPT = ROOT / "mnist_ddp" / "mnist-distributed.py"


@dataclass
class Fault:
    """Drawn before the run begins."""

    steps_later: int  # than the fault before
    what: str
    number: int  # which of the nodes that are there, and of its workers


@dataclass
class Life:
    """What one process has held: (seconds, MB, descriptors, threads)."""

    role: str
    held: list[tuple[float, float, int, int]] = field(default_factory=list)


def draw(count: int, seed: int) -> list[Fault]:
    chance = random.Random(seed)
    return [
        Fault(
            chance.randint(*(STEPS_SOON if chance.random() < 0.25 else STEPS_BETWEEN)),
            chance.choices(KINDS, WEIGHTS)[0],
            chance.randrange(1000),
        )
        for _ in range(count)
    ]


class Battered(PlayedRun):
    def __init__(self, folder: Path, total_steps: int):
        super().__init__(SCRIPT, GPUS, folder, "--elastic", 1, "--max-steps", total_steps, *FLAGS)
        self.began, self.lives = time.monotonic(), dict[tuple[int, float], Life]()
        self.done, self.returns = collections.Counter[str](), dict[int, float]()
        self.thin_since = dict[int, float]()

    def is_member(self, one: psutil.Process) -> bool:
        """Whether this process serves one of the members' standbys: others wait to be let in, or for node 0."""
        ports = {int(line.split()[1]) for line in (self.folder / "members.txt").read_text().splitlines()}
        listens = {at.laddr.port for at in one.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
        return not ports.isdisjoint(listens)

    def may_lose(self, victims: list[psutil.Process], stops: bool) -> bool:
        """Would members that have been in the run for a while be left, and more of them than are stopped? One that is
        stopped might go on by itself, so those that are left need the majority; one that has ended does not count."""
        running, stopped = 0, len(victims) * stops
        for node in range(len(self.nodes)):
            for one in list(self.workers(node).values()):
                with contextlib.suppress(*PROCESS_ENDED):
                    if one not in victims and self.is_member(one):
                        is_stopped = one.status() == psutil.STATUS_STOPPED
                        stopped += is_stopped
                        running += not is_stopped and time.time() - one.create_time() > 15
        return running > stopped

    def inject(self, fault: Fault) -> bool:
        """Whether it could be done."""
        there = {node: self.workers(node) for node, one in enumerate(self.nodes) if one.poll() is None}
        there = {node: workers for node, workers in there.items() if workers}
        if fault.what == "join":
            size = 1 + fault.number % 2
            if sum(map(len, there.values())) + size > MOST_RANKS:
                return False
            self.join(size)
            self.done["join"] += 1
            return True
        node = sorted(there)[fault.number % len(there)]
        workers = there[node]
        if fault.what.endswith("worker"):
            victims = [sorted(workers.values(), key=lambda one: one.pid)[fault.number % len(workers)]]
        else:
            victims = list(workers.values())
        if not self.may_lose(victims, stops=fault.what == "stop worker"):
            return False
        with contextlib.suppress(*PROCESS_ENDED):
            if fault.what == "kill node":
                self.kill_node(node)
            elif fault.what == "kill supervisor":
                self.nodes[node].kill()
            elif fault.what == "leave":
                self.nodes[node].send_signal(signal.SIGINT)
            elif fault.what == "stop worker":
                victims[0].suspend()
            elif fault.what == "segv worker":
                victims[0].send_signal(11)
            else:
                victims[0].kill()
        self.done[fault.what] += 1
        return True

    def bring_back(self, chance: random.Random) -> None:
        """Start the nodes again that have ended, or that lack a worker for long."""
        for node in range(len(self.nodes)):
            now = time.monotonic()
            if self.nodes[node].poll() is None:
                if len(self.workers(node)) == self.gpus[node]:
                    self.thin_since.pop(node, None)
                elif now - self.thin_since.setdefault(node, now) > 20:
                    self.kill_node(node)
                    self.done["node started again after a worker was left out"] += 1
            elif self.nodes[node].returncode == 0:
                continue
            elif node not in self.returns:
                self.returns[node] = now + chance.uniform(0, 3)
            elif now > self.returns[node]:
                del self.returns[node]
                self.thin_since.pop(node, None)
                if node in self.joined or self.nodes[0].returncode == 0:  # which has left: nobody is at --master-addr
                    self.join_as(node)
                self.start(node)

    def look(self) -> None:
        """Note what the processes hold."""
        for node in range(len(self.nodes)):
            with contextlib.suppress(*PROCESS_ENDED):
                supervisor = psutil.Process(self.nodes[node].pid)
                for process, role in [
                    (supervisor, "supervisor"),
                    *((w, "worker") for w in self.workers(node).values()),
                ]:
                    with contextlib.suppress(*PROCESS_ENDED):
                        life = self.lives.setdefault((process.pid, process.create_time()), Life(role))
                        with process.oneshot():
                            held = process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()
                        life.held.append((time.monotonic() - self.began, *held))


def batter(run: Battered, faults: list[Fault], total_steps: int, seed: int) -> None:
    """Inject all faults, and let the run come to its end."""
    chance, due, looked = random.Random(seed), list(faults), 0.0
    next_at, last_step, moved, given_up = STEPS_BETWEEN[0], 0, time.monotonic(), 0.0
    while any(node.poll() != 0 for node in run.nodes):
        step = run.steps()
        if step != last_step:
            last_step, moved = step, time.monotonic()
        if step == total_steps and all(node.poll() is not None for node in run.nodes):
            break
        if time.monotonic() - moved > STALLED_SECONDS:
            raise SystemExit(f"no step for {STALLED_SECONDS:.0f} s after step {step}:\n{run.said()[-20000:]}")
        if due and step >= next_at and step < total_steps - 200 and run.inject(due[0]):
            fault = due.pop(0)
            print(f"{len(faults) - len(due)}: after step {step}, {fault.what}", flush=True)
            next_at, given_up = step + (due[0].steps_later if due else 0), 0.0
        elif due and step >= next_at and step < total_steps - 200:
            given_up = given_up or time.monotonic()
            if time.monotonic() - given_up > 20:  # nobody is there who may be lost, or too many are there
                run.done[f"left out: {due.pop(0).what}"] += 1
                given_up = 0.0
        if step < total_steps - 200:
            run.bring_back(chance)
        if time.monotonic() - looked > 2:
            looked = time.monotonic()
            run.look()
        time.sleep(0.05 if due else 0.5)
    if due:
        raise SystemExit(f"the run ended before {len(due)} of the faults: more steps are needed")


def draw_picture(run: Battered, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=110, layout="constrained")
    names = ("resident memory, MB", "file descriptors", "threads")
    for index, (axes, name) in enumerate(zip(figure.subplots(3, 1, sharex=True), names, strict=True), start=1):
        for life in run.lives.values():
            seconds, values = [row[0] for row in life.held], [row[index] for row in life.held]
            colour = "tab:orange" if life.role == "supervisor" else "tab:blue"
            axes.plot(seconds, values, color=colour, linewidth=0.8)
        axes.set(ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_title("Each process of 2+1+1 under random faults: supervisors orange, workers blue")
    figure.axes[-1].set_xlabel("seconds")
    path.parent.mkdir(exist_ok=True, parents=True)
    figure.savefig(path)


def growth(run: Battered) -> list[str]:
    """What the processes that lived longest held after 20 seconds, and at their end."""
    told = []
    for role in ("supervisor", "worker"):
        lives = sorted((one for one in run.lives.values() if one.role == role), key=lambda one: -len(one.held))[:3]
        for life in lives:
            early = next((row for row in life.held if row[0] > life.held[0][0] + 20), life.held[0])
            late = life.held[-2] if len(life.held) > 1 else life.held[-1]  # the last one may be of a process that ends
            told.append(
                f"a {role} that lived {late[0] - life.held[0][0]:.0f} s: {early[1]:.0f} to {late[1]:.0f} MB, "
                f"{early[2]} to {late[2]} descriptors, {early[3]} to {late[3]} threads"
            )
    return told


def standstills(run: Battered) -> list[float]:
    """Seconds from the line that names a change of the members to the one that says who goes on, the longest first."""
    found, named = [], None
    for when, line in run.lines:
        if "members  " in line and "joins by" not in line:
            named = named or when
        elif "go on: " in line and named:
            found.append(when - named)
            named = None
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of the run; 275 for each fault, and 500, when left out")
    parser.add_argument("--picture", type=Path, default=ROOT / "runs" / "random-faults.png")
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes say and write")
    args = parser.parse_args()
    faults, total_steps = draw(args.faults, args.seed), args.steps or 275 * args.faults + 500
    print(describe())
    with tempfile.TemporaryDirectory() as place:
        alone, folder = Path(place) / "alone", Path(place) / "run"
        undisturbed = PlayedRun(SCRIPT, (1,), alone, "--max-steps", total_steps, *FLAGS)
        run = Battered(folder, total_steps)
        try:
            batter(run, faults, total_steps, args.seed)
            if undisturbed.nodes[0].wait():
                raise SystemExit(undisturbed.said())
        finally:
            if args.keep:
                args.keep.mkdir(exist_ok=True, parents=True)
                with contextlib.suppress(OSError):
                    for name, where in (("alone", alone), ("run", folder)):
                        shutil.copy(where / "metrics.jsonl", args.keep / f"{name}.jsonl")
                (args.keep / "said.log").write_text("\n".join(f"{when:.2f} {line}" for when, line in run.lines))
            run.end()
            undisturbed.end()
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
        assert [row["step"] for row in rows] == list(range(1, total_steps + 1)), "a step is missing, or there twice"
        expected = [row["loss"] for row in undisturbed.rows("train")]
        apart = [abs(row["loss"] / loss - 1) for row, loss in zip(rows, expected, strict=True)]
        first = next((step for step, one in enumerate(apart, start=1) if one > 1e-9), None)
        found, wanted = (
            load_file(one / "checkpoints" / "latest" / "model.safetensors", device="cpu") for one in (folder, alone)
        )
        weights = max(float((found[name] - tensor).abs().max()) for name, tensor in wanted.items())
        draw_picture(run, args.picture)
        members = len(run.rows("members"))
    print(f"{len(faults)} faults of seed {args.seed}: {dict(run.done)}; {members} changes of the members")
    print(f"{total_steps:,} steps, each done once; losses differ by at most {max(apart):.1e} of their value,")
    print(
        f"the final weights by at most {weights:.1e}. Held by the processes that lived longest, early and at their end:"
    )
    if first:
        print(f"the first step that differs by more than 1e-9 is {first}")
    still = standstills(run)
    longest = ", ".join(f"{seconds:.1f}" for seconds in still[:5])
    print(f"From naming a change until the ranks go on: {statistics.median(still):.1f} s, at most {longest} s")
    print(*growth(run), f"See {args.picture}", sep="\n")


if __name__ == "__main__":
    main()
