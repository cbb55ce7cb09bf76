"""Copies of a trainer with some lines changed: to spoil something, to die at a certain moment, to wait until a lost
rank has come back, or to go on until the test has seen what it waits for."""

import fcntl
import functools
import os
import shutil
from pathlib import Path

from tests.harness import BERT, FINETUNE, MNIST, ROOT, play, rows_so_far

EPOCH = 23  # steps of the digits' 1,438 samples in batches of 64
MODULES = {MNIST: "mnist_ddp.train", BERT: "bert_ddp.pretrain.train", FINETUNE: "bert_ddp.finetune.train"}
NEXT_STEP = "            batch = next(batches)"  # what a step begins with, in each trainer
ALL_ARE_THERE = """            if run.step >= {step} and worker.world_size < {ranks}:
                run.log.exchange_at = 1  # after each step, so that rank 0 can say that one waits to be let in
                while worker.rank == 0 and not worker.membership.newcomers_wait:
                    __import__("time").sleep(0.02)
"""


def altered(folder: Path, changes: dict[str, str], script: Path = MNIST) -> Path:
    """A copy of a trainer, in the package `folder`, with some of its text replaced. Returns its script."""
    folder.mkdir()
    module = MODULES[script]
    for file in (script, ROOT / f"{module.replace('.', '/')}.py"):
        source = file.read_text().replace(module, f"{folder.name}.train")
        if file != script:
            assert all(source.count(old) == 1 for old in changes)
            for old, new in changes.items():
                source = source.replace(old, new)
        (folder / file.name).write_text(source)
    return folder / script.name


def until_all_are_there(ranks: int, step: int) -> dict[str, str]:
    """The change with which a run that has lost some of its `ranks` (--elastic) goes on from `step` only once others
    wait in their places, which are let in after the next step. Leave it a few steps to go: without them, the run may
    end before a process that comes back has reached it, which then ends with an error of its own."""
    return {NEXT_STEP: ALL_ARE_THERE.format(step=step, ranks=ranks) + NEXT_STEP}


class Patient:
    """A copy of the trainer that takes its time from step 46 on, a second a step in the end, until the test lets it
    end: whatever the test does meanwhile, the run has not ended before, on a slow machine either.

    Its losses, evaluations and checkpoints are those of the trainer, to as many steps as it makes. Give it
    `Patient.FLAGS`; `script` is its script.
    """

    # the schedule of the learning rate is that of 100 epochs, wherever the run ends
    FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--epochs", 100)
    LAST_STEP = 18 * EPOCH  # at the latest
    LOOP = "        while True:\n"
    WAITS = """            if not (end := {path}).exists():
                __import__("time").sleep(0 if run.step < 46 else 0.1 if run.step < 146 else 1)
            else:
                run.total_steps = int(end.read_text())
"""

    def __init__(self, folder: Path, changes: dict[str, str] | None = None, name: str = "patient_ddp"):
        self.file = folder / f"{name}-end"
        path = f"__import__('pathlib').Path({str(self.file)!r})"
        begin = f"        if {path}.exists():\n            run.total_steps = int({path}.read_text())\n"
        mine = {NEXT_STEP: self.WAITS.format(path=path) + NEXT_STEP, self.LOOP: begin + self.LOOP}
        self.script = altered(folder / name, {**(changes or {}), **mine})

    def end(self, metrics: Path) -> int:
        """Let the run, whose folder is `metrics`, end with the next epoch that no rank has reached. Returns its last
        step."""
        steps = [row["step"] for row in rows_so_far(metrics, "train")]
        last = min(self.LAST_STEP, (max(steps, default=0) + 60) // EPOCH * EPOCH + EPOCH)
        assert last > max(steps, default=0), "the test has taken longer than this trainer waits"
        aside = self.file.with_suffix(".part")
        aside.write_text(str(last))
        aside.replace(self.file)
        return last

    @classmethod
    @functools.cache
    def undisturbed(cls, base: Path) -> Path:
        """The folder of a run of one process and LAST_STEP steps, with all its checkpoints: what a patient run of any
        length is compared with. It is made once for all processes of a `pytest -n`, whose folder is `base`."""
        base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        whole, is_done = base / "undisturbed", base / "undisturbed-done"
        with (base / "undisturbed.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_done.exists():
                shutil.rmtree(whole, ignore_errors=True)  # of a process that has failed
                play(MNIST, (1,), whole, *cls.FLAGS, "--max-steps", cls.LAST_STEP, "--keep", 100)
                is_done.touch()
        return whole


class Unhurried:
    """A copy of a trainer that takes a second a step from step 6 on, until the test lets it go on to its end at full
    speed: for comparison with a whole run of the trainer. Give it so many steps that the test is done by then."""

    def __init__(self, folder: Path, script: Path):
        self.file = folder / "goes-on"
        waits = f"""            if run.step >= 6 and not __import__('pathlib').Path({str(self.file)!r}).exists():
                __import__("time").sleep(1)
"""
        self.script = altered(folder / "unhurried_ddp", {NEXT_STEP: waits + NEXT_STEP}, script)

    def end(self, metrics: Path) -> None:
        """Let the run go on to its end."""
        self.file.touch()
