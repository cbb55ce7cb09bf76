"""The doctor on one machine: its rules, its link test, and every node's answer when something is wrong."""

import json
import socket
import time

import pytest
import torch
import torch.distributed as dist

from common.doctor import diagnosis
from common.doctor import links as link_test
from common.doctor import node as node_facts
from common.doctor import speed as speed_test
from common.doctor.examination import Board, Watch
from common.join.process_group import Joined
from common.launch.layout import Layout, free_port
from tests.harness import ROOT, Node, Result, playing, run

DOCTOR = ROOT / "common" / "doctor.py"

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


def only(findings: list[diagnosis.Finding]) -> diagnosis.Finding:
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
    assert words in finding.problem and finding.mend


def test_the_jobs_own_processes_on_a_gpu_are_no_finding():
    own = {**HEALTHY, "gpu_processes": [{"pid": 77, "memory_mb": 9000, "name": "python"}]}
    assert diagnosis.judge_node("node 0", own, own_pids={77}) == []


def test_rows_of_nvidia_smi_become_processes():
    lines = "4711, 30512, /usr/bin/python, with a comma\n4712, [N/A], python\n[Not Found]\n"
    found = [(entry["pid"], entry["memory_mb"]) for entry in node_facts.parse_processes(lines)]
    assert found == [(4711, 30512), (4712, None)]


ADDRESSES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fe80::1"]}


@pytest.mark.parametrize("variable", diagnosis.INTERFACE_VARIABLES)
def test_an_interface_variable_must_name_an_interface_that_leads_out(variable):
    def judge(value: str) -> list[diagnosis.Finding]:
        return diagnosis.judge_interfaces("node 0", None, {variable: value}, ADDRESSES, nodes=2)

    assert judge("eth0") == []
    assert f"{variable} is ib0" in only(judge("ib0")).problem
    assert "this machine only" in only(judge("lo")).problem


def test_nccls_own_forms_of_an_interface_are_accepted():
    for value in ("^docker", "=eth0", "eth"):
        environ = {"NCCL_SOCKET_IFNAME": value}
        assert diagnosis.judge_interfaces("node 0", None, environ, ADDRESSES, nodes=2) == []


def test_loopback_is_right_for_one_node_and_no_network_for_two():
    assert diagnosis.judge_interfaces("node 0", "lo", {}, ADDRESSES, nodes=1) == []
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
    assert "--shares 3,1" in finding.mend


@pytest.mark.parametrize("mbit, name", [(95, "100 Mbit"), (941, "1 Gbit"), (9_400, "10 Gbit"), (200, "slow")])
def test_a_measured_rate_is_called_after_the_line_that_carries_it(mbit, name):
    assert diagnosis.link_class(mbit) == name


# --- the link test ----------------------------------------------------------------------------------------------


def test_a_link_is_measured_and_the_same_machine_has_the_same_clock():
    listener = link_test.Listener("127.0.0.1")
    found = link_test.measure("127.0.0.1", listener.port, listener.identity, seconds=0.05)
    listener.close()
    assert found["mbit_per_second"] > 1 and found["latency_ms"] > 0
    assert abs(found["clock_ms"]) < 1000


def test_another_program_at_the_address_is_not_taken_for_the_node():
    listener = link_test.Listener("127.0.0.1")
    found = link_test.measure("127.0.0.1", listener.port, "0" * link_test.IDENTITY_BYTES, seconds=0.05)
    listener.close()
    assert found == {"error": "another program answers there"}


def test_a_port_that_nobody_listens_on_is_an_answer_not_an_exception():
    assert "refused" in link_test.measure("127.0.0.1", free_port(), "", seconds=0.05)["error"]


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9])
def test_the_rounds_hold_every_pair_once_and_no_node_twice_at_a_time(nodes):
    rounds = link_test.rounds(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(low, high) for low in range(nodes) for high in range(low + 1, nodes)]
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))


# --- waiting ----------------------------------------------------------------------------------------------------


def test_a_rank_that_falls_silent_is_left_out_and_named():
    worker = Layout(source="test", world_size=2, first_rank=0, local_world_size=1).workers()[0]
    board = Board(worker, Joined(dist.HashStore(), [], "127.0.0.1"))
    assert board.exchange("looking", "mine", seconds=0.1) == {0: "mine"}
    began = time.monotonic()
    assert board.exchange("the next stage", "mine", seconds=60) == {0: "mine"}  # nobody waits for it again
    assert time.monotonic() - began < 30
    finding = only(board.findings({0: "node 0", 1: "node 1"}))
    assert (finding.where, finding.problem) == ("rank 1, node 1", "fell silent while looking")


def test_the_watch_tells_which_stage_did_not_end():
    expired = []
    watch = Watch(expired.append)
    watch.enter("one", 60)
    watch.enter("two", 0.05)
    deadline = time.monotonic() + 30
    while not expired and time.monotonic() < deadline:
        time.sleep(0.02)
    assert expired == ["two"]


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
    return playing(DOCTOR, nodes, tmp_path).results(timeout=60)


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


def test_a_wrong_layout_on_one_node_is_named_on_both(tmp_path):
    for result in examine(tmp_path, second=("-g", "3,1")):
        assert "-g/--gpus 3,1" in errors(result) and "2,1" in errors(result)


def test_a_wrong_interface_on_one_node_is_named_on_both(tmp_path):
    for result in examine(tmp_path, second=("--interface", "eth77")):
        assert "node 1" in errors(result) and "--interface is eth77" in errors(result)


def test_a_missing_node_is_named(tmp_path):
    (result,) = examine(tmp_path, first=("--join-timeout", 2), second=None)
    assert "node 1 (rank 2) did not come within 2 s" in errors(result)


def test_a_slow_link_is_an_error_with_its_rate(tmp_path):
    for result in examine(tmp_path, first=("--min-rate", 1e9), second=("--min-rate", 1e9)):
        assert "Mbit/s, where training wants 1000000000" in errors(result)


def test_a_busy_port_is_named(tmp_path):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (result,) = examine(tmp_path, first=("--master-port", port), second=None)
    assert f"--master-port {port}" in errors(result) and "held by another program" in errors(result)


def test_the_doctor_of_one_machine_prints_json_and_nothing_else():
    result = run("python", "-m", "common.doctor", "-n", 1, "-g", 1, "--device", "cpu", "--json", cwd=ROOT)
    assert result.code == 0, result.output
    report = json.loads(result.output)
    assert report["nodes"][0]["host"] == socket.gethostname()
    assert report["ok"] and report["links"] == []
