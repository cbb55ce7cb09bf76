"""The test hosts themselves: two machines with names, addresses and a link of their own."""

import pytest


def test_each_host_has_its_name(hosts):
    assert hosts.run("nodea", "hostname").output == "nodea\n"
    assert hosts.run("nodeb", "hostname").output == "nodeb\n"


def test_a_cut_link_carries_nothing(hosts):
    reach = ("python", "-c", "import socket; socket.create_connection(('10.77.0.1', 9), timeout=1)")
    assert "refused" in hosts.run("nodeb", *reach).output
    hosts.cut()
    assert "refused" not in hosts.run("nodeb", *reach).output


def test_slurm_runs_tasks_on_both_hosts(slurm):
    result = slurm("timeout", 60, "srun", "-N2", "-n2", "hostname").result()
    assert sorted(result.output.split()) == ["nodea", "nodeb"]


@pytest.mark.parametrize("host", ["nodea", "nodeb"])
def test_ssh_reaches_each_host(host, hosts, ssh_config):
    assert hosts.run("nodea", "ssh", "-F", ssh_config, host, "hostname").output == f"{host}\n"
