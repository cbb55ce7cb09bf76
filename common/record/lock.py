"""One run at a time writes into a folder: a second one would do the same steps again and mix its files with those."""

import os
from pathlib import Path
from typing import IO

from common.errors import UserError
from common.files import is_locked
from common.join.waiting import poll

SECONDS = 10.0  # that the processes of a run that was killed may take to end


def refuse_another_run(folder: Path) -> None:
    """Raise UserError where the files of a run are in `folder` already."""
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"--out-dir {folder} holds a run already: go on with --resume, or name another directory")


def refuse_odd_files(folder: Path) -> None:
    """Raise UserError where something else has the name of one of a run's files: to open a pipe could take for ever."""
    for name in ("metrics.jsonl", "run.json", ".lock", "checkpoints/latest"):
        path = folder / name
        if path.exists() and not path.is_file() and not (name == "checkpoints/latest" and path.is_dir()):
            kind = "a folder" if path.is_dir() else "a pipe or a device"
            raise UserError(f"--out-dir {folder}: its {name} is {kind}, and not a file of a run: remove it")


def lock(folder: Path, takes_over: bool = False) -> IO[str]:
    """The file that locks `folder` for as long as it is open: until this process ends, by whatever means.

    With `takes_over`, who still holds the lock was a member of this run and is lost (--elastic), such as a process that
    is frozen on another machine. Then a new lock takes its place.

    Raises UserError where another run holds the lock, and OSError where the folder cannot be written. Some network file
    systems know no locks; then nothing is locked.
    """
    file = (folder / ".lock").open("a")
    if os.name != "nt" and not poll(lambda: is_locked(file), SECONDS):
        if takes_over:
            aside = folder / f".lock-{os.getpid()}"
            file = aside.open("a")
            is_locked(file)
            aside.replace(folder / ".lock")
            return file
        raise UserError(
            f"--out-dir {folder}: another run is writing there at this moment: wait for it, or end its processes: "
            f"their hosts and pids are in {folder / 'run.json'}; with --elastic, --join {folder} joins it"
        )
    return file
