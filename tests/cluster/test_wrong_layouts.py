"""Mistakes that only one node can see: every node gets the same line, and nobody waits for the others."""

import pytest

from common.join import meeting_file
from common.join.meeting_file import Place
from tests.cluster.conftest import PYTHON
from tests.cluster.test_launchers import MASTER, PORT, openmpi
from tests.cluster.test_scripts import HELLO
from tests.harness import Result

CPU = ("--device", "cpu")
TWO = ("-n", 2, "-g", "2,1", "--master-port", PORT)


def assert_refused(results: list[Result], *words: str, code: int = 2) -> None:
    """Each node ends, and says exactly one line of error, with these words."""
    for result in results:
        errors = [line for line in result.output.splitlines() if "error:" in line]
        assert result.code == code, result.output
        assert len(errors) == 1, result.output
        assert all(word in errors[0] for word in words), errors


def two_nodes(hosts, warm, *more: object, first: tuple = (), second: tuple = ()) -> list[Result]:
    """hello on both hosts, with flags for both and for each."""
    return hosts.together(
        hosts.on("nodea", warm, HELLO, *CPU, *TWO, "-i", 0, *more, *first),
        hosts.on("nodeb", warm, HELLO, *CPU, *TWO, "-i", 1, "--master-addr", MASTER, *more, *second),
    )


def hetseq(hosts, url: str, *places: tuple[str, int, int, int], wrap: dict[str, tuple] | None = None) -> list[Result]:
    """hello on hosts, each with (host, world size, processes, first rank)."""
    return hosts.together(
        *(
            hosts.on(
                host,
                *(wrap or {}).get(host, ()),
                *("python", HELLO, *CPU, "--distributed-init-method", url, "--distributed-world-size", world_size),
                *("--distributed-gpus", count, "--distributed-rank", rank),
            )
            for host, world_size, count, rank in places
        ),
    )


def test_an_interface_that_one_node_does_not_have(hosts, warm):
    results = two_nodes(hosts, warm, second=("--interface", "ib0"))
    assert_refused(results, "--interface is ib0, but this node has no such interface", "uneven-vb")


@pytest.mark.parametrize("backend", ["mpi", "ucc"])
def test_a_backend_that_torch_was_built_without(backend, hosts, warm):
    results = two_nodes(hosts, warm, "--backend", backend)
    assert_refused(results, f"--backend is {backend}, but torch", "was built without it", "use --backend gloo")


def test_nccl_on_one_node_without_gpus(hosts, warm):
    results = two_nodes(hosts, warm, second=("--backend", "nccl"))
    assert_refused(results, "--backend is nccl", "needs a GPU for each rank", "nodeb", "use --backend gloo")


def test_a_rank_that_two_nodes_claim(hosts):
    results = hetseq(hosts, f"tcp://{MASTER}:{PORT}", ("nodea", 4, 2, 0), ("nodeb", 4, 2, 1))
    assert_refused(results, "rank 1 is claimed twice", "nodea", "nodeb", "--distributed-rank")


def test_world_sizes_that_differ(hosts):
    results = hetseq(hosts, f"tcp://{MASTER}:{PORT}", ("nodea", 3, 2, 0), ("nodeb", 4, 1, 2))
    assert_refused(results, "world size 4", "world size", "3", "nodea", "nodeb")


def test_a_file_that_is_not_shared(hosts, tmp_path):
    private = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path))
    places = [("nodea", 3, 2, 0), ("nodeb", 3, 1, 2)]
    results = hetseq(hosts, f"file://{tmp_path}/meeting", *places, wrap={"nodeb": private})
    for result, word in zip(results, ["nodea", "nodeb"], strict=True):
        assert_refused([result], "did not join within", f"is on a disk of {word} alone", "all nodes share", code=1)


def test_a_file_of_a_dead_run_is_used_again(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    places = [("nodea", 3, 2, 0), ("nodeb", 3, 1, 2)]
    meeting_file.write(tmp_path / "meeting", Place(MASTER, 9, "dead"))  # nothing listens there
    results = hetseq(hosts, url, *places)
    assert [result.code for result in results] == [0, 0], results
    assert not (tmp_path / "meeting").exists()


PRETENDED_DRIVER = """
  mount -t tmpfs none /proc/driver
  for ((gpu = 0; gpu < $([[ $(hostname) == nodea ]] && echo 8 || echo 2); gpu++)); do
    mkdir -p "/proc/driver/nvidia/gpus/$gpu"
  done
  exec "$@"
"""


def test_nine_tasks_on_the_node_with_eight_gpus(slurm):
    # 9,1 is Slurm's own answer to these options on nodes with 8 and 2
    task = ("unshare", "--mount", "bash", "-c", PRETENDED_DRIVER, "task", PYTHON, HELLO)
    result = slurm("timeout", 280, "srun", "-N2", "-n10", "--gpus=10", *task).result()
    errors = [line for line in result.output.splitlines() if "error:" in line and "srun: error" not in line]
    assert len(errors) == 2, result.output  # one of each node
    for line in errors:
        assert "nodea" in line
        assert "srun with 9 here asks for 9 GPUs, but this node has 8" in line


def test_flags_beside_a_launcher(hosts, ssh_config):
    result = hosts.run("nodea", *openmpi(ssh_config), "-np", 2, PYTHON, HELLO, *CPU, "-n", 1, "-g", 2, "-i", 0)
    assert "-n/--nodes 1 is given, but Open MPI's mpirun has already started this process" in result.output


def test_mpirun_on_two_hosts_without_an_address(hosts, ssh_config):
    command = [*openmpi(ssh_config), "--host", "nodea:1,nodeb:1", "-np", 2, PYTHON, HELLO, *CPU]
    assert "--master-addr is missing" in hosts.run("nodea", *command).output
