"""Copies of the MNIST trainer with some lines changed: to spoil something, to die at a certain moment, or to go on
until the test has seen what it waits for."""

from pathlib import Path

from tests.harness import MNIST, rows_so_far

EPOCH = 23  # steps of the digits' 1,438 samples in batches of 64


def altered(folder: Path, changes: dict[str, str]) -> Path:
    """A copy of the trainer, in the package `folder`, with some of its text replaced. Returns the script."""
    folder.mkdir()
    for file in (MNIST, MNIST.parent / "train.py"):
        source = file.read_text().replace("mnist_ddp.train", f"{folder.name}.train")
        if file != MNIST:
            assert all(source.count(old) == 1 for old in changes)
            for old, new in changes.items():
                source = source.replace(old, new)
        (folder / file.name).write_text(source)
    return folder / MNIST.name


class Patient:
    """A copy of the trainer that takes its time from step 46 on, a second a step in the end, until the test lets it
    end: whatever the test does meanwhile, the run has not ended before, on a slow machine either.

    Its losses, evaluations and checkpoints are those of the trainer, to as many steps as it makes. Give it
    `Patient.FLAGS`; `script` is its script.
    """

    # the schedule of the learning rate is that of 100 epochs, wherever the run ends
    FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--epochs", 100)
    LAST_STEP = 18 * EPOCH  # at the latest
    PLACE = "                seed_noise(device,"
    TOTAL = "total_steps = min("
    WAITS = """                if not (end := {path}).exists():
                    __import__("time").sleep(0 if step < 46 else 0.1 if step < 146 else 1)
                else:
                    total_steps = int(end.read_text())
"""

    def __init__(self, folder: Path, changes: dict[str, str] | None = None, name: str = "patient_ddp"):
        self.file = folder / f"{name}-end"
        path = f"__import__('pathlib').Path({str(self.file)!r})"
        begin = f"{self.TOTAL}int({path}.read_text()) if {path}.exists() else schedule_steps, "
        mine = {self.PLACE: self.WAITS.format(path=path) + self.PLACE, self.TOTAL: begin}
        self.script = altered(folder / name, {**(changes or {}), **mine})

    def end(self, metrics: Path) -> int:
        """Let the run, whose folder is `metrics`, end with the next epoch that no rank has reached. Returns its last
        step."""
        steps = [row["step"] for row in rows_so_far(metrics, "train")]
        last = min(self.LAST_STEP, (max(steps, default=0) + 60) // EPOCH * EPOCH + EPOCH)
        aside = self.file.with_suffix(".part")
        aside.write_text(str(last))
        aside.replace(self.file)
        return last
