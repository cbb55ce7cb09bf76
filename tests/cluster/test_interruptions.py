"""A job that Slurm interrupts again and again, each time on another uneven allocation, trains as if nobody had.

UNEVEN_INTERRUPTIONS=100 interrupts it a hundred times, instead of once in each of the four ways.
"""

import contextlib
import os
import random
import re
import signal
from pathlib import Path

import pytest

from common.record import checkpoint
from tests.harness import MNIST, ROOT, TIMEOUT_SECONDS, largest_difference, losses, play, rows, wait_until, weights
from tests.trainers import NEXT_STEP, altered

TIMES = int(os.environ.get("UNEVEN_INTERRUPTIONS", "4"))
SEED = int(os.environ.get("UNEVEN_SEED", "1"))
STEPS = 110 * TIMES + 160
TRAINING = ("--dataset", "digits", "--global-batch", 64, "--precision", "fp64", "--epochs", 10_000)
TRAINING += ("--max-steps", STEPS, "--save-every", 50, "--keep", 3)
JOB = ROOT / "launch_scripts" / "slurm_uneven.sbatch"
SAVES = "                run.save("
# the trainer, with a checkpoint that takes a moment, and not so fast that it ends before it is interrupted
SLOW = {SAVES: f"{SAVES}write_extra=lambda path: __import__('time').sleep(0.3)"}
SLOW |= {NEXT_STEP: "            __import__('time').sleep(0.01)\n" + NEXT_STEP}
WAYS = ("slurm signals all", "one rank is signalled", "one rank is killed", "rank 0 is killed while it saves")


class Job:
    """A training that is submitted again and again, each time with the same folder."""

    def __init__(self, slurm, hosts, warm, folder):
        self.slurm, self.hosts, self.warm, self.folder = slurm, hosts, warm, folder
        self.log, self.number = folder.parent / "log", ""
        self.trainer = altered(folder.parent / "slow_ddp", SLOW)

    def command(self, *command: object) -> str:
        result = self.slurm(*command, PYTHON=str(self.warm)).result()
        assert result.code == 0, f"{command}: {result.output}"
        return result.output.strip()

    def submit(self, first: int, second: int) -> None:
        """As a person would, with one component for each kind of node."""
        self.log.unlink(missing_ok=True)
        parts = [("--nodes=1", f"--ntasks={n}", f"--gres=gpu:{n}", f"--nodelist={host}") for n, host in
                 ((first, "nodea"), (second, "nodeb"))]  # fmt: skip
        flags = (*TRAINING, "--device", "cpu", "--out-dir", self.folder)
        command = ("sbatch", "--parsable", f"--output={self.log}", *parts[0], ":", *parts[1], JOB, self.trainer, *flags)
        self.number = self.command(*command).split()[-1]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, what, seconds: float = TIMEOUT_SECONDS) -> None:
        """The limit only ends a hang."""
        wait_until(what, self, seconds)

    def goes_on(self) -> bool:
        return True  # Slurm starts it again

    def state(self) -> str:
        return self.command("squeue", "--noheader", "--format=%T", "--jobs", self.number).partition("\n")[0]

    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        found = re.findall(r'"kind": "train", "step": (\d+)', path.read_text()) if path.exists() else []
        return int(found[-1]) if found else 0

    def ranks(self) -> list[int]:
        """The pids of the processes that Slurm has started, in the order of their ranks."""
        found = {}
        for pid in self.hosts.processes():
            with contextlib.suppress(OSError):
                if re.match(rb"\S*python3\0-IS\0\S*warm-python", Path(f"/proc/{pid}/cmdline").read_bytes()):
                    environ = Path(f"/proc/{pid}/environ").read_text()
                    known = dict(entry.partition("=")[::2] for entry in environ.split("\0"))
                    if environ:  # nothing for a process that ends between the two reads
                        found[known["SLURMD_NODENAME"], int(known["SLURM_PROCID"])] = pid
        return [found[place] for place in sorted(found)]

    def interrupt(self, way: str, chance: random.Random) -> str:
        """Returns the signal that was sent."""
        ranks = self.ranks()
        name = chance.choice(("SIGUSR1", "SIGTERM", "SIGINT"))
        if way == "slurm signals all":
            self.command("scancel", f"--signal={name.removeprefix('SIG')}", self.number)
        elif way == "one rank is signalled":
            os.kill(chance.choice(ranks), getattr(signal, name))
        elif way == "one rank is killed":
            os.kill(chance.choice(ranks), signal.SIGKILL)
        else:
            checkpoints = self.folder / "checkpoints"
            self.wait_until(lambda: any(checkpoints.glob(".writing-step*")))
            os.kill(ranks[0], signal.SIGKILL)
        return name

    def end(self) -> None:
        """Wait until its processes are gone, and take it out of the queue, to which it has returned itself."""
        self.wait_until(lambda: not self.ranks())
        self.wait_until(lambda: self.state() in ("PENDING", ""))
        self.slurm("scancel", self.number).result()


@pytest.mark.timeout(60 * 60)
def test_a_job_that_is_interrupted_again_and_again_trains_as_one_that_is_not(slurm, hosts, warm, tmp_path):
    chance, job = random.Random(SEED), Job(slurm, hosts, warm, tmp_path / "run")
    resumed_at = 0
    for turn in range(TIMES):
        layout = chance.choice([(a, b) for a in (1, 2, 3) for b in (1, 2) if a != b])
        way = WAYS[turn % len(WAYS)]
        job.submit(*layout)
        target = resumed_at + chance.randint(1, 100)
        job.wait_until(lambda target=target: "files  " in job.said() and job.step() >= target)
        name = job.interrupt(way, chance)
        job.end()
        reached, said = job.step(), job.said()
        found = checkpoint.find(tmp_path / "run")
        assert found is not None, said
        if "signal" in way:  # with notice: nothing is lost
            assert re.search(rf"interrupted: {name} on rank \d: ended after step {reached}, which is saved", said), said
            assert found.state["step"] == reached
        else:
            assert reached - 50 <= found.state["step"] <= reached, said
        if resumed_at:
            assert f"resuming from {tmp_path / 'run'}/checkpoints/step-{resumed_at:08d}" in said, said
        assert "is damaged" not in said, said
        resumed_at = found.state["step"]
        print(
            f"{turn + 1}: {layout[0]}+{layout[1]}, after step {reached}: {way} ({name}); saved {resumed_at}", flush=True
        )
    job.submit(2, 1)
    job.wait_until(lambda: "done " in job.said(), seconds=900)
    play(MNIST, (1,), tmp_path / "alone", *TRAINING, timeout=1800)
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
