"""Real hosts, Slurm, ssh and MPI for the tests in this folder, taken down whatever happens.

Everything lives under one folder and two network namespaces, so a lock excludes a second run, and what a
killed run has left is removed before a new one begins.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness import ROOT, TIMEOUT_SECONDS, Result, start, wait_until

HERE = Path(__file__).resolve().parent
STATE = Path(os.environ.get("UNEVEN_CLUSTER_DIR", "/tmp/uneven-cluster"))
LOCK = Path("/run")  # a folder can be locked, and leaves no file behind
PYTHON = ROOT / ".venv" / "bin" / "python"


_interrupted = threading.Event()


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, _interrupt)  # a terminated run takes its hosts down, as an interrupted one does


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    _interrupted.set()
    raise KeyboardInterrupt


class Hosts:
    """Two hosts, nodea (10.77.0.1) and nodeb (10.77.0.2), and the link between them."""

    addresses = {"nodea": "10.77.0.1", "nodeb": "10.77.0.2"}  # noqa: RUF012
    interfaces = {"nodea": "uneven-va", "nodeb": "uneven-vb"}  # noqa: RUF012

    def __init__(self) -> None:
        self.services: set[int] = set()  # processes that stay from test to test: slurmd, sshd

    def on(self, host: str, *command: object, **environ: str | None) -> start:
        """Start a command on a host; `.result(timeout)` waits for it. "python" is the checkout's own."""
        command = [PYTHON if part == "python" else part for part in command]
        return start(HERE / "hosts.sh", "on", host, *command, **{**QUIET, **environ})

    def run(self, host: str, *command: object, timeout: float = TIMEOUT_SECONDS, **environ: str | None) -> Result:
        """Run a command on a host to its end."""
        return self.on(host, *command, **environ).result(timeout)

    def together(self, *started: start, timeout: float = TIMEOUT_SECONDS) -> list[Result]:
        """The results of commands under way, in order. All of their output is read as it comes."""
        results: list[Result | BaseException | None] = [None] * len(started)

        def wait(index: int) -> None:
            try:
                results[index] = started[index].result(timeout)
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=wait, args=(index,)) for index in range(len(started))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def cut(self) -> None:
        """Take the link between the hosts down."""
        script("hosts.sh", "cut")

    def mend(self) -> None:
        """Bring the link back."""
        script("hosts.sh", "mend")

    def rate(self, rate: str) -> None:
        """Limit the link both ways, such as "100mbit"; "off" lifts the limit."""
        script("hosts.sh", "rate", rate)

    def processes(self) -> set[int]:
        """The processes that run on the hosts now, except services."""
        found: set[int] = set()
        for space in ("uneven-a", "uneven-b"):
            done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            found |= {int(pid) for pid in done.stdout.split()}
        return found - self.services


# What commands on the hosts find in their environment: one thread each, nothing of this machine's proxies.
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(STATE / "tmp")}


