"""The doctor on one machine: its rules, its link test, and every node's answer when something is wrong."""

import json
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from common.doctor import diagnosis, mesh
from common.doctor import node as node_facts
from common.doctor import speed as speed_test
from common.doctor.advice import advise
from common.doctor.board import Board
from common.doctor.examination import Examination, Options
from common.doctor.finding import Finding, from_error
from common.doctor.links import IDENTITY_BYTES, Connection, Server, reason
from common.doctor.report import Report
from common.errors import RunError, UserError
from common.join import interfaces
from common.launch.addresses import free_port
from common.launch.layout import Layout
from common.launch.options import JoinOptions
from tests.harness import ROOT, Node, Result, playing, run
from tests.test_first_answer import imported

DOCTOR = ROOT / "common" / "doctor" / "__main__.py"

# --- rules: from facts to findings ------------------------------------------------------------------------------

HEALTHY = {
    "settings": {},
    "disk": {"path": "/work", "free_gb": 100.0},
    "shm": {"free_gb": 10.0, "total_gb": 10.0},
    "open_files": 65536,
    "gpus": [{"index": 0, "name": "H100", "memory_gb": 80.0}],
    "gpu_processes": [],
    "driver": "580.1",
    "cuda": "13.2",
}


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_node_has_no_finding():
    assert diagnosis.judge_node("node 0", HEALTHY, set()) == []


@pytest.mark.parametrize(
    "broken, level, words",
    [
        ({"settings": {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}}, "error", "TORCH_ELASTIC_WORKER_IDENTICAL"),
        ({"disk": {"path": "/work", "free_gb": 0.1}}, "error", "/work has 0.10 GB free"),
        ({"shm": {"free_gb": 0.06, "total_gb": 0.064}}, "warning", "/dev/shm"),
        ({"open_files": 256}, "warning", "256 files"),
        ({"gpus": [{"index": 3, "name": "unusable: ECC", "memory_gb": None}]}, "error", "GPU 3 is unusable: ECC"),
        ({"gpus": []}, "error", "sees no GPU"),
        ({"gpu_processes": [{"pid": 77, "memory_mb": 9000, "name": "python"}]}, "warning", "process 77 (python)"),
    ],
)
def test_each_broken_fact_of_a_node_is_one_finding(broken, level, words):
    finding = only(diagnosis.judge_node("node 1 (b)", {**HEALTHY, **broken}, own_pids=set()))
    assert (finding.level, finding.where) == (level, "node 1 (b)")
    assert words in finding.problem and finding.fix


def test_the_jobs_own_processes_on_a_gpu_are_no_finding():
    own = {**HEALTHY, "gpu_processes": [{"pid": 77, "memory_mb": 9000, "name": "python"}]}
    assert diagnosis.judge_node("node 0", own, own_pids={77}) == []


def test_rows_of_nvidia_smi_become_processes():
    lines = "4711, 30512, /usr/bin/python, with a comma\n4712, [N/A], python\n[Not Found]\n"
    found = [(entry["pid"], entry["memory_mb"]) for entry in node_facts.parse_processes(lines)]
    assert found == [(4711, 30512), (4712, None)]


ADDRESSES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fe80::1"]}


def wrong(value: str, backend: str = "gloo", leaves: bool = True, flag: str | None = None) -> str:
    """What is said of the backend's variable with this value, or of the flag."""
    found = interfaces.wrong(flag, {interfaces.VARIABLES[backend]: value}, ADDRESSES, backend, leaves)
    return found[0] if found else ""


@pytest.mark.parametrize("backend", interfaces.VARIABLES)
def test_an_interface_variable_must_name_an_interface_that_leads_out(backend):
    assert not wrong("eth0", backend)
    assert not wrong("lo", backend, leaves=False)
    assert f"{interfaces.VARIABLES[backend]} is ib0, but this node has no such" in wrong("ib0", backend)
    assert "this machine only" in wrong("lo", backend)


