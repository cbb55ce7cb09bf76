"""An installed copy: its commands run in any folder, without the checkout, and join with nodes that run a checkout."""

import json
import re
import tomllib
import zipfile

import pytest

from common.launch.addresses import free_port
from tests.environments import (
    OFFLINE,
    activated,
    copy_of_the_checkout,
    install,
    make_environment,
    site_packages,
)
from tests.harness import MNIST, ROOT, rows, run, start, write_trainer
from tests.test_first_answer import imported

pytestmark = pytest.mark.long

COMMANDS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
DIGITS = ("--device", "cpu", "--dataset", "digits")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    checkout = copy_of_the_checkout(tmp_path_factory.mktemp("wheel") / "checkout")
    done = run("python", "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", checkout.parent, checkout)
    assert done.code == 0, done.output
    (wheel,) = checkout.parent.glob("*.whl")
    checkout.rename(checkout.parent / "gone")
    return wheel


@pytest.fixture(scope="module")
def binaries(wheel, tmp_path_factory):
    """bin/ of an environment with the wheel. A folder `common` beside bin/ is another program's."""
    environment = tmp_path_factory.mktemp("environment")
    folder = make_environment(environment)
    install(folder, wheel)
    trap(environment)
    return folder


def trap(folder):
    (folder / "common").mkdir()
    (folder / "common" / "__init__.py").write_text("raise SystemExit('this is the common of another program')\n")


def both_nodes(port, *flags):
    return [
        [*("-n", 2, "-g", "3,1", "-i", node, "--master-addr", "127.0.0.1", "--master-port", port), *DIGITS, *flags]
        for node in range(2)
    ]


def results(*commands):
    return [command.result() for command in commands]


def test_the_wheel_holds_every_module_of_the_three_packages_and_no_other(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = [ROOT / package for package in ("common", "mnist_ddp", "bert_ddp")]
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    assert names == {path.relative_to(ROOT).as_posix() for path in files if path.is_file()}


def test_every_program_is_a_command():
    assert sorted(COMMANDS) == sorted(path.name for path in ROOT.glob("*_ddp/*-*.py"))


def test_the_packages_are_those_of_the_environment(binaries, tmp_path):
    code = "import common, mnist_ddp, bert_ddp; print(common.__file__, mnist_ddp.__file__, bert_ddp.__file__)"
    result = run(binaries / "python", "-c", code, cwd=tmp_path, **activated(binaries))
    assert all(path.startswith(str(site_packages(binaries.parent))) for path in result.output.split()), result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_help_without_heavy_imports_beside_any_folder(command, binaries, tmp_path):
    trap(tmp_path)
    environ = {**activated(binaries), "PYTHONPROFILEIMPORTTIME": "1"}
    result = run(command, "--help", cwd=tmp_path, **environ)
    assert result.code == 0, result.output
    assert f"usage: {command}" in result.output
    assert not imported(result.output) & {"torch", "numpy", "transformers", "datasets"}


def test_two_uneven_nodes_train_to_the_end_from_another_folder(binaries, tmp_path):
    trap(tmp_path)
    environ = {"cwd": tmp_path, **activated(binaries)}
    flags = ("--max-steps", 8, "--global-batch", 64, "--out-dir", "run")
    nodes = [start("mnist-distributed.py", *node, **environ) for node in both_nodes(free_port(), *flags)]
    first, second = results(*nodes)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(1, 9))
    assert re.search(r"on node 1 run: mnist-distributed\.py -n 2 -g 3,1 .*-i 1 --master-addr", first.output)


def test_torchrun_starts_an_installed_command(binaries, tmp_path):
    torchrun = (binaries / "python", "-m", "torch.distributed.run", "--master-port", free_port(), "--nproc-per-node", 2)
    flags = (*DIGITS, "--max-steps", 2, "--out-dir", tmp_path / "run")
    result = run(*torchrun, binaries / "mnist-distributed.py", *flags, cwd=tmp_path, **activated(binaries))
    assert result.code == 0, result.output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]["layout"]["world_size"] == 2


