#!/usr/bin/env python3
"""What happens when something breaks: real faults in real runs, with and without --elastic.

    faults.py [--only kill,stop,...] [--runs mnist,two,bert] [--write docs/faults.md] [--keep logs]

Each fault is injected into a run of MNIST's digits on `-n 3 -g 2,1,1` (`mnist`), nine of them on `-n 2 -g 3,1` (`two`),
and ten into the pretraining of a small BERT on `-n 3 -g 2,1,1` (`bert`): all nodes on this machine, in float64, at the
moment that the table names, or after 100 steps (BERT: 40). Seconds count from the fault: until the first line that
names it, until those that are left have done the next optimizer steps (which are written every second), or until
the last process has ended. `lost` counts the steps that are missing from metrics.jsonl, or whose loss differs from that
of the undisturbed run by more than 1e-9 of it.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from benchmarks.played import LIMIT_SECONDS, PlayedRun
from common.record.metrics import read_metrics

FLAGS = ["--device", "cpu", "--precision", "fp64", "--timeout", "5", "--join-timeout", "60"]
DIGITS = [*FLAGS, "--dataset", "digits", "--global-batch", "64", "--epochs", "40"]
TEXT = [*FLAGS, "--preset", "tiny", "--dropout", "0", "--vocab-size", "2000", "--sequence-length", "64"]
TEXT += ["--global-batch", "32", "--max-steps", "120", "--save-every", "10h"]
NAMED = re.compile(
    r"error: |waiting for |members  lost|interrupted: |was ended by|ended with exit code|stopped for|is not finite"
)

# moment -> the line of the trainer's code that comes next then
MOMENTS = {
    "forward": "                    with run.autocast():\n",
    "all-reduce": "                    run.backward(",
    "optimizer": "            scheduler.step()\n",
    "evaluation": "                    numbers = evaluate(",
    "checkpoint": "                run.save(",
}
HOLD = "__import__('ctypes').PyDLL(None).sleep(60)"  # a call that does not give the interpreter's lock away
DO = {  # in the process itself
    "SIGKILL": "__import__('os').kill(__import__('os').getpid(), 9)",
    "SIGSEGV": "__import__('os').kill(__import__('os').getpid(), 11)",
    "os._exit(3)": "__import__('os')._exit(3)",
    "exception": "raise ValueError('a damaged sample')",
    "SystemExit": "raise SystemExit('a library has had enough')",
    "out of memory": "raise MemoryError('cannot allocate')",
    "held interpreter lock": HOLD,
    "stalled for 60 s": "__import__('time').sleep(60)",
    "NaN in its loss": "loss_sum += float('nan')",
    "SIGSTOP by itself": "__import__('os').kill(__import__('os').getpid(), 19)",
}
FORK_SERVER = "SIGKILL of its loaders' fork server"
FROM_OUTSIDE = ("SIGSTOP", "SIGABRT", "SIGINT", "SIGTERM", "SIGUSR1")


@dataclass
class Fault:
    """What goes wrong, and where."""

    name: str
    what: str  # a key of DO, or what is done from outside
    moment: str = "forward"
    rank: int = 0
    flags: tuple[str, ...] = ()  # that it needs


FAULTS = [
    *(Fault("kill", "SIGKILL", moment, rank) for moment in MOMENTS for rank in (0, 3)),
    *(Fault("segv", "SIGSEGV", "forward", rank) for rank in (0, 3)),
    Fault("abort", "SIGABRT", "any", 3),
    *(Fault("exit", "os._exit(3)", "all-reduce", rank) for rank in (0, 3)),
    Fault("systemexit", "SystemExit", "forward", 3),
    *(Fault("exception", "exception", "forward", rank) for rank in (0, 3)),
    Fault("memory", "out of memory", "all-reduce", 2),
    *(Fault("lock", "held interpreter lock", "forward", rank) for rank in (0, 3)),
    Fault("stall", "stalled for 60 s", "forward", 3),
    *(Fault("signal", name, "any", 3) for name in ("SIGINT", "SIGTERM", "SIGUSR1")),
    Fault("nan", "NaN in its loss", "optimizer", 3),
    *(Fault("stop", "SIGSTOP", "any", rank) for rank in (0, 3)),
    Fault("stop-save", "SIGSTOP by itself", "checkpoint", 0),
    *(Fault("supervisor", "SIGKILL of the supervisor", "any", rank) for rank in (0, 3)),
    *(Fault("node", "SIGKILL of all of its node", "any", rank) for rank in (0, 3)),
]
FEW = [  # of which BERT's runs have one more
    *(Fault("kill", "SIGKILL", "all-reduce", rank) for rank in (0, 3)),
    Fault("segv", "SIGSEGV", "forward", 0),
    Fault("exception", "exception", "forward", 3),
    Fault("lock", "held interpreter lock", "forward", 3),
    Fault("stop", "SIGSTOP", "any", 0),
    Fault("supervisor", "SIGKILL of the supervisor", "any", 3),
    *(Fault("node", "SIGKILL of all of its node", "any", rank) for rank in (0, 3)),
]


LOADERS = Fault("loaders", FORK_SERVER, "any", 3, ("--data-workers", "1"))


@dataclass
class Subject:
    """A run that faults are injected into."""

    title: str
    gpus: tuple[int, ...]
    script: Path
    train: Path  # the file with the training loop
    flags: list[str]
    step: int  # the one at which something happens
    last_of_epoch: int  # the one after which it evaluates and saves
    faults: list[Fault]

    def step_of(self, fault: Fault) -> int:
        return self.last_of_epoch if fault.moment in ("evaluation", "checkpoint") else self.step


MNIST, BERT = ROOT / "mnist_ddp", ROOT / "bert_ddp"
MNIST_FILES = MNIST / "mnist-distributed.py", MNIST / "train.py", DIGITS, 100, 115
BERT_FILES = BERT / "bert-distributed.py", BERT / "pretrain" / "train.py", TEXT, 40, 120
SUBJECTS = {
    "mnist": Subject("MNIST's digits, `-n 3 -g 2,1,1`", (2, 1, 1), *MNIST_FILES, FAULTS),
    "two": Subject("MNIST's digits, `-n 2 -g 3,1`", (3, 1), *MNIST_FILES, FEW),
    "bert": Subject("BERT, pretraining, `-n 3 -g 2,1,1`", (2, 1, 1), *BERT_FILES, [*FEW, LOADERS]),
}


@dataclass
class Seen:
    """What was seen of one run with a fault, in seconds after it."""

    said: str = ""
    detected: float | None = None
    next_step: float | None = None
    ended: float | None = None
    codes: list[int | None] = field(default_factory=list)
    lost: str = ""
    log: list[str] = field(default_factory=list)  # what the nodes have said, and when

    def keep(self, folder: Path | None, name: str) -> None:
        """Write the log into a file of this folder."""
        if folder:
            folder.mkdir(exist_ok=True, parents=True)
            (folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log").write_text("\n".join(self.log))


def script_with(fault: Fault, subject: Subject, folder: Path) -> tuple[Path, Path]:
    """A copy of the trainer in which the rank does what the fault says, once; and the file that notes when."""
    stamp, package = folder / "fault-at", folder / "faulty_ddp"
    package.mkdir()
    source = subject.train.read_text()
    if fault.what in DO:
        place = MOMENTS[fault.moment]
        assert source.count(place) == 1, place
        indent = " " * (len(place) - len(place.lstrip()))
        here = f"run.step == {subject.step_of(fault)} and worker.rank == {fault.rank}"
        once = f"{here} and not __import__('os').path.exists({str(stamp)!r})"
        note = f"open({str(stamp)!r}, 'w').write(str(__import__('time').monotonic()))"
        fails = f"{indent}if {once}:\n{indent}    {note}\n{indent}    {DO[fault.what]}\n"
        source = source.replace(place, fails + place)
    (package / "train.py").write_text(source)
    module = ".".join(subject.train.relative_to(ROOT).with_suffix("").parts)
    script = package / subject.script.name
    script.write_text(subject.script.read_text().replace(f"{module}:train", "faulty_ddp.train:train"))
    return script, stamp


def inject(fault: Fault, subject: Subject, job: PlayedRun, stamp: Path) -> float:
    """Returns when the fault has happened."""
    if fault.what in DO:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (stamp.exists() and stamp.read_text()):
            assert time.monotonic() < deadline, job.lines
            time.sleep(0.01)
        return float(stamp.read_text())
    job.wait_for_step(subject.step)
    node = job.node_of(fault.rank)
    worker = job.workers(node)[fault.rank]
    now = time.monotonic()
    if fault.what in FROM_OUTSIDE:
        worker.send_signal(signal.Signals[fault.what])
    elif fault.what == FORK_SERVER:
        next(one for one in worker.children() if "forkserver" in " ".join(one.cmdline())).kill()
    elif fault.what == "SIGKILL of the supervisor":
        job.nodes[node].send_signal(signal.SIGKILL)
    else:
        job.kill_node(node)
    return now


def observe(fault: Fault, subject: Subject, elastic: bool, expected: dict[int, float]) -> Seen:
    with tempfile.TemporaryDirectory() as place:
        folder, seen = Path(place), Seen()
        script, stamp = script_with(fault, subject, folder)
        job = PlayedRun(
            script, subject.gpus, folder / "run", *(["--elastic", 1] if elastic else []), *subject.flags, *fault.flags
        )
        try:
            began = inject(fault, subject, job, stamp)
            at, deadline = job.steps(), time.monotonic() + LIMIT_SECONDS
            while time.monotonic() < deadline and any(node.poll() is None for node in job.nodes):
                goes_on = elastic and any("go on: " in line for _, line in list(job.lines))
                if seen.next_step is None and goes_on and job.steps() > max(at, subject.step) + 1:
                    seen.next_step = time.monotonic() - began
                time.sleep(0.02)
            note_end(seen, job, began, expected, time.monotonic() < deadline)
        finally:
            job.end()
        return seen


def note_end(seen: Seen, run: PlayedRun, began: float, expected: dict[int, float], has_ended: bool) -> None:
    """What a run has said since `began`, how it has ended, and what is missing of it."""
    seen.ended = time.monotonic() - began if has_ended else None
    time.sleep(0.2)
    seen.log = [f"{when - began:8.2f} {line}" for when, line in run.lines]
    named = [(when - began, line) for when, line in run.lines if when > began and NAMED.search(line)]
    if named:
        seen.detected = named[0][0]
        members = [line for _, line in named if "members  lost" in line]
        errors = [line for _, line in named if "error: " in line]
        seen.said = (members or errors or [line for _, line in named])[0]
    seen.codes = [node.returncode for node in run.nodes]
    found = {row["step"]: row["loss"] for row in run.rows("train")}
    last = max(found, default=0)
    wrong = [step for step, loss in found.items() if loss is None or abs(loss / expected[step] - 1) > 1e-9]
    missing = [step for step in range(1, last + 1) if step not in found]
    seen.lost = "nothing" if last == max(expected) and not wrong and not missing else f"ends at step {last}"
    if wrong or missing:
        seen.lost += f", {len(wrong)} wrong, {len(missing)} missing"


def expected_losses(script: Path, flags: list[str]) -> dict[int, float]:
    """step -> loss of the undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "-g", "1", *flags, "--out-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(Path(folder) / "metrics.jsonl")
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def put_table(path: Path, name: str, table: list[str]) -> None:
    """Write a table into a document, between the markers with its name."""
    head, _, rest = path.read_text().partition(f"<!-- {name} -->")
    _, _, tail = rest.partition("<!-- end -->")
    path.write_text(f"{head}<!-- {name} -->\n" + "\n".join(table) + f"\n<!-- end -->{tail}")


def shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def clean(said: str) -> str:
    """A line of the log without what tells one run from another."""
    said = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+/", "", said)
    return re.sub(r"^\[\d+[^]]*\] ", "", said).replace("|", "/").replace("members  ", "")[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of faults, such as kill,stop")
    parser.add_argument("--runs", default=",".join(SUBJECTS), help="which runs to break: " + ", ".join(SUBJECTS))
    parser.add_argument("--write", type=Path, help="put the table into this file, between its markers")
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes say")
    args = parser.parse_args()
    text = [describe()]
    for name in args.runs.split(","):
        subject = SUBJECTS[name]
        expected = expected_losses(subject.script, subject.flags)
        table = [
            "",
            f"| {subject.title} | moment | rank | without `--elastic`: said | named, s | all ended, s "
            "| with `--elastic 1`: said | named, s | next step, s | lost |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for fault in subject.faults:
            if args.only and fault.name not in args.only.split(","):
                continue
            plain, elastic = (observe(fault, subject, is_elastic, expected) for is_elastic in (False, True))
            for seen, way in ((plain, "plain"), (elastic, "elastic")):
                seen.keep(args.keep, f"{name} {fault.what} {fault.moment} {fault.rank} {way}")
            cells = [fault.what, fault.moment, fault.rank, clean(plain.said), shown(plain.detected), shown(plain.ended)]
            cells += [clean(elastic.said), shown(elastic.detected), shown(elastic.next_step), elastic.lost]
            table.append("| " + " | ".join(map(str, cells)) + " |")
            print(table[-1], flush=True)
        text += table
    if args.write:
        put_table(args.write, "table", text)


if __name__ == "__main__":
    main()