@pytest.mark.parametrize("value", ["^docker", "=eth0", "eth", "ib0,eth", "^=lo", "^lo,docker"])
def test_nccls_own_forms_of_an_interface_are_for_nccl_alone(value):
    assert not wrong(value, "nccl")
    assert "GLOO_SOCKET_IFNAME is " in wrong(value, "gloo")


@pytest.mark.parametrize("value", ["=et", "^eth,lo", "=ib0,lo0"])
def test_a_form_of_nccls_that_leaves_no_interface_is_wrong(value):
    assert "no such interface" in wrong(value, "nccl")


def test_gloo_needs_every_interface_of_its_list():
    assert not wrong("eth0,lo")
    assert "GLOO_SOCKET_IFNAME is eth0,ib0" in wrong("eth0,ib0")


def test_the_flag_takes_precedence_over_a_variable():
    assert not wrong("ib0", flag="eth0")
    assert "--interface is ib0" in wrong("eth0", flag="ib0")


def test_two_nodes_without_a_network_are_named():
    alone = {"lo": ["127.0.0.1"], "eth0": ["fe80::1"]}
    assert diagnosis.judge_network("node 0", alone, nodes=1) == []
    assert "no network" in only(diagnosis.judge_network("node 0", alone, nodes=2)).problem


def test_a_setting_that_differs_between_nodes_is_named_with_both_values():
    nodes = {"node 0": {"settings": {"NCCL_ALGO": "Ring"}}, "node 1": {"settings": {"OMP_NUM_THREADS": "1"}}}
    finding = only(diagnosis.judge_settings(nodes))
    assert finding.problem == "NCCL_ALGO is not set, but on node 0 it is Ring"


def test_slow_ranks_are_told_their_shares():
    ranks = [
        {"rank": rank, "bf16": "ok", "memory_gb": None, "fp32_tflops": tflops} for rank, tflops in ((0, 3), (1, 1))
    ]
    finding = only(diagnosis.judge_ranks({0: "node 0", 1: "node 1"}, ranks))
    assert finding.where == "rank 1, node 1"
    assert "--shares 3,1" in finding.fix


@pytest.mark.parametrize("mbit, name", [(95, "100 Mbit"), (941, "1 Gbit"), (9_400, "10 Gbit"), (200, "slow")])
def test_a_measured_rate_is_called_after_the_line_that_carries_it(mbit, name):
    assert diagnosis.link_class(mbit) == name


# --- the link test ----------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    with Server("127.0.0.1") as server:
        yield server
        server.shutdown()


def test_a_link_is_measured_and_the_same_machine_has_the_same_clock(server):
    connection = Connection("127.0.0.1", server.port, server.identity)
    latency, ahead = connection.latency()
    assert 0 < latency < 1 and abs(ahead) < 1
    assert connection.rate(seconds=0.05) > 1e6
    connection.close()


def test_another_program_at_the_address_is_not_taken_for_the_node(server):
    with pytest.raises(OSError) as caught:
        Connection("127.0.0.1", server.port, "0" * IDENTITY_BYTES)
    assert reason(caught.value) == "another program answers there"


def test_a_port_that_nobody_listens_on_is_a_refused_connection():
    with pytest.raises(OSError) as caught:
        Connection("127.0.0.1", free_port(), "")
    assert "refused" in reason(caught.value)


def test_a_node_that_leaves_in_the_middle_is_a_closed_connection():
    with socket.create_server(("127.0.0.1", 0)) as other:
        identity = "1" * IDENTITY_BYTES

        def answer_once() -> None:
            connection, _ = other.accept()
            connection.sendall(identity.encode())
            connection.close()

        thread = threading.Thread(target=answer_once)
        thread.start()
        connection = Connection("127.0.0.1", other.getsockname()[1], identity)
        thread.join()
        with pytest.raises(OSError) as caught:
            connection.latency()
        connection.close()
    assert reason(caught.value)


