"""Every script of launch_scripts/, on its real launcher; and `-n 2 -g 8,2` itself."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import PYTHON, STATE, batch_job, needs
from tests.cluster.test_launchers import MASTER, PORT, words
from tests.harness import MNIST, ROOT, losses, rows_so_far, wait_until
from tests.trainers import Patient

SCRIPTS = ROOT / "launch_scripts"
HELLO = ROOT / "common" / "hello" / "__main__.py"
CPU = ("--device", "cpu", "--join-timeout", "280")
URL = f"tcp://{MASTER}:{PORT}"


def processes(where: dict[str, int], url: str) -> list[str]:
    """What hello says, in rank order, on hosts with so many processes each."""
    hosts = [host for host, count in where.items() for _ in range(count)]
    return [f"[{url}] hello from [{host}:gloo] process {rank}/{len(hosts)}" for rank, host in enumerate(hosts)]


def greetings(output: str) -> list[str]:
    return [line[line.index("[tcp://") :] for line in output.splitlines() if "hello from" in line]


@pytest.fixture
def script(hosts):
    """Start a script on a host with the checkout's Python."""
    return lambda host, name, *arguments, **environ: hosts.on(
        host, SCRIPTS / name, *arguments, **{"PYTHON": str(PYTHON), **environ}
    )


@pytest.fixture
def quick(script, warm):
    """The same with a Python that has imported torch already."""
    return lambda *arguments, **environ: script(*arguments, PYTHON=str(warm), **environ)


def test_eight_and_two_say_hello(hosts, warm):
    layout = (warm, "-m", "common.hello", "-n", 2, "-g", "8,2", *CPU, "--master-port", PORT)
    first = hosts.on("nodea", *layout, "-i", 0, cwd=ROOT)
    second = hosts.on("nodeb", *layout, "-i", 1, "--master-addr", MASTER, cwd=ROOT)
    said = [greetings(result.output) for result in hosts.together(first, second)]
    assert said[0] + said[1] == processes({"nodea": 8, "nodeb": 2}, URL)


def test_two_node_uneven_trains_twenty_steps_on_eight_and_two(hosts, quick, tmp_path):
    training = words("--dataset digits --global-batch 110 --max-steps 20 --device cpu --join-timeout 280")
    flags = [*training, "--out-dir", tmp_path]
    first = quick("nodea", "two_node_uneven.sh", MNIST, 0, *flags)
    second = quick("nodeb", "two_node_uneven.sh", MNIST, 1, *flags, MASTER_ADDR=MASTER)
    for result in hosts.together(first, second):
        assert result.code == 0, result.output
    assert len(losses(tmp_path)) == 20


def test_two_node_uneven_plays_both_nodes_on_one_machine(quick):
    result = quick("nodea", "two_node_uneven.sh", HELLO, "--local", *CPU, GPUS="2,1").result()
    assert sorted(line.split()[-1] for line in greetings(result.output)) == ["0/3", "1/3", "2/3"], result.output


def test_single_gpu(quick):
    result = quick("nodea", "single_gpu.sh", HELLO, *CPU).result()
    assert "process 0/1" in result.output, result.output


def test_single_node(quick):
    result = quick("nodea", "single_node.sh", HELLO, *CPU, GPUS="2").result()
    assert [line.split()[-1] for line in greetings(result.output)] == ["0/2", "1/2"], result.output


def test_hetseq_one_gpu(quick):
    result = quick("nodea", "hetseq.sh", "one-gpu", HELLO, *CPU).result()
    assert "process 0/1" in result.output, result.output


def test_hetseq_one_node(quick):
    result = quick("nodea", "hetseq.sh", "one-node", HELLO, *CPU).result()
    assert len(greetings(result.output)) == 4, result.output


@pytest.mark.parametrize("meeting", [URL, f"file://{STATE}/tmp/communicate.txt"])
def test_hetseq_four_nodes(meeting, hosts, quick):
    nodes = [
        quick(
            *("nodea" if number < 2 else "nodeb", "hetseq.sh", "four-nodes", HELLO, *CPU),
            **{"GPUS": "1,1,1,1", "NODE": str(number), "MEETING": meeting},
        )
        for number in range(4)
    ]
    output = "".join(result.output for result in hosts.together(*nodes))
    assert {line.split()[-1] for line in output.splitlines() if "hello from" in line} == {"0/4", "1/4", "2/4", "3/4"}


