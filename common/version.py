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
        with open(path, "rb") as file:  # noqa: PTH123 (a Path for each of hundreds of files takes longer than reading)
            digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()


def _loaded_sources() -> dict[str, str]:
    """The source files to compare. Their names do not depend on where this code or the script is."""
    installed, script_folder, sources = _installed_files(), os.path.realpath(Path(sys.argv[0]).parent), {}
    is_installed = os.path.realpath(__file__) in installed
    is_in_environment = LIBRARY in f"{ROOT}{script_folder}"
    libraries = [os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "scripts")]
    real_folder = functools.cache(os.path.realpath)
    # Thousands of modules are loaded, most of them of a few packages: where this process was forked, a look at a module
    # costs a page of memory. Python's own are looked at, because a file of the user's may stand in for one.
    names = list(sys.modules)
    outermost = {name.partition(".")[0] for name in names}
    others = {name for name in outermost if is_in_environment or not _is_library(sys.modules.get(name))}
    for module in [sys.modules.get(name) for name in names if name.partition(".")[0] in others]:
        where, _, name = (getattr(module, "__file__", None) or "").rpartition(os.sep)
        if not where or not name.endswith(".py"):
            continue
        path = f"{real_folder(where)}{os.sep}{name}"
        folder = str(ROOT) if path.startswith(f"{ROOT}{os.sep}") else script_folder
        below = path.removeprefix(folder + os.sep)
        if below == path or not os.path.isfile(path):  # noqa: PTH113 (torch creates modules whose files do not exist)
            continue
        if path in installed:
            # not a command in bin/, nor the finder of an editable install: pip writes them anew on every node
            is_ours = is_installed and folder == str(ROOT)
        else:
            is_library = f"{os.sep}{LIBRARY}{os.sep}" in path or path.startswith(tuple(libraries))
            is_ours = not is_library and not (is_installed and folder == str(ROOT))
        if is_ours:
            sources[below.replace(os.sep, "/")] = path
    return sources


def _is_library(module: object) -> bool:
    """Does this outermost package lie in the environment?"""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(LIBRARY in str(place) for place in places)


def _installed_files() -> set[str]:
    """The files that pip has installed for this code: none without pip, only its commands if it is editable."""
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return set()
    lines = (found.read_text("RECORD") or "").splitlines()  # none where setuptools has built in this checkout
    return {os.path.realpath(str(found.locate_file(line.split(",")[0]))) for line in lines}


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