class Held(Connection):
    """Its first transfer after the one that fills the path waits for a core."""

    def __init__(self) -> None:
        self.round_trip_seconds, self.sizes = 0.0, list[int]()

    def _send(self, size: int) -> tuple[float, float]:
        self.sizes.append(size)
        is_held = len(self.sizes) == 2
        time.sleep(0.5 * is_held)  # longer than all of the time for one link
        return size / 1e9 + 0.5 * is_held, 0.0


def test_the_rate_of_a_link_is_that_of_a_transfer_that_waits_for_no_core():
    assert Held().rate(seconds=0.4) == pytest.approx(8e9)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9])
def test_every_node_measures_its_link_to_every_other_once_and_sends_to_one_at_a_time(nodes, monkeypatch):
    """The first ranks of the nodes are 0, 2, 4, ...; what is measured at the same time is told by the barriers."""
    store, ranks, sending = dist.HashStore(), range(0, 2 * nodes, 2), []
    rate = Connection.rate

    def noted(self: Connection, seconds: float) -> float:
        sending.append((self.socket.getpeername(), 1))
        time.sleep(0.02)
        try:
            return rate(self, seconds=0.001)
        finally:
            sending.append((self.socket.getpeername(), -1))

    monkeypatch.setattr(Connection, "rate", noted)
    servers = {rank: Server("127.0.0.1") for rank in ranks}
    endpoints = {
        rank: {"address": "127.0.0.1", "port": one.port, "identity": one.identity} for rank, one in servers.items()
    }
    boards = {rank: Board(rank, 2 * nodes, store) for rank in ranks}
    with ThreadPoolExecutor(max_workers=nodes) as pool:
        found = list(pool.map(lambda rank: mesh.measure(rank, endpoints, boards[rank]), ranks))
    for one in servers.values():
        one.close()
    links = [link for own in found for link in own]
    expected = sorted((low, high) for low in ranks for high in ranks if low != high)
    assert sorted((link["from"], link["to"]) for link in links) == expected
    assert all(link["mbit_per_second"] > 0 and link["latency_ms"] > 0 for link in links)
    receiving: Counter = Counter()
    for peer, change in sending:
        receiving[peer] += change
        assert receiving[peer] <= 1, "two nodes send to one at the same time"


def test_a_link_that_was_not_measured_for_want_of_time_is_no_finding():
    link = {"from": 0, "to": 1, "port": 1, "latency_ms": 1.0, "clock_ms": 0.0, "mbit_per_second": None}
    assert diagnosis.judge_links({0: "node 0", 1: "node 1"}, {}, [link], 500) == []


@pytest.mark.parametrize(
    "measured, problem", [({}, "cannot connect to 10.0.0.2"), ({"latency_ms": 1.0}, "lost the connection to 10.0.0.2")]
)
def test_a_broken_link_says_whether_it_ever_worked(measured, problem):
    link = {"from": 0, "to": 1, "port": 7, "error": "no answer (timed out)", **measured}
    nodes = {1: {"endpoint": {"address": "10.0.0.2", "interface": "eth1", "met_on": "eth0"}}}
    finding = only(diagnosis.judge_links({0: "node 0", 1: "node 1"}, nodes, [link], 500))
    assert finding.problem == f"{problem} (interface eth1) port 7: no answer (timed out)"
    assert ("use --interface eth0" in finding.fix) == (not measured)


def test_clocks_that_differ_are_a_warning():
    link = {"from": 0, "to": 1, "port": 1, "latency_ms": 1.0, "clock_ms": -3000.0, "mbit_per_second": 900}
    finding = only(diagnosis.judge_links({0: "node 0", 1: "node 1"}, {}, [link], 500))
    assert (finding.level, finding.where) == ("warning", "node 0 -> node 1")
    assert "differ by 3.0 s" in finding.problem


# --- errors as findings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_the_fix_of_an_explained_error_becomes_that_of_the_finding(kind):
    finding = from_error("joining", kind("node 1: has 3,1: make them the same"))
    assert (finding.problem, finding.fix) == ("node 1: has 3,1", "make them the same")


