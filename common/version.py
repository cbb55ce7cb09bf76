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
    """Twelve hex digits of the sources here and beside the trainer: the same on two nodes that run the same code."""
    digest = hashlib.blake2b(digest_size=6)
    for folder in (ROOT / "common", Path(sys.argv[0]).resolve().parent):
        for path in sorted(folder.glob("*.py")):
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
