"""Limits of waiting: they end a process that hangs, also where no thread can be started any more."""

import sys

from tests.harness import run

START = """
import resource, threading, time
from common.join.waiting import limit

def no_memory_for_threads():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        print("no more threads", flush=True)

"""


def said_by(body):
    return run(sys.executable, "-c", START + body)


def test_a_limit_ends_the_process_with_one_line():
    result = said_by("with limit(0.2, 3, 'the exchange'): time.sleep(600)")
    assert result.code == 1
    assert "error: the exchange did not end within 0 s" in result.output


def test_a_limit_holds_where_no_thread_can_be_started_any_more():
    result = said_by("""
with limit(60, 0, 'what came before'):
    pass
no_memory_for_threads()
with limit(0.2, 0, 'the exchange'):
    time.sleep(600)
""")
    assert result.code == 1
    assert "no more threads" in result.output and "error: the exchange did not end" in result.output


def test_the_limit_that_passes_first_ends_the_process_whichever_began_first():
    result = said_by("""
with limit(300, 0, 'the run'), limit(0.2, 0, 'the exchange'), limit(200, 0, 'the step'):
    time.sleep(600)
""")
    assert "error: the exchange did not end" in result.output


def test_a_body_that_ends_in_time_is_left_alone():
    result = said_by("""
with limit(0.2, 0, 'the exchange'):
    pass
with limit(60, 0, 'the step'):
    time.sleep(1)
print("went on")
""")
    assert result.code == 0 and "went on" in result.output


def test_a_body_that_is_cut_short_goes_on():
    result = said_by("""
cut = threading.Event()
with limit(0.2, 0, 'the exchange', instead=cut.set):
    print(cut.wait(600))
print("went on")
""")
    assert result.code == 0 and "True\nwent on" in result.output


def test_a_forked_process_keeps_its_own_limits():
    result = said_by("""
import os
with limit(300, 0, 'the parent'):
    if not (child := os.fork()):
        with limit(0.2, 7, 'the child'):
            time.sleep(600)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert result.code == 0
    assert "error: the child did not end" in result.output and "exit code 1" in result.output
