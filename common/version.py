"""Versions of this code, Python and torch: for the join, for run.json and for results."""

import functools
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the site-packages that this code is installed in
LIBRARY = "site-packages"
DISTRIBUTION = "uneven-ddp"  # its name in pyproject.toml


@functools.cache
def code_fingerprint() -> str:
    """Twelve hex digits of the sources of every loaded module of this code, and of those below the folder of the
    script that was started: the same on two nodes that run the same code, installed or from a checkout.

    `launch.worker.load` calls this first, as soon as the trainer is imported: in the supervisor, whose workers inherit
    the answer. So it is that of the code that runs, and not of a file that is edited later.
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, path in sorted(_loaded_sources().items()):
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _loaded_sources() -> dict[str, Path]:
    """The source files to compare. Their names do not depend on where this code or the script is."""
    installed, script_folder, sources = _installed_files(), Path(sys.argv[0]).resolve().parent, {}
    libraries = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "scripts")]
    real_folder = functools.cache(os.path.realpath)
    is_in_environment = LIBRARY in f"{ROOT}{script_folder}"
    for module in list(sys.modules.values()):  # thousands, most of them of libraries
        where, _, name = (getattr(module, "__file__", None) or "").rpartition(os.sep)
        if not where or not name.endswith(".py") or (LIBRARY in where and not is_in_environment):
            continue
        path = f"{real_folder(where)}{os.sep}{name}"
        folder = ROOT if path.startswith(f"{ROOT}{os.sep}") else script_folder
        if path.startswith(f"{folder}{os.sep}") and _is_ours(Path(path), folder, installed, libraries):
            sources[Path(path).relative_to(folder).as_posix()] = Path(path)
    return sources


def _is_ours(path: Path, folder: Path, installed: set[Path], libraries: list[Path]) -> bool:
    """Is this source below `folder` a part of what runs, and not of a library?"""
    if not path.is_file():  # torch creates modules whose files do not exist
        return False
    is_installed = Path(__file__).resolve() in installed
    if path in installed:
        # not a command in bin/, nor the finder of an editable install: pip writes them anew on every node
        return is_installed and folder == ROOT
    is_library = LIBRARY in path.parts or any(map(path.is_relative_to, libraries))
    return not is_library and not (is_installed and folder == ROOT)


def _installed_files() -> set[Path]:
    """The files that pip has installed for this code: none without pip, only its commands if it is editable."""
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return set()
    lines = (found.read_text("RECORD") or "").splitlines()  # none where setuptools has built in this checkout
    return {Path(str(found.locate_file(line.split(",")[0]))).resolve() for line in lines}


def versions() -> dict[str, str]:
    """Versions of Python, torch and this code."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "code": code_fingerprint()}


def git_commit() -> str:
    """The commit of this checkout, with + where there are uncommitted changes, or unknown outside a checkout."""
    repository = ROOT / ".git"
    if not repository.exists():  # git would look further up, and find one that this code merely lies in
        return "unknown"
    command = ["git", f"--git-dir={repository}", f"--work-tree={ROOT}"]  # whatever GIT_DIR is
    command += ["describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