@pytest.mark.parametrize("module, said", [("hello", "process 0/1"), ("doctor", "fit to train")])
def test_the_modules_of_common_run_as_programs(module, said, binaries, tmp_path):
    result = run(binaries / "python", "-m", f"common.{module}", "-g", 1, "--device", "cpu", cwd=tmp_path)
    assert result.code == 0, result.output
    assert said in result.output


def test_a_trainer_in_another_folder_imports_the_method(binaries, tmp_path):
    body = "print(sorted(plan_batches(10, 10, worker.world_size, (4.0,)).shares))"
    script = write_trainer(tmp_path, body, imports="from common.uneven.plan import plan_batches")
    result = run(binaries / "python", script, "-g", 1, "--device", "cpu", **activated(binaries))
    assert (result.code, result.output) == (0, "[10]\n")


def test_an_installed_node_and_a_checkout_with_the_same_code_agree(binaries, tmp_path):
    first, second = both_nodes(free_port(), "--max-steps", 2)
    command = start("mnist-distributed.py", *first, "--out-dir", tmp_path / "run", **activated(binaries))
    for result in results(command, start("python", MNIST, *second)):
        assert result.code == 0, result.output


def test_an_installed_node_with_other_code_is_refused(wheel, tmp_path):
    binaries = make_environment(tmp_path / "environment")
    install(binaries, wheel)
    with (site_packages(binaries.parent) / "common" / "uneven" / "plan.py").open("a") as source:
        source.write("# an edit on one node\n")
    first, second = both_nodes(free_port(), "--max-steps", 2)
    command = start("mnist-distributed.py", *first, "--out-dir", tmp_path / "run", **activated(binaries))
    for result in results(command, start("python", MNIST, *second)):
        assert result.code == 2, result.output
        assert re.search(r"node 1 \(.*\) has code \w{12}, but node 0 \(.*\) has \w{12}", result.output)


def test_an_editable_command_has_the_flags_of_the_checkout_as_it_is_now(tmp_path):
    checkout, binaries = copy_of_the_checkout(tmp_path / "checkout"), make_environment(tmp_path / "environment")
    install(binaries, "--editable", checkout)
    entry = checkout / "mnist_ddp" / MNIST.name
    entry.write_text(entry.read_text().replace("--label-smoothing", "--label-softening"))
    assert "--label-softening" in run("mnist-distributed.py", "--help", **activated(binaries)).output


VERSION = "import sys; sys.path.insert(0, sys.argv[1]); from common.version import {0}; print({0}())"


def test_a_checkout_below_the_prefix_of_python_is_compared(tmp_path):
    """As /usr/src/app is below /usr."""
    binaries = make_environment(tmp_path)
    checkout = copy_of_the_checkout(tmp_path / "src" / "app")
    command = (binaries / "python", "-c", VERSION.format("code_fingerprint"), checkout)
    before = run(*command).output
    with (checkout / "common" / "version.py").open("a") as source:
        source.write("# an edit\n")
    assert run(*command).output != before


def commit(folder):
    """The twelve digits of a first commit of everything in `folder`."""
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", str(folder))):
        done = run(*git, *command)
        assert done.code == 0, done.output
    return run(*git, "rev-parse", "--short=12", "HEAD").output.strip()


def test_the_commit_is_never_that_of_a_repository_around_this_code(tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "project" / "vendored")
    commit(tmp_path / "project")
    assert run("python", "-c", VERSION.format("git_commit"), checkout).output == "unknown\n"


def test_the_commit_is_that_of_the_checkout_whatever_git_s_variables_are(tmp_path):
    checkout, other = copy_of_the_checkout(tmp_path / "checkout"), tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    ours, others = commit(checkout), commit(other)
    command = ("python", "-B", "-c", VERSION.format("git_commit"), checkout)
    assert ours != others
    assert run(*command, GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other)).output == f"{ours}\n"
