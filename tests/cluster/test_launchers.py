"""Every launcher and layout, for real: the loss of each step is that of one process, to 1e-9, in float64.

Each test is a row of the table in docs/launchers.md: a tick is a training that has happened.
"""

import functools
import json
import shlex
from pathlib import Path

import pytest

from tests.cluster.conftest import PYTHON, STATE, batch_job, needs
from tests.harness import BERT, MNIST, ROOT, losses


def words(text: str) -> list[str]:
    """A part of a command line as a person types it."""
    return text.split()


COMMON = words("--precision fp64 --device cpu --join-timeout 280")
TRAINING = [*COMMON, *words("--dataset digits --max-steps 6 --global-batch 110")]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
PRETRAINING = [*COMMON, *words("--max-steps 20 --global-batch 50 --sequence-length 32 --vocab-size 400 --dropout 0")]
PORT = 29611
MASTER = "10.77.0.1"
BOTH = pytest.mark.parametrize("model", ["MNIST", "BERT"])


@pytest.fixture
def model():
    """Which trainer; tests that are marked with BOTH run with each."""
    return "MNIST"


@pytest.fixture(scope="session")
def commands(hosts):
    """Model -> the trainer's file and flags, without a folder for its files."""
    folder = STATE / "text"
    folder.mkdir()
    (folder / "part.txt").write_text("\n\n".join(path.read_text() for path in sorted(ROOT.glob("common/*.py"))))
    (folder / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 400}))
    text = ["--corpus", folder / "part.txt", "--cache-dir", folder / "cache", "--config-file", folder / "config.json"]
    return {"MNIST": [MNIST, *TRAINING], "BERT": [BERT, *PRETRAINING, *text]}


@pytest.fixture(scope="session")
def references(hosts, commands):
    """`references(model)` is the loss of every step on one process, trained once."""

    @functools.cache
    def reference(model: str) -> list[float]:
        folder = STATE / f"reference-{model}"
        result = hosts.run("nodea", "python", *commands[model], "-n", 1, "-g", 1, "-i", 0, "--out-dir", folder)
        assert result.code == 0, result.output
        return losses(folder)

    return reference


@pytest.fixture
def trains(hosts, table, references, model, tmp_path):
    """`trains(launcher, layout, started...)` waits for commands under way and ticks their row if they trained."""

    def check(launcher: str, layout: str, *started) -> None:
        with table.row(launcher, layout, model):
            results = hosts.together(*started)
            for result in results:
                assert result.code == 0, "\n".join(other.output for other in results)
            assert losses(tmp_path / "run") == pytest.approx(references(model), abs=1e-9, rel=0)

    return check


@pytest.fixture
def trainer(model, commands, tmp_path):
    """The trainer's command behind any launcher, with its flags."""
    return ["python", *commands[model], "--out-dir", tmp_path / "run"]


@pytest.fixture
def program(trainer, warm):
    """The same for launchers that start each rank themselves: with torch imported already."""
    return [warm, *trainer[1:]]


# --- the project's own flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "model"), [("1", "MNIST"), ("4", "MNIST"), ("3,1", "MNIST"), ("3,1", "BERT"), ("2,1,1", "MNIST")]
)
def test_own_flags(gpus, model, hosts, trains, trainer, program):
    command = trainer if (gpus, model) == ("3,1", "MNIST") else program
    sizes = gpus.split(",")
    nodes = []
    for number in range(len(sizes)):
        layout = ["-n", len(sizes), "-g", gpus, "-i", number, "--master-port", PORT]
        address = ["--master-addr", MASTER] if number else []
        nodes.append(hosts.on("nodeb" if number else "nodea", *command, *layout, *address))
    trains("-n, -g, -i", gpus.replace(",", "+"), *nodes)


# --- HetSeq's flags ----------------------------------------------------------------------------------------------


def test_hetseq_one_gpu(hosts, trains, program):
    node = hosts.on("nodea", *program, *words("--distributed-world-size 1 --device-id 1"))
    trains("HetSeq's flags", "1, `--device-id 1`", node)


def test_hetseq_one_node(hosts, trains, trainer):
    trains("HetSeq's flags", "4 on one node", hosts.on("nodea", *trainer, *words("--distributed-world-size 4")))