def test_hetseq_uneven(hosts, quick):
    nodes = [
        quick(host, "hetseq.sh", "uneven", HELLO, *CPU, NODE=str(number), MEETING=URL)
        for number, host in enumerate(["nodea", "nodeb"])
    ]
    said = [greetings(result.output) for result in hosts.together(*nodes)]
    assert said[0] + said[1] == processes({"nodea": 8, "nodeb": 2}, URL)


def test_torchrun_uneven(hosts, script):
    meeting = {"MASTER_ADDR": MASTER, "MASTER_PORT": str(PORT)}
    nodes = [
        script(host, "torchrun_uneven.sh", HELLO, number, gpus, *CPU, **meeting)
        for number, (host, gpus) in enumerate([("nodea", 3), ("nodeb", 1)])
    ]
    said = [greetings(result.output) for result in hosts.together(*nodes)]
    assert said[0] + said[1] == processes({"nodea": 3, "nodeb": 1}, URL)


def test_torchrun_elastic_goes_on_after_a_rank_was_killed(hosts, script, tmp_path):
    trainer = Patient(tmp_path)
    flags = [*Patient.FLAGS, *words("--save-every 20 --device cpu --join-timeout 280")]
    meeting = {"MASTER_ADDR": MASTER, "MASTER_PORT": str(PORT), "RESTARTS": "1"}
    nodes = [
        script(host, "torchrun_elastic.sh", trainer.script, gpus, *flags, "--out-dir", tmp_path / "run", **meeting)
        for host, gpus in [("nodea", 2), ("nodeb", 1)]
    ]
    kill_one_when((tmp_path / "run" / "checkpoints" / "latest").exists, hosts)
    starts = tmp_path / "run" / "run.json"
    wait_until(
        lambda: starts.read_text().count('"first_step"') == 2 or len(json.loads(starts.read_text())["starts"]) == 2
    )
    last = trainer.end(tmp_path / "run")
    for result in hosts.together(*nodes):
        assert result.code == 0, result.output
    assert len(losses(tmp_path / "run")) == last


def kill_one_when(ready, hosts) -> None:
    """Kill one worker of the trainer on the hosts as soon as `ready()`."""
    wait_until(ready)
    for pid in hosts.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"-distributed.py rank " in command:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("no worker runs")


# --- Slurm -------------------------------------------------------------------------------------------------------


def batch(slurm, log: Path, *command: object, **environ: str) -> str:
    """Run a batch script to its end; the job's output."""
    result = batch_job(slurm, command, log, {"PYTHON": str(PYTHON), **environ}).result()
    assert result.code == 0, result.output
    return result.output


def test_slurm_even(slurm, warm, tmp_path):
    said = greetings(batch(slurm, tmp_path / "log", SCRIPTS / "slurm_even.sbatch", HELLO, *CPU, PYTHON=str(warm)))
    assert [line.partition("hello")[2] for line in said] == [
        line.partition("hello")[2] for line in processes({"nodea": 2, "nodeb": 2}, URL)
    ]


def test_slurm_uneven(slurm, warm, tmp_path):
    said = greetings(batch(slurm, tmp_path / "log", SCRIPTS / "slurm_uneven.sbatch", HELLO, *CPU, PYTHON=str(warm)))
    assert [line.partition("hello")[2] for line in said] == [
        line.partition("hello")[2] for line in processes({"nodea": 8, "nodeb": 2}, URL)
    ]


class Requeued:
    """A job that Slurm signals, in a folder of its own."""

    def __init__(self, slurm, warm, folder: Path):
        folder.mkdir()
        self.slurm, self.trainer, self.run, self.log = slurm, Patient(folder), folder / "run", folder / "log"
        training = [*Patient.FLAGS, *words("--log-every 1 --save-every 1h")]
        command = (SCRIPTS / "slurm_even.sbatch", self.trainer.script, *training, *CPU, "--out-dir", self.run)
        small = words("--ntasks-per-node=1 --gres=gpu:1")  # two of them run at once
        options = ("--parsable", f"--output={self.log}", "--time=10", *small)
        self.number = slurm("sbatch", *options, *command, PYTHON=str(warm)).result().output.split()[-1]

    def show(self, what: str) -> str:
        return self.slurm("squeue", "--noheader", f"--format={what}", "--jobs", self.number).result().output.strip()

    def update(self, *changes: str) -> None:
        self.slurm("scontrol", "update", f"JobId={self.number}", *changes).result()

    def trains(self) -> bool:
        return len(rows_so_far(self.run, "train")) > 20

    def is_gone(self) -> bool:
        return self.show("%T") == ""

    def goes_on(self) -> None:
        """Wait until it has been requeued, started again and ended."""
        wait_until(lambda: "interrupted: SIGUSR1 on rank" in self.log.read_text())
        wait_until(lambda: self.show("%T") in ("PENDING", "") or "resuming from" in self.log.read_text())
        self.update("TimeLimit=10")
        # Slurm starts it again once `cred_expire` of slurm.sh is over
        wait_until(lambda: "resuming from" in self.log.read_text() or self.is_gone())
        assert "resuming from" in self.log.read_text(), self.log.read_text()
        last = self.trainer.end(self.run)
        wait_until(self.is_gone)
        assert f"done     {last} steps" in self.log.read_text(), self.log.read_text()
        assert len(losses(self.run)) == last, self.log.read_text()


