"""Fresh environments and copies of the checkout, for tests of what is installed. Nothing is downloaded."""

import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from tests.harness import ROOT, run

SOURCES = (".ci", "common", "mnist_ddp", "bert_ddp", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
PACKAGES = {metadata.distribution(name).locate_file("") for name in ("pip", "setuptools", "torch")}
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def copy_of_the_checkout(folder: Path) -> Path:
    """The files of this checkout that an installation needs, in `folder`."""
    folder.mkdir(parents=True)
    for path in [ROOT / name for name in SOURCES]:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    return folder


def make_environment(folder: Path) -> Path:
    """An environment that finds the packages that the tests use, but not this checkout. Returns its bin/."""
    made = run("python", "-m", "venv", "--without-pip", folder)
    assert made.code == 0, made.output
    (site_packages(folder) / "packages.pth").write_text("".join(f"{path}\n" for path in PACKAGES))
    return folder / "bin"


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


def install(binaries: Path, *what: object) -> None:
    """`pip install` in the environment whose bin/ this is."""
    done = run(binaries / "python", "-m", "pip", "install", *OFFLINE, *what, **activated(binaries))
    assert done.code == 0, done.output


def activated(binaries: Path) -> dict[str, str | None]:
    """What `source bin/activate` does to a command's variables, without a path that a test runner may have set."""
    return {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": None}
