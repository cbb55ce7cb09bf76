"""Flags and environment -> layout: every source, every wrong combination. Nothing is started, no torch is imported."""

import re
import socket
import subprocess
import sys

import pytest

from common.errors import UserError
from common.join import meeting_file
from common.launch import cli
from common.launch.addresses import free_port, host_and_port, tcp_address
from common.launch.detect import layout_from
from common.launch.options import LayoutFlags
from common.launch.slurm import expand_counts, expand_hosts

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"},
    **{"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "29501", "TORCHELASTIC_RUN_ID": "x"},
}
SRUN = {
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
    **{"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_GTIDS": "3"},
    **{"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURMD_NODENAME": "nodeb"},
    "SLURM_STEP_NODELIST": "nodea,nodeb",
}
OPENMPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "2037383169", "MASTER_ADDR": "nodea"},
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "nodea"}
TCP = "--distributed-init-method tcp://nodea:11111 "


def layout_of(flags: str, environ: dict | None = None):
    return layout_from(cli.layout_flags(cli.parser("").parse_args(flags.split())), environ or {})


@pytest.fixture
def node_with(monkeypatch):
    """A node with this many GPUs, as the driver would list them."""

    def set_gpus(count: int) -> None:
        monkeypatch.setattr("common.launch.gpus._driver_gpus", lambda: count)

    set_gpus(0)
    return set_gpus


@pytest.fixture(autouse=True)
def no_gpus(node_with):
    """Whatever this machine has: the tests say what there is."""


def without(variables: dict, *names: str) -> dict:
    return {name: value for name, value in variables.items() if name not in names}


# --- what each source gives --------------------------------------------------------------------------------------

CPU = " --device cpu"


