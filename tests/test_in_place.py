"""One worker runs in the command's own process, so that a person's tools work on it."""

import subprocess
import sys

from tests.harness import ROOT, TIMEOUT_SECONDS, start, write_trainer

COMMAND = ("-g", 1, "--device", "cpu")


def test_a_debugger_reads_from_the_terminal(tmp_path):
    script = write_trainer(tmp_path, "breakpoint()\nprint('after', worker.rank)")
    done = subprocess.run(
        [sys.executable, script, *map(str, COMMAND)],
        input="p 6 * worker.world_size + 36\nc\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout and "after 0" in done.stdout


def test_what_atexit_was_told_runs_and_the_exit_code_is_0(tmp_path):
    script = write_trainer(tmp_path, "import atexit\natexit.register(print, 'the last word')")
    result = start("python", script, *COMMAND, PYTHONPATH=str(ROOT)).result()
    assert (result.code, result.output) == (0, "the last word\n")


def test_sigterm_ends_it_also_where_python_ignores_exceptions(tmp_path):
    destructor = "class Ends:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGTERM)\nEnds()"
    script = write_trainer(tmp_path, destructor + "\nprint('after it')")
    result = start("python", script, *COMMAND, PYTHONPATH=str(ROOT)).result()
    assert (result.code, result.output) == (128 + 15, "")


def test_an_error_of_the_trainer_is_pythons_own_traceback(tmp_path):
    script = write_trainer(tmp_path, "raise KeyError('lost')")
    result = start("python", script, *COMMAND, PYTHONPATH=str(ROOT)).result()
    assert result.code == 1
    assert result.output.count("Traceback (most recent call last)") == 1
    assert result.output.endswith("KeyError: 'lost'\n")
