"""Strangers: the store listens where it must only, and a process without the job's secret is not let in."""

import os
import subprocess

import psutil
import pytest

from common.launch.addresses import free_port
from tests.harness import MNIST, ROOT, TIMEOUT_SECONDS, Node, nodes_of, playing, wait_until, write_trainer

FLAGS = ("--dataset", "digits", "--max-steps", 2)


def secret(tmp_path, name: str, text: str = "s3cret"):
    path = tmp_path / name
    path.write_text(text)
    return path


def pair(tmp_path, first: tuple, second: tuple):
    """The results of two nodes of one process each, which have these flags besides."""
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS)
    for node, more in zip(nodes, (first, second), strict=True):
        node.flags = [*node.flags, *more]
    return playing(MNIST, nodes, tmp_path).results()


def test_nodes_that_have_the_same_secret_train(tmp_path):
    files = [secret(tmp_path, name) for name in ("a", "b")]
    results = pair(tmp_path, ("--secret-file", files[0]), ("--secret-file", files[1]))
    assert [result.code for result in results] == [0, 0], [result.output for result in results]


@pytest.mark.parametrize(
    "first, second",
    [
        ("one", "other"),
        pytest.param("one", None, marks=pytest.mark.long),
        pytest.param(None, "other", marks=pytest.mark.long),
    ],
)
def test_a_node_with_another_secret_or_none_is_not_let_in_and_told_why(tmp_path, first, second):
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS)
    for node, name in zip(nodes, (first, second), strict=True):
        node.flags += ["--secret-file", secret(tmp_path, name, name)] if name else []
    nodes[0].flags += ["--join-timeout", 8]
    knocking = playing(MNIST, nodes[1:], tmp_path)
    knocking.wait_for("waiting for node 0")  # it is there before the other one begins to count
    (host,) = playing(MNIST, nodes[:1], tmp_path).results()
    (stranger,) = knocking.results()
    assert "has another secret than this rank (--secret-file): not let in" in host.output
    assert "node 1 (rank 1) did not join within 8 s" in host.output and host.code == 1
    assert "this rank has another secret (--secret-file, UNEVEN_DDP_SECRET) than rank 0" in stranger.output
    assert stranger.code == 2


@pytest.mark.parametrize("text, said", [("", "is empty: fill it"), (None, "cannot be read: No such file")])
def test_a_secret_file_that_is_empty_or_missing_is_refused(tmp_path, text, said):
    path = tmp_path / "secret" if text is None else secret(tmp_path, "secret", text)
    node = Node(["-g", 1, "--device", "cpu", *FLAGS, "--secret-file", path])
    (result,) = playing(MNIST, [node], tmp_path).results()
    assert result.code == 2 and said in result.output


def test_the_store_of_one_node_listens_on_loopback_only(tmp_path):
    script = write_trainer(tmp_path, "(FOLDER / 'here').touch()\nsignal.pause()")
    port = free_port()
    run_ = playing(script, [Node(["-g", 2, "--device", "cpu", "--master-port", port])], tmp_path)
    wait_until((tmp_path / "here").exists, run_)
    listening = {
        one.laddr.ip for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port
    }
    run_.kill()
    assert listening == {"127.0.0.1"}


def test_the_printed_command_of_the_other_node_names_the_secret_file(tmp_path):
    path = secret(tmp_path, "secret")
    results = pair(tmp_path, ("--secret-file", path), ("--secret-file", path))
    line = next(line for line in results[0].output.splitlines() if "on node 1 run:" in line)
    assert f"--secret-file {path}" in line


def test_a_task_of_slurm_whose_folder_takes_no_secret_ends_and_says_so(tmp_path):
    folder = tmp_path / "runs" / "slurm-7"
    folder.mkdir(parents=True)
    (folder / ".secret").touch()  # as a full disk leaves it
    (tmp_path / "sleep").write_text("#!/bin/sh\n")  # 30 s, at once
    (tmp_path / "sleep").chmod(0o755)
    place = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}
    environment = os.environ | place | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "launch_scripts" / "slurm_elastic.sbatch", MNIST]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 1 and "runs/slurm-7/.secret is still empty after 30 s" in done.stderr, done