def hetseq(hosts, program, url: str, gpus: int, first_ranks: list[int], *more: object) -> list:
    return [
        hosts.on(
            "nodea" if rank < 3 else "nodeb",
            *program,
            *("--distributed-init-method", url, "--distributed-world-size", 4),
            *("--distributed-gpus", 1 if gpus == 3 and rank == 3 else gpus, "--distributed-rank", rank, *more),
        )
        for rank in first_ranks
    ]


def scheme(url: str) -> str:
    return url[: url.index("//") + 2]


URLS = [f"tcp://{MASTER}:{PORT}", f"file://{STATE}/tmp/meeting"]


@pytest.mark.parametrize("url", URLS)
def test_hetseq_four_nodes(url, hosts, trains, program):
    trains("HetSeq's flags", f"1+1+1+1, `{scheme(url)}`", *hetseq(hosts, program, url, 1, [0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("url", "model"),
    [
        *((url, "MNIST") for url in [*URLS, f"tcp://[fd77::1]:{PORT}", f"tcp://nodea:{PORT}"]),
        (URLS[0], "BERT"),
    ],
)
def test_hetseq_uneven(url, hosts, trains, program):
    kind = {"[": "`tcp://`, IPv6", "n": "`tcp://`, host name"}.get(url[6], f"`{scheme(url)}`")
    trains("HetSeq's flags", f"3+1, {kind}", *hetseq(hosts, program, url, 3, [0, 3]))


@pytest.mark.parametrize("url", URLS)
def test_hetseq_uneven_without_spawn(url, hosts, trains, program):
    started = [
        *hetseq(hosts, program, url, 3, [0, 1, 2], "--distributed-no-spawn"),
        *hetseq(hosts, program, url, 1, [3], "--distributed-no-spawn"),
    ]
    trains("HetSeq's flags", f"3+1, `{scheme(url)}`, no spawn", *started)


def test_env_says_where_to_meet(hosts, trains, program):
    meeting = {"MASTER_ADDR": MASTER, "MASTER_PORT": str(PORT)}
    layout = words("--distributed-init-method env:// --distributed-world-size 4")
    first = hosts.on("nodea", *program, *layout, *words("--distributed-gpus 3 --distributed-rank 0"), **meeting)
    second = hosts.on("nodeb", *program, *layout, *words("--distributed-gpus 1 --distributed-rank 3"), **meeting)
    trains("HetSeq's flags", "3+1, `env://`", first, second)


# --- torchrun and its kin ----------------------------------------------------------------------------------------


def test_torchrun_standalone(hosts, trains, trainer):
    launcher = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    trains("torchrun", "4, `--standalone`", hosts.on("nodea", *launcher, *trainer[1:]))


@BOTH
def test_torchrun_static(hosts, trains, program):
    meeting = ["--no-python", "--nnodes", 2, "--master-addr", MASTER, "--master-port", PORT]
    nodes = [
        hosts.on(
            host,
            *("python", "-m", "torch.distributed.run", *meeting, "--node-rank", number, "--nproc-per-node", processes),
            *program,
        )
        for number, (host, processes) in enumerate([("nodea", 3), ("nodeb", 1)])
    ]
    trains("torchrun", "3+1, static", *nodes)


def test_torchrun_c10d(hosts, trains, program):
    meeting = [
        "--no-python",
        "--nnodes",
        2,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{MASTER}:{PORT}",
        "--rdzv-id",
        "uneven",
    ]
    nodes = [
        hosts.on(host, "python", "-m", "torch.distributed.run", *meeting, "--nproc-per-node", processes, *program)
        for host, processes in [("nodea", 3), ("nodeb", 1)]
    ]
    trains("torchrun", "3+1, c10d", *nodes)


@BOTH
def test_torch_distributed_launch(hosts, trains, trainer):
    nodes = [
        hosts.on(
            host,
            *("python", "-m", "torch.distributed.launch", f"--nproc_per_node={processes}", "--nnodes=2"),
            *(f"--node_rank={number}", f"--master_addr={MASTER}", f"--master_port={PORT}"),
            *trainer[1:],
        )
        for number, (host, processes) in enumerate([("nodea", 3), ("nodeb", 1)])
    ]
    trains("torch.distributed.launch", "3+1", *nodes)


def test_accelerate(hosts, trains, trainer):
    # it divides --num_processes evenly by the machines, and calls several processes --multi_gpu, also on CPUs
    options = words(f"--multi_gpu --num_processes 4 --num_machines 2 --main_process_ip {MASTER} --mixed_precision no")
    nodes = [
        hosts.on(
            host,
            *("python", "-m", "accelerate.commands.launch", *options, "--machine_rank", number),
            *("--main_process_port", PORT, "--dynamo_backend", "no", *trainer[1:]),
        )
        for number, host in enumerate(["nodea", "nodeb"])
    ]
    trains("accelerate launch", "2+2", *nodes)


# --- Slurm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "options", "model"),
    [
        ("4", "-N1 -n4", "MNIST"),
        ("3+1", "-N2 -n4", "MNIST"),
        ("3+1", "-N2 -n4", "BERT"),
        ("3+1, heterogeneous step", "-N1 -n3 --gres=gpu:3 : -N1 -n1 --gres=gpu:1", "MNIST"),
        ("3+1, `-m cyclic`", "-N2 -n4 -m cyclic", "MNIST"),
        ("3+1, one GPU visible to each task", "-N2 -n4 --gpus-per-task=1", "MNIST"),
        ("1+3, rank 0 on the second host", "-w nodeb -n1 : -w nodea -n3", "MNIST"),
    ],
)
def test_srun(layout, options, slurm, trains, program):
    trains("srun", layout, slurm("timeout", 280, "srun", "--wait=600", *of_each_part(options, program)))


def of_each_part(options: str, program: list) -> list:
    """srun's parts, each with its program: `OPTIONS PROGRAM : OPTIONS PROGRAM`."""
    parts = [[*part.split(), *program] for part in options.split(" : ")]
    return [word for part in parts[:-1] for word in (*part, ":")] + parts[-1]


def test_srun_with_a_host_file(slurm, trains, program):
    order = STATE / "tmp" / "order"
    order.write_text("nodeb\nnodea\nnodea\nnodea\n")
    started = slurm("timeout", 280, "srun", "--wait=600", "-m", "arbitrary", "-n4", *program, SLURM_HOSTFILE=str(order))
    trains("srun", "1+3, host file", started)


def test_sbatch(slurm, trains, program, tmp_path):
    script = tmp_path / "job.sbatch"
    command = shlex.join(map(str, program))
    script.write_text(f"#!/bin/bash\n#SBATCH -N2 -n4\nsrun --wait=600 {command}\n")
    trains("sbatch", "3+1", batch_job(slurm, (script,), tmp_path / "job.log"))


MPI_LAYOUTS = pytest.mark.parametrize(
    ("layout", "where", "model"),
    [("4", "nodea:4", "MNIST"), ("3+1", "nodea:3,nodeb:1", "MNIST"), ("3+1", "nodea:3,nodeb:1", "BERT")],
)

# --- MPI ---------------------------------------------------------------------------------------------------------


def openmpi(ssh_config: Path) -> list:
    ssh = ["--mca", "plm_rsh_args", f"-F {ssh_config}"]
    return ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *ssh]


