"""hello, as a module and by path, on one machine."""

import socket

import pytest

from tests.harness import ROOT, Node, free_port, playing, run
from tests.test_first_answer import imported

HELLO = ROOT / "common" / "hello" / "__main__.py"


@pytest.mark.parametrize("command", [
    pytest.param(("-m", "common.hello"), id="-m"),
    pytest.param((HELLO,), id="by path", marks=pytest.mark.long),
])  # fmt: skip
def test_hello_of_one_process(command, tmp_path):
    folder = ROOT if command[0] == "-m" else tmp_path
    result = run("python", *command, "--device", "cpu", cwd=folder)
    assert result.code == 0, result.output
    assert f"hello from [{socket.gethostname()}:gloo] process 0/1" in result.output


def test_each_node_prints_its_own_ranks_in_order(tmp_path):
    port = free_port()
    layout = ["-n", 2, "-g", "2,1", "--device", "cpu", "--master-port", port, "--master-addr", "127.0.0.1"]
    results = playing(HELLO, [Node([*layout, "-i", number]) for number in range(2)], tmp_path).results()
    words = [[line.split()[-1] for line in result.output.splitlines() if "hello from" in line] for result in results]
    assert words == [["0/3", "1/3"], ["2/3"]]
    assert f"[tcp://127.0.0.1:{port}] hello from [{socket.gethostname()}:gloo]" in results[1].output


@pytest.mark.parametrize("flags, code", [("--help", 0), ("-g 0", 2), ("-n 2 -g 8,2", 2)])
def test_hello_answers_help_and_wrong_flags_without_torch(flags, code):
    result = run("python", "-X", "importtime", "-m", "common.hello", *flags.split(), cwd=ROOT)
    assert result.code == code, result.output
    assert not imported(result.output) & {"torch", "numpy"}
