"""Limits of waiting: they end a process that hangs, also where no thread can be started any more."""

import sys

from tests.harness import run

START = """
import resource, threading, time
from common.join.waiting import limit

def take_all_memory():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))

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
take_all_memory()
try:
    threading.Thread(target=int).start()
except RuntimeError as error:
    print(error, flush=True)
with limit(0.2, 0, 'the exchange'):
    time.sleep(600)
""")
    assert result.code == 1
    assert "can't start new thread" in result.output and "error: the exchange did not end" in result.output


def test_the_limit_that_passes_first_ends_the_process_whichever_began_first():
    result = said_by("""
with limit(300, 0, 'the run'), limit(0.2, 0, 'the exchange'), limit(200, 0, 'the step'):
    time.sleep(600)
""")
    assert "error: the exchange did not end" in result.output


def test_a_body_that_ends_in_time_is_left_alone():
    result = said_by("""
with limit(1, 0, 'the exchange'):
    pass
with limit(60, 0, 'the step'):
    time.sleep(2)
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
    assert "error: the child did not end" in result.output and "exit code 1\n" in result.output


def test_a_limit_of_infinity_leaves_the_others_as_they_are():
    result = said_by("""
with limit(float("inf"), 0, 'the work'), limit(0.2, 0, 'the exchange'):
    time.sleep(600)
""")
    assert result.code == 1 and "error: the exchange did not end" in result.output


def test_what_fails_when_a_limit_passes_switches_off_no_other_limit():
    result = said_by("""
def fails():
    raise MemoryError

with limit(0.2, 0, 'the store', instead=fails), limit(1, 0, 'the exchange'):
    time.sleep(600)
""")
    assert result.code == 1 and "error: the exchange did not end" in result.output


def test_what_is_tried_for_a_limited_time_ends_where_a_thread_starts_and_has_no_memory():
    result = said_by("""
from common.launch.within import within

print(within(60, lambda: 5), within(0.2, threading.Event().wait), within(60, lambda: 6))
take_all_memory()  # but the stack of a thread that has ended, which the next one gets: Thread.start() would hang
print(within(1, lambda: 7))
print("went on")
""")
    assert result.code == 0 and "5 None 6\n" in result.output and "None\nwent on" in result.output