@MPI_LAYOUTS
def test_openmpi(layout, where, hosts, ssh_config, trains, program):
    needs("mpirun.openmpi")
    address = ["-x", f"MASTER_ADDR={MASTER}"] if "nodeb" in where else []
    command = [*openmpi(ssh_config), "--host", where, "-np", 4, *address, *program]
    trains("Open MPI", layout, hosts.on("nodea", *command))


@MPI_LAYOUTS
def test_mpich(layout, where, hosts, ssh_config, trains, program):
    needs("mpiexec.hydra")
    address = ["-genv", "MASTER_ADDR", MASTER] if "nodeb" in where else []
    command = ["mpiexec.hydra", "-launcher", "ssh", "-hosts", where, "-n", 4, *address, *program]
    trains("MPICH", layout, hosts.on("nodea", *command, HYDRA_LAUNCHER_EXTRA_ARGS=f"-F {ssh_config}"))


# --- ssh ---------------------------------------------------------------------------------------------------------


@BOTH
def test_ssh_launcher(hosts, ssh_config, trains, trainer):
    script = ROOT / "launch_scripts" / "ssh_uneven.sh"
    environ = {"SSH_CONFIG": str(ssh_config), "PYTHON": str(PYTHON)}
    trains("ssh_uneven.sh", "3+1", hosts.on("nodea", script, "nodea:3,nodeb:1", *trainer[1:], **environ))
