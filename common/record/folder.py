"""The folder of a run: --out-dir, or runs/NAME-0001 and so on; made and writable on rank 0."""

import os
from pathlib import Path

from common.errors import UserError
from common.join.members import Members
from common.join.process_group import Group
from common.launch.options import RunOptions
from common.record.checkpoint import newest_step
from common.record.latest import latest_folder
from common.record.lock import refuse_another_run, refuse_odd_files


def open_folder(group: Group, members: Members, options: RunOptions) -> Path:
    """The folder where this run's files go. Every rank must call this; only rank 0 uses what it returns.

    --resume without --out-dir takes the latest run that has checkpoints. Raises UserError where the folder holds
    another run already or cannot be written.
    """
    same = members.folder()
    folder = same or Path()
    with group.others_wait("rank 0, which opens the files of this run"):
        if group.worker.is_main and same:
            _make_writable(same, resume="auto")
        elif group.worker.is_main:
            latest = _latest(options.name) if options.resume == "auto" else None
            folder = options.out_dir or latest or _new(options.name)
            if not options.eval_only:
                _make_writable(folder, options.resume)
            elif options.resume == "auto" and not latest_folder(folder / "checkpoints").is_dir():
                raise UserError(
                    f"--eval-only: {folder} has no checkpoint: name one with --resume PATH, or its --out-dir"
                )
    writes = same or not options.eval_only
    return members.open_folder(folder, "auto" if same else options.resume, newest_step if writes else None)


def _latest(name: str) -> Path | None:
    earlier = sorted(Path("runs").glob(f"{name}-[0-9][0-9][0-9][0-9]"))
    with_checkpoints = [path for path in earlier if (path / "checkpoints").is_dir()]
    return with_checkpoints[-1] if with_checkpoints else None


def _new(name: str) -> Path:
    """runs/NAME-0001, or the next number; two runs that start together get different ones."""
    number = 1
    while True:
        folder = Path("runs") / f"{name}-{number:04d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"--out-dir {folder} cannot be written: {error.strerror}: name another directory") from None


def _make_writable(folder: Path, resume: str | None) -> None:
    try:
        refuse_odd_files(folder)
        if resume is None:
            refuse_another_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out-dir {folder} cannot be written: {error.strerror}: name another directory") from None
