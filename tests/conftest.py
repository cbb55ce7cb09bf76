"""For all tests: what they start ends with them, a failure shows all output, and --costs measures."""

import gc
import signal
import sys

import pytest

from tests import costs, harness
from tests.costs import pytest_addoption  # noqa: F401 (a hook of pytest)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all modules are imported: the collector would look at them again and again, and find nothing
    hear_hangups()
    costs.configure(config)
    if hasattr(config, "workerinput"):  # a process of `pytest -n`
        harness.use_shared_server()
    elif getattr(config.option, "numprocesses", None) and not config.option.costs:  # which counts its own children
        harness.share_server()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def hear_hangups() -> None:
    """Under `nohup make test` every process would ignore SIGHUP, which tests send. One that is started by a process
    that handles a signal does not ignore it."""
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    """What a test has started ends with it, also when its set-up fails."""
    yield
    harness.end_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A failed test shows the last lines of every node and command that it has started."""
    report = yield
    if report.failed:
        report.sections += harness.end_all()
    return report
