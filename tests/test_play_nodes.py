"""play_nodes.py: all nodes of a layout behind one command, each line whole and with its node's number."""

import importlib
import json
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.harness import ROOT, TIMEOUT_SECONDS, rows_so_far, run, start, wait_until
from tests.trainers import Patient

PLAY = ROOT / "launch_scripts" / "play_nodes.py"
LAYOUT = ("-n", 2, "-g", "2,1", "--device", "cpu")


@pytest.mark.long
@pytest.mark.parametrize("program", [("-m", "common.hello"), (ROOT / "common" / "hello" / "__main__.py",)])
def test_it_plays_a_module_or_a_script_from_any_folder(program, tmp_path):
    result = run("python", PLAY, *program, *LAYOUT, cwd=tmp_path)
    assert result.code == 0, result.output
    said = [line.split()[-1] for line in result.output.splitlines() if "hello from" in line]
    assert sorted(said) == ["0/3", "1/3", "2/3"]
    assert all(re.match(r"node [01] \| ", line) for line in result.output.splitlines()), result.output


@pytest.mark.long
def test_it_plays_the_doctor_whose_tables_come_out_whole(tmp_path):
    result = run("python", PLAY, "-m", "common.doctor", *LAYOUT, cwd=tmp_path)
    lines = result.output.splitlines()
    assert all(re.match(r"node [01] \| ", line) for line in lines), result.output
    by_node = {node: "\n".join(line[9:] for line in lines if line.startswith(f"node {node}")) for node in (0, 1)}
    assert "doctor: 3 processes on 2 nodes (2,1), from -n 2 -g 2,1 -i 0, gloo" in by_node[0]
    assert re.search(r"^node 0 \(.*\) -> node 1 \(.*\) +[\d.]+ ms +[\d.]+ [MG]bit/s +-?[\d.]+ ms$", by_node[0], re.M)
    assert re.search(r"^64 MB +[\d.]+ ms +[\d.]+ GB/s$", by_node[0], re.M)
    assert "the tables are on node 0" in by_node[1]
    # Where others use the cores, the doctor finds one rank slower than another, or a link, and is right to say so.
    errors = [line for line in lines if re.match(r"node [01] \| error ", line)]
    assert all("a slow link: it carries" in line for line in errors), result.output
    verdict = (
        "error: not fit to train: . errors?, named above$"
        if errors
        else "^fit to train(: nothing found|, with warn.*)$"
    )
    assert all(re.search(verdict, text, re.M) for text in by_node.values()), result.output
    assert result.code == bool(errors), result.output
    assert "advice   for BERT-base" in by_node[0] and "advice" not in by_node[1]


def test_a_failure_of_the_nodes_is_the_commands(tmp_path):
    result = run("python", PLAY, "-m", "common.hello", *LAYOUT, "--timeout", "soon", cwd=tmp_path)
    assert result.code == 2, result.output
    assert "argument --timeout: 'soon' is not allowed" in result.output


@pytest.mark.parametrize("command", ["", "-m", "-m common.hello", "common.hello -g 1", "-m common.hello -g"])
def test_a_command_without_program_or_layout_gets_the_usage(command):
    result = run("python", PLAY, *command.split())
    assert result.code == 2
    assert "play_nodes.py -m common.doctor" in result.output


@pytest.mark.parametrize("speeds", ["1", "1=", "1=0", "1=1.5", "-1=0.5", "one=0.5", ""])
def test_a_speed_that_is_none_is_refused(speeds):
    result = run("python", PLAY, "--slow", speeds, "-m", "common.hello", *LAYOUT)
    assert result.code == 2 and "error: --slow '" in result.output


def test_a_slow_rank_that_is_not_there_is_refused():
    result = run("python", PLAY, "--slow", "3=0.5", "-m", "common.hello", *LAYOUT)
    assert result.code == 2 and "--slow names rank 3, but -g 2,1 has ranks 0 to 2" in result.output


IDLE = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def train(worker, args):
    (FOLDER / f"rank-{worker.rank}").touch()
    while not (FOLDER / "end").exists():
        time.sleep(0.01)
"""
STARTS = """
from common.launch import cli, start
start.main(cli.parser("Ranks that wait"), "idle:train")
"""


def idle(folder):
    """A script whose ranks write that they have begun, and wait for a file `end`; they import no torch."""
    (folder / "idle.py").write_text(IDLE)
    (folder / "idle-distributed.py").write_text(STARTS)
    return folder / "idle-distributed.py"


def have_begun(folder):
    return len(list(folder.glob("rank-*"))) == 3


@pytest.mark.parametrize("rank", [1, 2])  # a supervisor's worker, and a launcher that is the worker of its node
def test_a_slow_rank_is_stopped_again_and_again_and_the_others_are_not(rank, tmp_path):
    played = start("python", PLAY, "--slow", f"{rank}=0.3", idle(tmp_path), *LAYOUT)
    wait_until(lambda: have_begun(tmp_path), played)
    titles = {" ".join(one.cmdline()): one for one in psutil.Process(played.process.pid).children(recursive=True)}
    ranks = {int(found[1]): one for title, one in titles.items() if (found := re.search(r" rank (\d) of ", title))}
    seen = {number: [] for number in ranks}

    def stopped_five_times() -> bool:
        for number, one in ranks.items():
            is_stopped = one.status() == psutil.STATUS_STOPPED
            if not seen[number] or seen[number][-1] != is_stopped:
                seen[number].append(is_stopped)
        return sum(seen[rank]) == 5

    wait_until(stopped_five_times, played)
    (tmp_path / "end").touch()
    result = played.result()
    assert result.code == 0, result.output
    assert len(seen) == 3 and [number for number, states in seen.items() if any(states)] == [rank]


WAITS = """
import pathlib, sys, time
print("started", end="", flush=True)
pathlib.Path(__file__).with_name("started-" + sys.argv[sys.argv.index("-i") + 1]).touch()
if "-i 1" not in " ".join(sys.argv) or "fails" not in sys.argv:
    time.sleep(60)
    pathlib.Path(__file__).with_name("ended-" + sys.argv[sys.argv.index("-i") + 1]).touch()
