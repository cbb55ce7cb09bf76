"""What each test costs: processor seconds of all its processes, and how often they import a heavy package.

    make test ARGS='--costs build/costs.md'      a table by file, then the most expensive tests

A pytest plugin (Linux only). The processor seconds of a test are those of the pytest process and of everything that it
has started, forked or inherited, between the test's beginning and its end: its set-up and tear-down included. Each
pytest process has a fork server of its own, so that it sees what that costs; without --costs they share one.
"""

import os
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

HEAVY = ("torch", "transformers", "datasets")
COUNTED_IN = "UNEVEN_COUNT_IMPORTS"  # a file to which each import of a heavy package adds a line
# Python imports a module of this name when it starts. It notes an import and leaves it to the other finders.
SITECUSTOMIZE = f"""
import os, sys

class Note:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY} and {COUNTED_IN!r} in os.environ:
            try:
                with open(os.environ[{COUNTED_IN!r}], "a") as file:
                    file.write(name + " " + os.environ.get("PYTEST_CURRENT_TEST", "?").split(" (")[0] + "\\n")
            except OSError:
                pass  # a test of a full disk

sys.meta_path.insert(0, Note())
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each test costs, in processor seconds and imports")


def configure(config: pytest.Config) -> None:
    if not config.getoption("--costs"):
        return
    if not hasattr(config, "workerinput"):  # once, before pytest-xdist starts its workers
        folder = Path(tempfile.mkdtemp(prefix="uneven-costs-"))
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        (folder / "imports").touch()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        os.environ[COUNTED_IN] = str(folder / "imports")
        config.pluginmanager.register(Costs(Path(config.getoption("--costs")), folder / "imports"))
    config.pluginmanager.register(Clock())


class Clock:
    """In each process that runs tests: what a test has used, as a property of its report."""

    def __init__(self) -> None:
        import ctypes

        self.set_subreaper = ctypes.CDLL(None).prctl
        self.set_subreaper(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what outlives its parent is still found here

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.before = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("processor_seconds", used() - self.before))
        return report


class Costs:
    """In the process that reports: the table."""

    def __init__(self, path: Path, imports: Path):
        self.path, self.imports = path, imports
        self.seconds: dict[str, float] = {}  # by test
        self.elapsed: Counter[str] = Counter()  # by test, as a clock shows it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.elapsed[report.nodeid] += report.duration
        if report.when == "teardown":
            self.seconds[report.nodeid] = dict(report.user_properties).get("processor_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        imported = Counter(tuple(line.split(" ", 1)) for line in self.imports.read_text().splitlines())
        by_file: dict[str, Counter] = defaultdict(Counter)
        for test, seconds in self.seconds.items():
            by_file[test.split("::")[0]] += Counter({"tests": 1, "processor": seconds, "elapsed": self.elapsed[test]})
        for (package, test), count in imported.items():
            by_file[test.split("::")[0]][package] += count
        total = sum(by_file.values(), Counter())
        lines = [
            "| file | tests | processor seconds | elapsed | " + " | ".join(f"imports {name}" for name in HEAVY) + " |",
            "| --- |" + " ---: |" * (3 + len(HEAVY)),
        ]
        for name, row in [*sorted(by_file.items(), key=lambda pair: -pair[1]["processor"]), ("all", total)]:
            counts = " | ".join(str(row[package]) for package in HEAVY)
            lines.append(f"| {name} | {row['tests']} | {row['processor']:.1f} | {row['elapsed']:.1f} | {counts} |")
        lines += ["", "| test | processor seconds | elapsed | imports torch |", "| --- | ---: | ---: | ---: |"]
        for test, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            lines.append(f"| {test} | {seconds:.2f} | {self.elapsed[test]:.2f} | {imported['torch', test]} |")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(lines) + "\n")
        shutil.rmtree(self.imports.parent)


def used() -> float:
    """Processor seconds of this process and of all below it so far, with those that have ended."""
    seconds = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
