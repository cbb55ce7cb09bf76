"""What code is this? Versions for the join, for run.json and for results."""

import functools
import hashlib
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def code_fingerprint() -> str:
    """Twelve hex digits of the sources in common/ and of what the trainer has imported from its own folder: the same
    on two nodes that run the same code."""
    digest = hashlib.blake2b(digest_size=6)
    own = Path(sys.argv[0]).resolve().parent
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    loaded = {Path(file).resolve() for file in files if file.endswith(".py")}
    # not all that says that it is a file is one: torch makes modules up
    beside = {path for path in loaded if path.parent == own and path.is_file()}
    for path in sorted(beside.union((ROOT / "common").glob("*.py")), key=lambda path: (path.parent == own, path.name)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, torch and this code."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "code": code_fingerprint()}


def git_commit() -> str:
    """The commit of this checkout, with + where files differ from it, or unknown outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