def test_of_another_error_the_first_line_is_the_problem():
    finding = from_error("joining", RuntimeError("CUDA error: unknown\nat line 7"))
    assert finding.problem == "CUDA error: unknown"


# --- waiting ----------------------------------------------------------------------------------------------------


def test_a_rank_that_stops_answering_is_left_out_and_named():
    board = Board(0, 2, dist.HashStore())
    assert board.exchange("looking", "mine", seconds=0.1) == {0: "mine"}
    assert board.exchange("the next stage", "mine", seconds=3600) == {0: "mine"}  # nobody waits for it again
    finding = only(board.findings({0: "node 0", 1: "node 1"}))
    assert (finding.where, finding.problem) == ("rank 1, node 1", "stopped answering while looking")


HANGS = """
import sys, time
from common.doctor.examination import Examination, Options
from common.launch.layout import Layout
from common.launch.options import JoinOptions

worker = Layout(source="test", world_size=1, first_rank=0, local_world_size=1).workers()[0]
examination = Examination(worker, Options(json=False, min_mbit=1, join=JoinOptions()), sys.stdout)
with examination._stage("one", 60):
    pass
with examination._stage("two", 0.05):
    time.sleep(3600)
"""


@pytest.mark.long
def test_a_stage_that_does_not_end_is_named_in_the_report_and_ends_the_process():
    result = run("python", "-c", HANGS, cwd=ROOT)
    assert "two did not end: this rank did not answer in time" in errors(result)
    assert "fix: is that process alive" in result.output


def test_sizes_that_would_take_too_long_are_left_out():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = speed_test.all_reduce_times(torch.device("cpu"), sizes=(4, 64, 1024), budget_seconds=0.0)
    finally:
        dist.destroy_process_group()
    assert rows[0]["ms"] is not None
    assert [row["ms"] for row in rows[1:]] == [None, None]
    assert all(row["expected_ms"] >= 0 for row in rows[1:])


# --- whole runs, two nodes on this machine ----------------------------------------------------------------------


def examine(tmp_path, first: tuple = (), second: tuple | None = ()) -> list[Result]:
    """The doctor of both nodes of `-n 2 -g 2,1`, each with further flags; None: that node is missing."""
    port = free_port()
    layout = ("-n", 2, "-g", "2,1", "--device", "cpu", "--master-port", port, "--master-addr", "127.0.0.1")
    nodes = [Node([*layout, "-i", 0, *first])]
    if second is not None:
        nodes.append(Node([*layout, "-i", 1, *second]))
    return playing(DOCTOR, nodes, tmp_path).results()


def errors(result: Result) -> str:
    assert result.code == 1, result.output
    return "\n".join(line for line in result.output.splitlines() if line.startswith("error "))


def test_a_healthy_pair_gives_one_report_on_all_nodes(tmp_path):
    first, second = examine(tmp_path, ("--json",), ("--json",))
    assert first.code == second.code == 0, first.output + second.output
    reports = [
        json.loads(line) for result in (first, second) for line in result.output.splitlines() if line.startswith("{")
    ]
    assert len(reports) == 2 and reports[0]["ok"]
    assert reports[0]["ranks"] == reports[1]["ranks"] and len(reports[0]["ranks"]) == 3
    assert [(link["from"], link["to"]) for link in reports[0]["links"]] == [(0, 2), (2, 0)]
    assert [row["bytes"] for row in reports[0]["all_reduce"]] == list(speed_test.SIZES)
    assert reports[0]["advice"].startswith("for BERT-base, 8 rows of 128 tokens a rank and step: ")


def test_a_wrong_layout_on_one_node_is_named_on_both(tmp_path):
    for result in examine(tmp_path, second=("-g", "3,1")):
        assert "-g/--gpus 3,1" in errors(result) and "2,1" in errors(result)


@pytest.mark.long
def test_a_wrong_interface_on_one_node_is_named_on_both(tmp_path):
    for result in examine(tmp_path, second=("--interface", "eth77")):
        assert "node 1" in errors(result) and "--interface is eth77" in errors(result)