@pytest.mark.parametrize(
    ("flags", "environ", "world_size", "ranks", "spawn", "meets"),
    [
        ("-n 1 -g 4 -i 0", {}, 4, [0, 1, 2, 3], True, r"tcp://127.0.0.1:\d+"),
        ("-n 2 -g 3,1 -i 0", {}, 4, [0, 1, 2], True, "tcp://0.0.0.0:29500"),
        ("-n 2 -g 3,1 -i 0", {"MASTER_ADDR": "localhost"}, 4, [0, 1, 2], True, "tcp://0.0.0.0:29500"),
        ("-n 2 -g 3,1 -i 1 --master-addr localhost", {}, 4, [3], True, "tcp://localhost:29500"),
        ("-n 2 -g 3,1 -i 1 --master-addr a", {}, 4, [3], True, "tcp://a:29500"),
        ("-n 3 -g 2,1,1 -i 2 --master-port 5", {"MASTER_ADDR": "a"}, 4, [3], True, "tcp://a:5"),
        ("--distributed-world-size 1 --device-id 1", {}, 1, [0], False, r"tcp://127.0.0.1:\d+"),
        ("--distributed-world-size 4", {}, 4, [0, 1, 2, 3], True, r"tcp://127.0.0.1:\d+"),
        (TCP + "--distributed-world-size 16 --distributed-gpus 4 --distributed-rank 12", {}, 16, [12, 13, 14, 15],
         True, "tcp://nodea:11111"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 3 --distributed-rank 0", {}, 4, [0, 1, 2], True,
         "tcp://nodea:11111"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 1 --distributed-rank 3", {}, 4, [3], False,
         "tcp://nodea:11111"),
        (TCP + "--distributed-world-size 4 --distributed-rank 2 --distributed-no-spawn --device-id 2", {}, 4, [2],
         False, "tcp://nodea:11111"),
        ("--distributed-init-method file:///s/f --distributed-world-size 4 --distributed-gpus 3 --distributed-rank 0",
         {}, 4, [0, 1, 2], True, "file:///s/f"),
        ("--distributed-init-method env:// --distributed-world-size 2 --distributed-gpus 1 --distributed-rank 1",
         {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, 2, [1], False, "tcp://a:7"),
        ("--distributed-init-method tcp://[fd77::1]:7 --distributed-world-size 2 --distributed-gpus 1 "
         "--distributed-rank 1", {}, 2, [1], False, r"tcp://\[fd77::1\]:7"),
        ("", TORCHRUN, 4, [3], False, "tcp://nodea:29501"),
        ("--local-rank 0", TORCHRUN, 4, [3], False, "tcp://nodea:29501"),
        ("--distributed-init-method file:///s/f", TORCHRUN, 4, [3], False, "file:///s/f"),
        ("", SRUN, 4, [3], False, r"tcp://nodea:15112"),
        ("", SRUN | {"MASTER_ADDR": "c", "MASTER_PORT": "9"}, 4, [3], False, "tcp://c:9"),
        ("--master-addr c --master-port 9", SRUN | {"MASTER_ADDR": "d"}, 4, [3], False, "tcp://c:9"),
        ("", SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, 4, [3], False, "tcp://nodea:15112"),
        ("", OPENMPI, 4, [3], False, r"tcp://nodea:\d+"),
        ("", OPENMPI | SRUN, 4, [3], False, r"tcp://nodea:\d+"),
        ("", MPICH, 4, [3], False, "tcp://nodea:29500"),
        ("--distributed-init-method tcp://c:9", without(MPICH, "MASTER_ADDR"), 4, [3], False, "tcp://c:9"),
        ("", {}, 1, [0], True, r"tcp://127.0.0.1:\d+"),
        ("", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, 1, [0], True, r"tcp://127.0.0.1:\d+"),
        ("-n 1 -g 2 -i 0", SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 2, [0, 1], True, r"tcp://127.0.0.1:\d+"),
    ],
)  # fmt: skip
def test_source(flags, environ, world_size, ranks, spawn, meets):
    layout = layout_of(flags + CPU, environ)
    assert layout.world_size == world_size
    assert [worker.rank for worker in layout.workers()] == ranks
    assert layout.spawn is spawn
    assert re.fullmatch(meets, layout.init_method)


@pytest.mark.parametrize(
    ("flags", "environ", "devices"),
    [
        ("-n 2 -g 3,1 -i 0", {}, [0, 1, 2]),
        ("--distributed-world-size 1 --device-id 1", {}, [1]),
        ("--distributed-world-size 1 --device-id 2", {"CUDA_VISIBLE_DEVICES": "5,6,7"}, [2]),
        ("", TORCHRUN | {"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, [2]),
        ("", SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_GTIDS": "0,1,2"}, [2]),
        # srun --gpus-per-task=1: each task sees one GPU, and that is its number 0
        (
            "",
            SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_GTIDS": "0,1,2", "CUDA_VISIBLE_DEVICES": "3"},
            [0],
        ),
        ("-n 1 -g 3 -i 0 --oversubscribe", {"CUDA_VISIBLE_DEVICES": "0,1"}, [0, 1, 0]),
        ("", {}, list(range(8))),
    ],
)
def test_device_of_each_worker(flags, environ, devices, node_with):
    node_with(8)
    layout = layout_of(flags, environ)
    assert layout.device_type == "cuda"
    assert [worker.device_index for worker in layout.workers()] == devices


def test_a_task_with_one_gpu_of_its_own_does_not_share_it(node_with):
    node_with(8)
    here = {"SLURM_GTIDS": "0,1,2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "1"}
    layout = layout_of("", SRUN | here)
    assert layout.local_world_size <= layout.devices


def test_flags_win_over_what_the_machine_has(node_with):
    node_with(8)
    assert layout_of("-n 1 -g 2 -i 0").world_size == 2


def test_a_plain_python_in_a_batch_script_says_that_srun_did_not_start_it():
    assert "not started by srun" in layout_of("", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).source


def test_only_a_launchers_worker_ends_with_its_parent():
    assert layout_of("", TORCHRUN).launched
    assert not layout_of("--distributed-world-size 1 --device-id 0 --device cpu").launched


# --- Slurm: who runs where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[01-02,7],login"}, "gpu01"),
        ({"SLURM_GTIDS": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "nodeb"}, "nodeb"),  # rank 0 knows itself
        # part 0 of a heterogeneous job on the second node, seen from the first
        ({"SLURM_GTIDS": "1,2,3", "SLURM_PROCID": "1", "SLURMD_NODENAME": "nodea", "SLURM_HET_SIZE": "2",
          "SLURM_JOB_NODELIST_PACK_GROUP_0": "nodeb", "SLURM_JOB_NODELIST_PACK_GROUP_1": "nodea"}, "nodeb"),
        ({"SLURM_GTIDS": "1,2,3", "SLURM_PROCID": "1", "SLURMD_NODENAME": "nodea", "SLURM_HET_SIZE": "2",
          "SLURM_JOB_NODELIST_HET_GROUP_0": "nodeb", "SLURM_JOB_NODELIST_HET_GROUP_1": "nodea"}, "nodeb"),
        # a step of parts 1 and 2 only
        ({"SLURM_STEP_NODELIST": "b,c", "SLURMD_NODENAME": "c", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST_HET_GROUP_0":
          "a", "SLURM_JOB_NODELIST_HET_GROUP_1": "b", "SLURM_JOB_NODELIST_HET_GROUP_2": "c"}, "b"),
    ],
)  # fmt: skip
def test_slurm_host_of_rank_0(environ, host):
    assert host_and_port(layout_of(CPU, SRUN | environ).init_method)[0] == host


@pytest.mark.parametrize("content", ["nodeb\nnodea\n", "# by hand\nnodeb # c\n", "nodeb*4 nodea"])
def test_slurm_reads_the_host_file(content, tmp_path):
    order = tmp_path / "order"
    order.write_text(content)
    here = {"SLURM_GTIDS": "1", "SLURM_PROCID": "1", "SLURMD_NODENAME": "nodea"}
    arbitrary = {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(order)}
    assert host_and_port(layout_of(CPU, SRUN | here | arbitrary).init_method)[0] == "nodeb"


def test_a_host_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "order").write_bytes("nödeb".encode("utf-16"))
    arbitrary = {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(tmp_path / "order")}
    with pytest.raises(UserError, match="do not say where rank 0 is"):
        layout_of(CPU, SRUN | {"SLURM_GTIDS": "1", "SLURM_PROCID": "1", "SLURMD_NODENAME": "nodea"} | arbitrary)


def test_slurm_counts_the_tasks_of_a_node_that_has_not_contiguous_ranks():
    layout = layout_of(CPU, SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,2,3"})
    assert (layout.local_world_size, layout.first_local_rank, layout.first_rank) == (3, 1, 2)


def test_slurm_counts_without_gtids():
    sizes = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NODEID": "2"}
    assert layout_of(CPU, without(SRUN, "SLURM_GTIDS") | sizes).local_world_size == 2


def test_two_steps_and_two_jobs_of_slurm_meet_on_ports_of_their_own():
    places = [(str(job), str(step)) for job in range(100) for step in range(16)]
    ports = {layout_of(CPU, SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).init_method for job, step in places}
    assert len(ports) == len(places)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("nodea", ["nodea"]),
        ("nodea,nodeb", ["nodea", "nodeb"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
    ],
)
def test_slurms_short_form_of_hosts(text, hosts):
    assert expand_hosts(text) == hosts


def test_slurms_short_form_of_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize("host", ["10.0.0.1", "nodea", "fd77::1"])
def test_an_address_survives_the_way_there_and_back(host):
    assert host_and_port(tcp_address(host, 29500)) == (host, 29500)


# --- what is refused, and how ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        # -n, -g, -i
        ("-n 2", {}, "-n/--nodes is 2, but -g/--gpus is missing"),
        ("-n 2 -g 8 -i 0", {}, "-g/--gpus is 8, which names 1 node, but -n is 2"),
        ("-n 2 -g 8,2", {}, "-i/--node-rank is missing"),
        ("-n 2 -g 8,2 -i 2", {}, "-i/--node-rank is 2, but -g 8,2 names nodes 0 and 1: use 0 or 1"),
        ("-n 2 -g 8,2 -i 1", {}, "--master-addr is missing"),
        # two sources at once
        ("-n 2 -g 3,1 -i 0 --distributed-world-size 4", {}, "-n/--nodes 2 and --distributed-world-size 4 are two ways"),
        ("-n 2 -g 3,1 -i 0", TORCHRUN, "-n/--nodes 2 is given, but torchrun has already started this process"),
        ("-g 4", SRUN, "-g/--gpus 4 is given, but srun has already started"),
        ("--distributed-world-size 4", OPENMPI, "--distributed-world-size 4 is given, but Open MPI's mpirun has"),
        ("--distributed-no-spawn", MPICH, "--distributed-no-spawn is given, but MPICH's mpiexec has already"),
        ("--local-rank 2", TORCHRUN, "--device-id/--local-rank is 2, but torchrun says LOCAL_RANK=0"),
        ("", without(TORCHRUN, "TORCHELASTIC_RUN_ID") | OPENMPI | {"OMPI_COMM_WORLD_RANK": "1"},
         "RANK is 3, but OMPI_COMM_WORLD_RANK is 1: two launchers"),
        ("", without(TORCHRUN, "TORCHELASTIC_RUN_ID") | SRUN | {"SLURM_PROCID": "1"},
         "RANK is 3, but SLURM_PROCID is 1: two launchers"),
        (TCP + "--master-addr b --distributed-world-size 2 --distributed-gpus 2", {},
         "--distributed-init-method tcp://nodea:11111 and --master-addr b both say where to meet"),
        # half of a source
        ("", without(TORCHRUN, "RANK"), "WORLD_SIZE=4, LOCAL_RANK=0, MASTER_ADDR=nodea, MASTER_PORT=29501 is set, but "
         "RANK is not"),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2 is set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ("", without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "is set, but OMPI_COMM_WORLD_SIZE is not"),
        ("", without(OPENMPI, "MASTER_ADDR"), "--master-addr is missing: OMPI_COMM_WORLD_LOCAL_SIZE=1 of "
         "OMPI_COMM_WORLD_SIZE=4 run here"),
        ("", without(MPICH, "MASTER_ADDR"), "add -genv MASTER_ADDR HOST"),
        ("", without(MPICH, "MPI_LOCALRANKID"), "is set, but MPI_LOCALRANKID is not"),
        ("", without(SRUN, "SLURM_LOCALID"), "SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4 is set, but SLURM_LOCALID is not"),
        ("", without(SRUN, "SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE"), "SLURM_GTIDS and SLURM_STEP_TASKS"),
        ("", SRUN | {"SLURM_DISTRIBUTION": "arbitrary"}, "on nodeb do not say where rank 0 is"),
        ("--distributed-init-method env:// --distributed-world-size 2 --distributed-gpus 2", {"MASTER_PORT": "1"},
         "--distributed-init-method env:// and MASTER_PORT=1 is set, but MASTER_ADDR is not"),
        # HetSeq's flags
        (TCP, {}, "--distributed-init-method tcp://nodea:11111 is given, but --distributed-world-size is missing"),
        ("--device-id 1", {}, "--device-id 1 is given, but --distributed-world-size is missing"),
        ("--distributed-world-size 4 --distributed-gpus 3", {}, "--distributed-init-method is missing: 3 of 4"),
        ("--distributed-world-size 4 --distributed-no-spawn", {}, "--distributed-init-method is missing: 1 of 4"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 3", {}, "--distributed-rank is missing: 3 of 4"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 5", {}, "--distributed-gpus is 5, but "
         "--distributed-world-size is 4"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 3 --distributed-rank 2", {},
         "--distributed-rank is 2, but with 3 started here --distributed-world-size 4 allows 0 to 1"),
        (TCP + "--distributed-world-size 4 --distributed-gpus 3 --distributed-rank 0 --device-id 1", {},
         "--device-id is 1, but 3 processes start here"),
        # where to meet
        *(
            (f"--distributed-init-method {url} --distributed-world-size 2 --distributed-gpus 1 --distributed-rank 0",
             {}, message)
            for url, message in [
                ("nodea:29500", "is nodea:29500: give tcp://HOST:PORT"),
                ("tcp://nodea", "is tcp://nodea: give tcp://HOST:PORT"),
                ("tcp://nodea:99999", "is tcp://nodea:99999: give tcp://HOST:PORT"),
                ("http://nodea:1", "is http://nodea:1: give tcp://HOST:PORT"),
                ("tcp://fd77::1:29500", "an IPv6 address needs brackets, tcp://[fd77::1]:29500"),
                ("file://shared/meeting", "give the absolute path of a file"),
                ("file:///shared/", "give the absolute path of a file"),
            ]
        ),
        # numbers that cannot be
        ("", TORCHRUN | {"RANK": "4"}, "RANK is 4, but WORLD_SIZE=4 allows 0 to 3"),
        ("", TORCHRUN | {"LOCAL_RANK": "1"}, "LOCAL_RANK is 1 of 1 here"),
        ("", TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four' in the environment, but must be a whole number"),
        ("", TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT is -1 in the environment"),
        ("", SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID is 4, but SLURM_STEP_NUM_TASKS=4 allows 0 to 3"),
        ("", TORCHRUN | {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}, "TORCH_ELASTIC_WORKER_IDENTICAL is 1"),
    ],
)  # fmt: skip
def test_refused_with_one_line(flags, environ, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        layout_of(flags + CPU, environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ("-n 1 -g 4 -i 0", {}, "-g 4 for node 0 asks for 4 GPUs, but this node has 2: ask for at most 2"),
        ("-n 1 -g 2 -i 0", {"CUDA_VISIBLE_DEVICES": "1"}, "for 2 GPUs, but this node has 1 (CUDA_VISIBLE_DEVICES=1)"),
        ("--distributed-world-size 4", {}, "4 of --distributed-world-size 4 asks for 4 GPUs, but this node has 2"),
        ("--distributed-world-size 1 --device-id 2", {}, "--device-id 2 asks for 3 GPUs, but this node has 2"),
        ("", without(TORCHRUN, "GROUP_WORLD_SIZE") | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
         "torchrun with 4 here asks for 4 GPUs, but this node has 2"),
    ],
)  # fmt: skip
def test_more_processes_than_gpus_are_refused(flags, environ, message, node_with):
    node_with(2)
    with pytest.raises(UserError, match=re.escape(message)):
        layout_of(flags, environ)


def test_a_node_with_too_many_tasks_comes_to_the_join_to_tell_the_others(node_with):
    node_with(8)  # Slurm's -N2 -n10 --gpus=10 has put 9 tasks on the node with 8 GPUs
    nine = {"SLURM_GTIDS": "0,1,2,3,4,5,6,7,8", "SLURM_PROCID": "8", "SLURM_LOCALID": "8", "SLURM_STEP_NUM_TASKS": "10"}
    layout = layout_of("", SRUN | nine | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert layout.problem.startswith("srun with 9 here asks for 9 GPUs, but this node has 8")
    assert layout.device_type == "cpu"


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(UserError, match="--device is cuda, but this node has no visible GPU"):
        layout_of("--device cuda -n 1 -g 1 -i 0")


# --- the file of file:// -----------------------------------------------------------------------------------------


def test_a_meeting_file_in_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        meeting_file.check(f"file://{tmp_path}/missing/meeting")


def test_a_folder_is_no_meeting_file(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        meeting_file.check(f"file://{tmp_path}")


def test_another_programs_file_is_no_meeting_file(tmp_path):
    (tmp_path / "thesis.txt").write_text("It was a dark and stormy night; the rain fell in torrents.")
    with pytest.raises(UserError, match="exists and is something else"):
        meeting_file.check(f"file://{tmp_path}/thesis.txt")


def test_an_empty_file_may_be_the_meeting_file(tmp_path):
    (tmp_path / "meeting").touch()
    assert meeting_file.check(f"file://{tmp_path}/meeting") == tmp_path / "meeting"


def test_layouts_are_found_without_torch():
    code = "import sys, common.launch.start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_free_port_is_given_to_nobody_else_but_can_be_listened_on():
    port = free_port()
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):  # a store may listen on all of them
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_launcher_that_would_start_a_joining_machine_several_times_is_refused():
    with pytest.raises(UserError, match="under a launcher, which starts it several times: type it once, with -g"):
        layout_from(LayoutFlags(join="nodea:29500", device="cpu"), TORCHRUN)
    assert layout_from(LayoutFlags(join="nodea:29500", device="cpu", gpus=(3,)), {}).local_world_size == 3
