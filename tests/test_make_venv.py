"""`make .venv`: whole or not at all, with the commands of this checkout; UNEVEN_VENVS shares packages, never code."""

import hashlib
import shutil
import sys

import pytest

from tests.environments import activated, copy_of_the_checkout, make_environment, site_packages
from tests.harness import run

pytestmark = pytest.mark.long


def make_venv(checkout, **environ):
    return run("bash", checkout / ".ci" / "make-venv", PYTHON=sys.executable, PYTHONPATH=None, **environ)


def kept_packages(checkout, folder):
    """A folder for UNEVEN_VENVS that has the environment for this checkout already. Returns that environment."""
    requirements = b"".join((checkout / name).read_bytes() for name in ("requirements.txt", ".ci/tools.txt"))
    key = hashlib.sha256(run("python", "--version").output.encode() + requirements).hexdigest()[:16]
    binaries = make_environment(folder / key)
    own = site_packages(binaries.parent)
    (packages, *_) = (own / "packages.pth").read_text().splitlines()
    shutil.rmtree(own)
    own.symlink_to(packages)  # the packages themselves: a .venv does not read the .pth files of kept ones
    (binaries.parent / ".complete").touch()
    shebang = f"#!{binaries / 'python'}\n"
    (binaries / "which-python").write_text(f"{shebang}import sys, common\nprint(sys.executable, common.__file__)\n")
    return binaries.parent


@pytest.fixture
def checkouts(tmp_path):
    """Two checkouts that share their packages, each with its .venv and with a help text of its own."""
    both = [copy_of_the_checkout(tmp_path / name) for name in ("first", "second")]
    kept_packages(both[0], tmp_path / "venvs")
    for checkout in both:
        entry = checkout / "mnist_ddp" / "mnist-distributed.py"
        entry.write_text(entry.read_text().replace("Train a small network", f"The {checkout.name} checkout"))
        made = make_venv(checkout, UNEVEN_VENVS=str(tmp_path / "venvs"))
        assert (made.code, made.output) == (0, "")
    return both


def test_two_checkouts_that_share_packages_run_their_own_code(checkouts, tmp_path):
    for checkout in checkouts:
        shown = run("mnist-distributed.py", "--help", cwd=tmp_path, **activated(checkout / ".venv" / "bin"))
        assert shown.code == 0, shown.output
        assert f"The {checkout.name} checkout" in shown.output


def test_a_program_that_is_shared_runs_with_the_python_of_the_checkout(checkouts, tmp_path):
    """As torchrun must, which starts its workers with the Python that runs it."""
    for checkout in checkouts:
        said = run("which-python", cwd=tmp_path, **activated(checkout / ".venv" / "bin")).output
        assert said.split() == [str(checkout / ".venv/bin/python"), str(checkout / "common/__init__.py")]


def test_nothing_is_written_into_the_environment_that_a_link_points_to(checkouts, tmp_path):
    first = checkouts[0]
    (first / ".venv").rename(tmp_path / "of-another")
    (first / ".venv").symlink_to(tmp_path / "of-another")
    before = sorted((tmp_path / "of-another").rglob("*"))
    assert make_venv(first, UNEVEN_VENVS=str(tmp_path / "venvs")).code == 0
    assert not (first / ".venv").is_symlink()
    assert sorted((tmp_path / "of-another").rglob("*")) == before


def test_an_environment_that_could_not_be_completed_is_not_left_behind(tmp_path):
    """make would take it for a complete one."""
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    (checkout / "requirements.txt").write_text("no-such-package-of-ours\n")
    made = make_venv(checkout, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert made.code == 1
    assert "no-such-package-of-ours" in made.output
    assert not (checkout / ".venv").exists()