def script(name: str, *arguments: str, timeout: float = TIMEOUT_SECONDS) -> str:
    """Run one of the shell scripts of this folder; its output, or an error that holds it."""
    done = subprocess.run([HERE / name, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def needs(*programs: str) -> None:
    """Skip the test, saying why, where a program could not be installed."""
    if missing := [name for name in programs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]:
        pytest.skip(f"{', '.join(missing)} is not installed: tests/cluster/run.sh says why")


def sweep() -> None:
    """Remove whatever a run has made, even one that was killed."""
    for name in ("slurm.sh", "sshd.sh"):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            script(name, "stop")
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        script("hosts.sh", "down")
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture(scope="session")
def locked():
    """This run has the hosts for itself. run.sh holds the lock already for the run that it starts."""
    folder = os.open(LOCK, os.O_RDONLY)
    if "UNEVEN_CLUSTER_LOCKED" not in os.environ:
        fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


@pytest.fixture(scope="session")
def hosts(locked):
    """The two hosts, up for the whole run."""
    needs("ip", "nsenter", "unshare")
    sweep()
    try:
        (STATE / "tmp").mkdir(parents=True)
        script("hosts.sh", "up")
        yield Hosts()
    finally:
        sweep()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest):
    """Every test leaves the link whole and no process on the hosts."""
    yield
    if "hosts" not in request.fixturenames:
        return
    hosts = request.getfixturevalue("hosts")
    if "slurm" in request.fixturenames:  # a job that is requeued would run beside the next test
        slurm = request.getfixturevalue("slurm")
        slurm("scancel", "--user=root").result()
        wait_until(lambda: not slurm("squeue", "--noheader").result().output.strip())
    hosts.mend()
    hosts.rate("off")
    deadline = time.monotonic() + 30.0  # what ends is not killed at once
    while (left := hosts.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = [Path(f"/proc/{pid}/cmdline") for pid in left]
    named = [path.read_bytes().replace(b"\0", b" ").decode(errors="replace") for path in commands if path.exists()]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not named or _interrupted.is_set(), f"processes left on the hosts: {named}"


@pytest.fixture(scope="session")
def slurm(hosts: Hosts):
    """A running Slurm: `slurm("srun", "-N2", ...)` starts one of its commands on nodea."""
    needs("slurmctld", "slurmd", "srun", "munged")
    script("slurm.sh", "start")
    hosts.services |= hosts.processes()

    def slurm_command(*command: object, **environ: str) -> start:
        return hosts.on("nodea", *command, SLURM_CONF=str(STATE / "slurm" / "slurm.conf"), **environ)

    yield slurm_command
    script("slurm.sh", "stop")


@dataclass
class batch_job:
    """A batch script that is submitted when its result is asked for; `sbatch --wait` would notice its end late."""

    slurm: Callable[..., start]
    command: tuple[object, ...]
    log: Path
    environ: dict[str, str] = field(default_factory=dict)

    def result(self, timeout: float = TIMEOUT_SECONDS) -> Result:
        """The job's output and exit code."""
        began = time.monotonic()
        options = ("--parsable", f"--output={self.log}")
        submitted = self.slurm("sbatch", *options, *self.command, **self.environ).result()
        assert submitted.code == 0, submitted.output
        number = submitted.output.split()[-1]
        while self.slurm("squeue", "--noheader", "--jobs", number).result().output.strip():
            assert time.monotonic() - began < timeout, self.log.read_text() if self.log.exists() else "no output"
            time.sleep(0.3)
        shown = self.slurm("scontrol", "show", "job", number).result().output
        codes = [int(code) for code in re.findall(r"ExitCode=(\d+):", shown)]
        output = self.log.read_text() if self.log.exists() else ""
        return Result(max(codes, default=1), output, time.monotonic() - began)


@pytest.fixture(scope="session")
def warm(hosts: Hosts):
    """The program that stands for `python` where a launcher starts each rank; see warm.py."""
    servers = []
    for host in hosts.addresses:
        server = hosts.on(host, "python", "-m", "tests.cluster.warm", STATE / f"warm-{host}", cwd=ROOT).lasts()
        wait_until((STATE / f"warm-{host}").exists, server)
        servers.append(server)
    hosts.services |= hosts.processes()
    yield HERE / "warm-python"
    for server in servers:
        server.process.kill()


@pytest.fixture(scope="session")
def ssh_config(hosts: Hosts) -> Path:
    """ssh between the hosts works with this client configuration."""
    needs("sshd", "ssh")
    script("sshd.sh", "start")
    hosts.services |= hosts.processes()
    yield Path(script("sshd.sh", "config"))
    script("sshd.sh", "stop")


# --- the table of docs/launchers.md ------------------------------------------------------------------------------

DOCUMENT = ROOT / "docs" / "launchers.md"


class Table:
    """Which launcher has trained which model on which layout, in this run."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, bool]] = {}

    @contextlib.contextmanager
    def row(self, launcher: str, layout: str, model: str = "MNIST"):
        """The body trains and checks; the row gets its tick when nothing was raised."""
        models = self.rows.setdefault((launcher, layout), {})
        models[model] = False
        yield
        models[model] = True

    def lines(self) -> list[str]:
        marks = {True: "✓", False: "failed", None: ""}
        lines = [
            "| launcher | layout | MNIST, losses of `-g 1` | BERT, losses of `-g 1` |",
            "| --- | --- | --- | --- |",
        ]
        for (launcher, layout), models in self.rows.items():
            ticks = " | ".join(marks[models.get(model)] for model in ("MNIST", "BERT"))
            lines.append(f"| {launcher} | {layout} | {ticks} |")
        return lines


_table = Table()


@pytest.fixture(scope="session")
def table() -> Table:
    return _table


def pytest_terminal_summary(terminalreporter) -> None:
    if not _table.rows:
        return
    terminalreporter.section("launchers and layouts that have trained")
    for line in _table.lines():
        terminalreporter.write_line(line)
    if os.environ.get("UNEVEN_WRITE_TABLE") == "1":
        text = DOCUMENT.read_text()
        before, _, rest = text.partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end of table -->\n")
        table = "".join(f"{line}\n" for line in _table.lines())
        DOCUMENT.write_text(f"{before}<!-- table -->\n{table}<!-- end of table -->\n{after}")
        terminalreporter.write_line(f"written to {DOCUMENT}")