def test_a_missing_node_is_named(tmp_path):
    (result,) = examine(tmp_path, first=("--join-timeout", 2), second=None)
    assert "node 1 (rank 2) did not join within 2 s" in errors(result)


def test_the_report_comes_also_when_rank_0_and_its_store_are_gone():
    """The store fails as TCPStore does when its server has died, in the stage after the join."""

    class GoneStore:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("failed to recv, got 0 bytes\nException raised from recvBytes")

    worker = Layout(source="test", world_size=2, first_rank=1, local_world_size=1, nodes=2, node_rank=1).workers()[0]
    examination = Examination(worker, Options(json=False, min_mbit=1, join=JoinOptions()), sys.stdout)
    examination.board = Board(1, 2, dist.HashStore())
    examination.board.store = GoneStore()
    examination._run_stages = lambda: examination.board.exchange("looking", None, seconds=1)
    examination.run()
    finding = only(examination.report.findings)
    assert finding.problem == "lost contact with rank 0: failed to recv, got 0 bytes"


def test_a_slow_link_is_an_error_with_its_rate(tmp_path):
    for result in examine(tmp_path, first=("--min-rate", 1e9), second=("--min-rate", 1e9)):
        assert "Mbit/s, but training needs 1000000000" in errors(result)


def test_a_busy_port_is_named(tmp_path):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (result,) = examine(tmp_path, first=("--master-port", port), second=None)
    assert f"--master-port {port}" in errors(result) and "held by another program" in errors(result)


@pytest.mark.parametrize("command", [
    pytest.param(("-m", "common.doctor"), id="-m"),
    pytest.param((DOCTOR,), id="by path", marks=pytest.mark.long),
])  # fmt: skip
def test_the_doctor_of_one_machine_prints_json_and_nothing_else(command, tmp_path):
    folder = ROOT if command[0] == "-m" else tmp_path
    result = run("python", *command, "-n", 1, "-g", 1, "--device", "cpu", "--json", cwd=folder)
    assert result.code == 0, result.output
    report = json.loads(result.output)
    assert report["nodes"][0]["host"] == socket.gethostname()
    assert report["ok"] and report["links"] == []


@pytest.mark.long
def test_json_may_be_asked_for_on_one_node_alone(tmp_path):
    for result in examine(tmp_path, ("--json",), ()):
        assert result.code == 0, result.output


@pytest.mark.parametrize("flags, code", [("--help", 0), ("--min-rate 0", 2), ("-n 2 -g 8,2", 2)])
def test_the_doctor_answers_help_and_wrong_flags_without_torch(flags, code):
    result = run("python", "-X", "importtime", "-m", "common.doctor", *flags.split(), cwd=ROOT)
    assert result.code == code, result.output
    assert not imported(result.output) & {"torch", "numpy", "psutil"}


def advised(rank_tflops: tuple[float, ...], mbit: float) -> str:
    """The doctor's advice for nodes of two ranks and one, whose link has this rate."""
    layout = Layout("-n 2 -g 2,1 -i 0", world_size=3, first_rank=0, local_world_size=2, nodes=2, gpus_per_node=(2, 1))
    report = Report(layout)
    report.ranks = [{"rank": rank, "device": "cpu", "fp32_tflops": tflops} for rank, tflops in enumerate(rank_tflops)]
    report.links = [{"from": 0, "to": 2, "mbit_per_second": mbit, "latency_ms": 0.1}]
    report.all_reduce = [{"bytes": size, "ms": size * 12e-3 / mbit} for size in (4, 2**20, 2**26)]
    return advise(report)


def test_the_advice_follows_the_ranks_and_the_link():
    assert "nothing to change" in advised((0.1, 0.1, 0.1), mbit=10_000)
    assert "--balance auto (the result stays the same)" in advised((0.1, 0.1, 0.03), mbit=10_000)
    assert "--sync-every 50 (changes the result" in advised((10.0, 10.0, 10.0), mbit=10)
