#!/usr/bin/env python3
"""What happens when the network, the disk or the clock goes wrong: two test hosts, with and without --elastic.

    link_faults.py [--only cut,...] [--write docs/faults.md] [--keep logs]

`-n 2 -g 3,1` of MNIST's digits, in float64, on the two hosts of tests/cluster/hosts.sh. Needs root. Seconds count from
the fault, as in faults.py; `lost` too. Ten minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.faults import Seen, clean, expected_losses, note_end, put_table, shown
from benchmarks.machine import describe
from benchmarks.played import LIMIT_SECONDS, PROCESS_ENDED, PlayedRun

GPUS = (3, 1)
SCRIPT = ROOT / "mnist_ddp" / "mnist-distributed.py"
CLUSTER = ROOT / "tests" / "cluster"
FLAGS = ["--device", "cpu", "--dataset", "digits", "--precision", "fp64", "--global-batch", "64", "--epochs", "40"]
FLAGS += ["--timeout", "5", "--join-timeout", "60"]
STEP = 100
SHORT_STEPS = 60
SHORT = ["--max-steps", SHORT_STEPS]  # where each step takes long
# The clock of the calendar, an hour ahead once the file $JUMPED is there. That of the machine stays as it is: the
# clock would jump for all that runs on it.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    const char *jumped = getenv("JUMPED");
    return jumped && access(jumped, F_OK) == 0 ? 3600 : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    int code = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec, now->tv_usec = fine.tv_nsec / 1000;
    return code;
}
"""


def hosts(*command: str) -> None:
    subprocess.run([CLUSTER / "hosts.sh", *command], check=True, stdout=subprocess.DEVNULL)


class HostsRun(PlayedRun):
    """Node 0 on nodea, node 1 on nodeb."""

    def __init__(self, folder: Path, elastic: bool, *flags: object, nodes: tuple[int, ...] = (0, 1), **environ: str):
        self.environ, self.only = environ, nodes
        where = ("--master-addr", "10.77.0.1", "--master-port", 29690)
        super().__init__(SCRIPT, GPUS, folder, *where, *(["--elastic", 1] if elastic else []), *FLAGS, *flags)

    def command(self, node: int) -> list[str]:
        if node not in self.only:
            return ["true"]  # it comes later
        settings = [f"{name}={value}" for name, value in self.environ.items()]
        return [str(CLUSTER / "hosts.sh"), "on", ("nodea", "nodeb")[node], "env", *settings, *super().command(node)]

    def start(self, node: int) -> None:
        self.only = (*self.only, node)
        super().start(node)


@dataclass
class Case:
    """One fault: what it is called, when it comes, and what does it. `act` returns when it has happened."""

    name: str
    what: str
    moment: str
    act: Callable[[Path, bool], tuple[HostsRun, float]]


def started(folder: Path, elastic: bool, *flags: object, **environ: str) -> HostsRun:
    run = HostsRun(folder, elastic, *flags, **environ)
    run.wait_for_step(STEP)
    return run


