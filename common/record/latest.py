"""Which checkpoint of a folder is the latest: what the link `latest` says, or what a copy of the run has made of it.

Copies without links (`cp -rL`, `scp -r`, object stores) turn it into a folder, or leave it out. Imports no torch.
"""

import contextlib
import json
from pathlib import Path

WEIGHTS, STATE = "model.safetensors", "state.json"


def by_step(folder: Path) -> list[Path]:
    """All checkpoints of the folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def latest_name(folder: Path) -> str:
    """The name of the checkpoint that `latest` points to, or is a copy of; an empty string where there is none."""
    latest = folder / "latest"
    if latest.is_symlink():
        return latest.readlink().name
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if latest.is_dir() and (latest / STATE).is_file():
            return f"step-{json.loads((latest / STATE).read_text())['step']:08d}"
        if latest.is_file():
            return Path(latest.read_text().strip()).name
    return ""


def latest_folder(folder: Path) -> Path:
    """The latest checkpoint; where `latest` names none that is there, the newest. It may not exist."""
    latest, named = folder / "latest", latest_name(folder)
    if latest.is_dir():
        return latest
    return folder / named if named and (folder / named).is_dir() else max(by_step(folder), default=latest)


def is_copy(latest: Path) -> bool:
    """True for a `latest` that is a folder itself."""
    return latest.is_dir() and not latest.is_symlink()