def test_a_job_that_slurm_signals_is_requeued_and_goes_on_where_it_was(slurm, warm, tmp_path):
    """By its time limit, and by scancel while that is waited for."""
    limited, signalled = (Requeued(slurm, warm, tmp_path / name) for name in ("limited", "signalled"))
    wait_until(lambda: limited.trains() and signalled.trains())
    # Only now: Slurm sends the signal up to a minute and a half before the end, to a run that has started or not.
    limited.update(f"TimeLimit={int(limited.show('%M').split(':')[0]) + 2}")
    slurm("scancel", "--signal=USR1", signalled.number).result()
    limited.goes_on()
    signalled.goes_on()


# Each rank ends as after a signal; rank 1 when srun has noticed that another one has ended.
LEAVES_LATE = """
import os, sys, time
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit("started again")
if os.environ["SLURM_PROCID"] == "1":
    while "Exited with exit code 75" not in open(sys.argv[1]).read():
        time.sleep(0.1)
    time.sleep(1)  # what ends ranks at once has time to do so
sys.exit(75)
"""


@pytest.mark.parametrize("name", ["slurm_even", "slurm_uneven"])
def test_a_job_whose_ranks_leave_one_after_the_other_is_requeued(name, slurm, tmp_path):
    program, log = tmp_path / "leaves.py", tmp_path / "log"
    program.write_text(LEAVES_LATE)
    command = ("sbatch", "--parsable", f"--output={log}", SCRIPTS / f"{name}.sbatch", program, log)
    number = slurm(*command, PYTHON=str(PYTHON)).result().output.split()[-1]

    def states() -> list[str]:
        return slurm("squeue", "--noheader", "--format=%T", "--jobs", number).result().output.split()

    wait_until(lambda: log.exists() and "Exited with exit code 75" in log.read_text())
    wait_until(lambda: set(states()) <= {"PENDING"})  # of each component; there are none after the job's end
    assert states() or "started again" in log.read_text(), log.read_text()


def test_slurm_torchrun(slurm, tmp_path):
    said = greetings(batch(slurm, tmp_path / "log", SCRIPTS / "slurm_torchrun.sbatch", HELLO, *CPU, GPUS="2 1"))
    assert sorted(line.split()[-1] for line in said) == ["0/3", "1/3", "2/3"]


# --- over ssh ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpirun_uneven(mpirun, quick, ssh_config):
    needs(mpirun)
    environ = {"MPIRUN": mpirun, "SSH_CONFIG": str(ssh_config), "MASTER_ADDR": MASTER}
    result = quick("nodea", "mpirun_uneven.sh", "nodea:3,nodeb:1", HELLO, *CPU, **environ).result()
    expected = [line.partition("hello")[2] for line in processes({"nodea": 3, "nodeb": 1}, URL)]
    assert [line.partition("hello")[2] for line in greetings(result.output)] == expected, result.output


def test_ssh_uneven_ends_every_node_when_one_fails(hosts, script, ssh_config):
    config = {"SSH_CONFIG": str(ssh_config)}
    node = script("nodea", "ssh_uneven.sh", "nodea:1,nodeb:1", HELLO, *CPU, "--interface", "uneven-va", **config)
    result = node.result()  # nodeb has no interface of that name
    assert result.code == 2, result.output
    assert any(
        line.startswith("nodeb | ") and "--interface is uneven-va" in line for line in result.output.splitlines()
    )


def test_ssh_uneven_ends_every_node_when_it_is_killed(hosts, script, ssh_config):
    config = {"SSH_CONFIG": str(ssh_config)}
    node = script("nodea", "ssh_uneven.sh", "nodea:1,nodeb:2", HELLO, *CPU, "--interface", "uneven-vb", **config)
    wait_until(lambda: len(hosts.processes()) >= 6, node)
    node.process.kill()
    node.process.wait()
    wait_until(lambda: not hosts.processes())