def cut_briefly(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run, now = started(folder, elastic), time.monotonic()
    hosts("cut")
    time.sleep(2)
    hosts("mend")
    return run, now


def cut_for_good(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run, now = started(folder, elastic), time.monotonic()
    hosts("cut")
    return run, now


def slow_and_lossy(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run = HostsRun(folder, elastic, "--master-addr", "10.78.0.1", "--interface", "tund0", "--timeout", 30, *SHORT)
    run.wait_for_step(1)
    return run, time.monotonic()


def second_node_late(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run, now = HostsRun(folder, elastic, nodes=(0,)), time.monotonic()
    time.sleep(30)
    run.start(1)
    return run, now


def master_killed_before_the_join(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run = HostsRun(folder, elastic)
    time.sleep(1)  # torch is being imported
    run.kill_node(0)
    now = time.monotonic()
    run.nodes[0].wait()
    run.start(0)
    return run, now


def master_killed_in_the_join(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    run = HostsRun(folder, elastic, nodes=(0,))
    while "waiting for node 1" not in run.said():
        time.sleep(0.05)
    run.start(1)
    while (run.nodes[1].poll() is None) and not any("rank 3" in line for line in _titles(run)):
        time.sleep(0.01)
    run.kill_node(0)
    now = time.monotonic()
    run.nodes[0].wait()
    time.sleep(2)
    run.start(0)
    return run, now


def _titles(run: HostsRun) -> list[str]:
    with suppress(*PROCESS_ENDED):
        return [" ".join(one.cmdline()) for one in run.workers(1).values()]
    return []


def full_disk(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    run = HostsRun(folder, elastic, "--save-every", 10)
    while not any("error: " in line for _, line in list(run.lines)) and any(node.poll() is None for node in run.nodes):
        time.sleep(0.05)
    errors = [when for when, line in run.lines if "error: " in line]
    return run, min(errors, default=time.monotonic()) - 0.01


def clock_jumps(folder: Path, elastic: bool) -> tuple[HostsRun, float]:
    library, jumped = folder.parent / "clock.so", folder.parent / "jumped"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
    subprocess.run(command, input=CLOCK, text=True, check=True)
    run = started(folder, elastic, LD_PRELOAD=str(library), JUMPED=str(jumped))
    now = time.monotonic()
    jumped.touch()
    return run, now


CASES = [
    Case("cut2", "link cut for 2 s", "any", cut_briefly),
    Case("cut", "link cut for good: the network is split, 3 ranks from 1", "any", cut_for_good),
    Case("lossy", "20 ms and 1 % of packets lost, all the time", "all", slow_and_lossy),
    Case("late", "node 1 is started 30 s late", "join", second_node_late),
    Case("before", "node 0 killed before the join, and started again", "join", master_killed_before_the_join),
    Case("during", "node 0 killed in the join, and started again", "join", master_killed_in_the_join),
    Case("disk", "full disk (2 MB)", "checkpoint", full_disk),
    Case("clock", "the clocks jump ahead by an hour", "any", clock_jumps),
]


@contextmanager
def link_of(case: Case) -> Iterator[None]:
    """The hosts, and the slow link where the case needs it."""
    slow = None
    hosts("up")
    try:
        if case.name == "lossy":
            slow = subprocess.Popen(
                [sys.executable, CLUSTER / "slowlink.py", "20", "0.01"], stdout=subprocess.PIPE, text=True
            )
            assert slow.stdout and slow.stdout.readline().strip() == "up"
        yield
    finally:
        if slow:
            slow.terminate()
            slow.wait()
        hosts("down")


def observe(case: Case, elastic: bool, expected: dict[int, float]) -> Seen:
    with tempfile.TemporaryDirectory() as place, link_of(case):
        folder, seen = Path(place) / "run", Seen()
        run, began = case.act(folder, elastic)
        if case.name == "lossy":
            expected = {step: loss for step, loss in expected.items() if step <= SHORT_STEPS}
        try:
            at, deadline = run.steps(), time.monotonic() + LIMIT_SECONDS
            while time.monotonic() < deadline and any(node.poll() is None for node in run.nodes):
                if seen.next_step is None and run.steps() > at + 1:
                    seen.next_step = time.monotonic() - began
                time.sleep(0.05)
            note_end(seen, run, began, expected, time.monotonic() < deadline)
        finally:
            run.end()
            if case.name == "disk":
                subprocess.run(["umount", folder], check=True)
        return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of faults: " + ", ".join(case.name for case in CASES))
    parser.add_argument("--write", type=Path, help="put the table into this file, between its markers")
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes say")
    args = parser.parse_args()
    if os.geteuid():
        parser.error("it makes network namespaces: run it as root")
    expected = expected_losses(SCRIPT, FLAGS)
    table = [
        describe(),
        "",
        "| fault | moment | without `--elastic`: said | named, s | next step, s | all ended, s | lost "
        "| with `--elastic 1`: said | named, s | next step, s | lost |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        if args.only and case.name not in args.only.split(","):
            continue
        if case.name == "clock" and not shutil.which("cc"):
            print(f"{case.what}: cc is not there (apt-get install gcc)")
            continue
        plain, elastic = (observe(case, is_elastic, expected) for is_elastic in (False, True))
        plain.keep(args.keep, f"{case.name} plain")
        elastic.keep(args.keep, f"{case.name} elastic")
        cells = [case.what, case.moment, clean(plain.said), shown(plain.detected), shown(plain.next_step)]
        cells += [shown(plain.ended), plain.lost, clean(elastic.said), shown(elastic.detected)]
        cells += [shown(elastic.next_step), elastic.lost]
        table.append("| " + " | ".join(map(str, cells)) + " |")
        print(table[-1], flush=True)
    if args.write:
        put_table(args.write, "links", table)


if __name__ == "__main__":
    if not shutil.which("ip"):
        raise SystemExit("ip is not there: apt-get install iproute2")
    main()
