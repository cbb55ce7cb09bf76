"""Versions of this code, Python and torch: for the join, for run.json and for results."""

import functools
import hashlib
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def code_fingerprint() -> str:
    """Twelve hex digits of the sources of every loaded module below this checkout, and below the folder of the script
    that was started: the same on two nodes that run the same code."""
    folders = {ROOT, Path(sys.argv[0]).resolve().parent}
    libraries = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)} | {ROOT / ".venv"}
    sources = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        below = [folder for folder in folders if path.is_relative_to(folder)]
        # torch creates modules whose files do not exist
        if "site-packages" in path.parts:
            continue
        if below and path.suffix == ".py" and path.is_file() and not any(map(path.is_relative_to, libraries)):
            sources[path.relative_to(max(below, key=lambda folder: len(folder.parts))).as_posix()] = path
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + sources[name].read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, torch and this code."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "code": code_fingerprint()}


def git_commit() -> str:
    """The commit of this checkout, with + where there are uncommitted changes, or unknown outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
