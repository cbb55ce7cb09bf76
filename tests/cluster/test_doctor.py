"""The doctor between two real hosts: a healthy pair, and one thing broken at a time. It names what."""

import json
import subprocess

import pytest

from tests.cluster.conftest import Hosts
from tests.harness import Result, start, wait_until

PORT = 29600
LAYOUT = ("--device", "cpu", "--master-port", PORT)
SOON = ("--join-timeout", 5)  # for those who wait in vain


@pytest.fixture
def node(hosts: Hosts, warm):
    """Start the doctor of one node of `-n 2 -g 2,1`; flags given twice take the later value."""

    def start_doctor(number: int, *flags: object, **environ: str) -> start:
        where = ("-n", 2, "-g", "2,1", "-i", number)
        where += ("--master-addr", hosts.addresses["nodea"]) if number else ()
        return hosts.on(
            "nodea" if number == 0 else "nodeb", warm, "-m", "common.doctor", *LAYOUT, *where, *flags, **environ
        )

    return start_doctor


@pytest.fixture
def second_interface(hosts: Hosts):
    """An interface of nodeb that is up, has an address, and leads nowhere."""
    commands = ("link add uneven-x type veth peer name uneven-y", "addr add 192.168.99.1/24 dev uneven-x")
    commands += ("link set uneven-x up", "link set uneven-y up")
    for command in commands:
        subprocess.run(["ip", "-n", "uneven-b", *command.split()], check=True)
    yield "uneven-x"
    subprocess.run(["ip", "-n", "uneven-b", "link", "del", "uneven-x"], check=True)


def both(hosts: Hosts, *nodes: start) -> list[Result]:
    return hosts.together(*nodes)


def assert_named(results: list[Result], *words: str) -> None:
    """Every node says it, with exit code 1."""
    for result in results:
        assert result.code == 1, result.output
        errors = [line for line in result.output.splitlines() if line.startswith("error ")]
        assert any(all(word in line for word in words) for line in errors), result.output
        assert "fix: " in result.output


def test_a_healthy_pair_is_fit_to_train(hosts, node):
    first, second = both(hosts, node(0), node(1))
    assert first.code == second.code == 0, first.output + second.output
    assert "node 0 (nodea) -> node 1 (nodeb)" in first.output
    assert "64 MB" in first.output
    assert "fit to train" in first.output and "fit to train" in second.output


def test_json_alone_is_on_standard_output(hosts, node):
    command = node(0, "--json")
    second = node(1, "--json")
    first, _ = both(hosts, command, second)
    objects = [json.loads(line) for line in first.output.splitlines() if line.startswith("{")]
    (report,) = objects
    assert report["ok"] is True
    assert [rank["place"] for rank in report["ranks"]] == ["node 0 (nodea)", "node 0 (nodea)", "node 1 (nodeb)"]
    assert {(link["from"], link["to"]) for link in report["links"]} == {(0, 2), (2, 0)}
    sizes = [row["bytes"] for row in report["all_reduce"]]
    assert (min(sizes), max(sizes)) == (4, 64 * 1024**2)


def test_a_100_mbit_link_is_reported_as_such(hosts, node):
    hosts.rate("100mbit")
    assert_named(both(hosts, node(0), node(1)), "node 0 (nodea) -> node 1 (nodeb)", "100 Mbit link")


def test_an_interface_that_does_not_exist_is_named_on_both_nodes(hosts, node):
    assert_named(both(hosts, node(0), node(1, "--interface", "eth7")), "node 1 (nodeb)", "--interface is eth7")


def test_an_interface_variable_that_leads_nowhere_is_named_on_both_nodes(hosts, node):
    results = both(hosts, node(0), node(1, GLOO_SOCKET_IFNAME="lo"))
    assert_named(results, "node 1 (nodeb)", "GLOO_SOCKET_IFNAME is lo")


def test_an_interface_that_does_not_reach_the_others_is_named_with_the_one_that_does(hosts, node, second_interface):
    results = both(hosts, node(0), node(1, "--interface", second_interface))
    assert_named(results, "192.168.99.1", second_interface, "node 0 (nodea) -> node 1 (nodeb)")
    for result in results:
        assert f"use --interface {hosts.interfaces['nodeb']}" in result.output


def test_a_cut_link_is_named_on_both_sides(hosts, node):
    hosts.cut()
    first, second = both(hosts, node(0, *SOON), node(1, *SOON))
    assert_named([first], "node 1 (rank 2) did not join")
    assert_named([second], f"10.77.0.1:{PORT} does not answer")
    assert_named([second], "no network interface is up")


def test_a_link_that_is_cut_in_the_middle_is_named(hosts, node):
    hosts.rate("1mbit")  # so slow that the link test is under way when the link goes
    started = [node(0), node(1)]
    wait_until_connected(hosts)
    hosts.cut()
    first, second = both(hosts, *started)
    assert_named([first], "rank 2, node 1 (nodeb)")
    assert_named([second])


def wait_until_connected(hosts: Hosts) -> None:
    """Until a connection of the link test is open: one between the hosts that is not to the master's port."""

    def is_connected() -> bool:
        shown = hosts.run("nodea", "ss", "-tnH", "state", "established").output
        return any("10.77.0.2" in line and f":{PORT} " not in line for line in shown.splitlines())

    wait_until(is_connected)


def test_a_firewall_between_the_nodes_is_named(hosts, node):
    rule = ["INPUT", "-p", "tcp", "-s", "10.77.0.1", "--syn", "-j", "DROP"]  # nodea opens no connection to nodeb
    hosts.run("nodeb", "iptables", "-A", *rule)
    try:
        results = both(hosts, node(0), node(1))
    finally:
        hosts.run("nodeb", "iptables", "-D", *rule)
    assert_named(results, "node 0 (nodea) -> node 1 (nodeb)", "cannot connect to 10.77.0.2")
    assert "firewall of node 1 (nodeb)" in results[0].output


@pytest.mark.parametrize("present, missing", [(0, "node 1 (rank 2)"), (1, "the master (node 0)")])
def test_a_missing_node_is_named(hosts, node, present, missing):
    assert_named(both(hosts, node(present, *SOON)), missing)


def test_a_wrong_layout_on_one_node_is_named_on_both(hosts, node):
    results = both(hosts, node(0), node(1, "-g", "3,1"))
    assert_named(results, "node 1 (nodeb", "-g/--gpus 3,1", "2,1")


def test_a_busy_port_is_named(hosts, node):
    holder = hosts.on("nodea", "python", "-m", "http.server", PORT)
    wait_until(lambda: f":{PORT} " in hosts.run("nodea", "ss", "-tlnH").output, holder)
    try:
        first, second = both(hosts, node(0), node(1, *SOON))
    finally:
        holder.process.kill()
        holder.process.communicate()
    assert_named([first], f"--master-port {PORT} on nodea is held by another program")
    assert_named([second])