sys.exit(3)
"""


def started(folder):
    """A command that plays two nodes which wait, and their processes, once both have printed."""
    script = folder / "waits.py"
    script.write_text(WAITS)
    command = start("python", PLAY, script, "-g", "1,1")
    wait_until(lambda: len(list(folder.glob("started-*"))) == 2, command)
    return command, psutil.Process(command.process.pid).children()


def test_one_that_is_killed_ends_all_nodes(tmp_path):
    command, nodes = started(tmp_path)
    command.process.send_signal(signal.SIGTERM)
    result = command.result()
    assert result.code == 130, result.output
    assert sorted(result.output.splitlines()) == ["node 0 | started", "node 1 | started"]
    assert not any(node.is_running() for node in nodes)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_one_that_is_killed_with_sigkill_leaves_no_node(tmp_path):
    command, nodes = started(tmp_path)
    command.process.kill()
    _, alive = psutil.wait_procs(nodes, timeout=TIMEOUT_SECONDS)
    command.result()
    assert len(nodes) == 2 and not alive


def test_a_node_that_fails_ends_the_others(tmp_path, monkeypatch):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    monkeypatch.syspath_prepend(str(PLAY.parent))
    play_nodes = importlib.import_module("play_nodes")
    monkeypatch.setattr(play_nodes, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(sys, "argv", [str(PLAY), str(script), "-g", "1,1", "fails"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert play_nodes.main() == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "ended-0").exists()  # it was ended, and did not wait to its own end


@pytest.mark.parametrize("link", ["100", "100Mbit", "0Mbit,1ms", "100Mbit,20", "fast,1ms", ""])
def test_a_link_that_is_none_is_refused(link):
    result = run("python", PLAY, "--link", link, "-m", "common.hello", *LAYOUT)
    assert result.code == 2 and "is not allowed: give the rate each way" in result.output


can_play_hosts = subprocess.run(["unshare", "-Urn", "ip", "link"], capture_output=True).returncode == 0
needs_hosts = pytest.mark.skipif(not can_play_hosts, reason="no `ip`, or this user may not make namespaces")


@needs_hosts
def test_the_nodes_meet_over_the_link_and_the_slow_rank_and_the_flags_come_in_any_order(tmp_path):
    flags = ("--slow", "2=0.9", "--link", "1Gbit,1ms")
    result = run("python", PLAY, *flags, "-m", "common.hello", *LAYOUT, cwd=tmp_path)
    assert result.code == 0, result.output
    assert "tcp://10.78.0.1:" in result.output
    assert result.output.count("hello from") == 3


@needs_hosts
def test_what_is_sent_over_a_link_takes_the_delay_and_the_rate():
    """A megabyte at 8 Mbit/s takes a second, and 30 ms one way are 60 there and back."""
    there_and_back, seconds = json.loads(run("python", "-c", OVER_A_LINK, cwd=ROOT).output)
    assert there_and_back >= 0.06
    assert seconds >= 0.9


OVER_A_LINK = """
import json, os, socket, time
from launch_scripts.played_link import Hosts

hosts = Hosts(3, bytes_per_second=1e6, delay_seconds=0.03)
if not os.fork():
    hosts.enter(2)
    connection, _ = socket.create_server((hosts.address(2), 5000)).accept()
    connection.sendall(connection.recv(1))
    left = 1_000_000
    while left:
        left -= len(connection.recv(left))
    connection.sendall(b"x")
    os._exit(0)
hosts.enter(0)
for _ in range(100):
    try:
        connection = socket.create_connection((hosts.address(2), 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
began = time.monotonic()
connection.sendall(b"x")
connection.recv(1)
there_and_back = time.monotonic() - began
connection.sendall(bytes(1_000_000))
connection.recv(1)
print(json.dumps([there_and_back, time.monotonic() - began - there_and_back]))
hosts.close()
"""


@needs_hosts
def test_nothing_of_a_link_outlives_a_player_that_was_killed(tmp_path):
    played = start("python", PLAY, "--link", "1Gbit,1ms", idle(tmp_path), *LAYOUT)
    wait_until(lambda: have_begun(tmp_path), played)
    processes = psutil.Process(played.process.pid).children(recursive=True)
    assert len(processes) >= 4  # the switch, two nodes, a worker
    played.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)
    assert not alive


@pytest.mark.long
def test_with_elastic_the_others_go_on_after_a_node_has_died(tmp_path):
    trainer = Patient(tmp_path)
    training = (*Patient.FLAGS, "--elastic", 1, "--out-dir", tmp_path / "run")
    played = start("python", PLAY, trainer.script, "-n", 2, "-g", "1,1", "--device", "cpu", *training)
    wait_until(lambda: rows_so_far(tmp_path / "run", "train"), played)
    titles = {" ".join(one.cmdline()): one for one in psutil.Process(played.process.pid).children(recursive=True)}
    next(one for title, one in titles.items() if " rank 1 of 2" in title).kill()
    wait_until(lambda: rows_so_far(tmp_path / "run", "members"), played)
    trainer.end(tmp_path / "run")
    result = played.result()
    assert result.code == 0, result.output
    assert "lost rank 1" in result.output and "done     " in result.output
