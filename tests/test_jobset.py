"""The Kubernetes manifest: valid by the JobSet's schema, and its pods are the nodes of one layout."""

import copy
import json
import os

import jsonschema
import pytest
import yaml

from common.launch import cli
from common.launch.addresses import host_and_port
from common.launch.detect import layout_from
from tests.harness import MNIST, ROOT, flags_of, run

MANIFEST = yaml.safe_load((ROOT / "launch_scripts" / "jobset_uneven.yaml").read_text())
ELASTIC = yaml.safe_load((ROOT / "launch_scripts" / "jobset_elastic.yaml").read_text())
SCHEMA = jsonschema.Draft202012Validator(json.loads((ROOT / "tests" / "jobset.schema.json").read_text()))


def pods() -> list[dict]:
    """The only container of each pod, in the order of the nodes."""
    jobs = MANIFEST["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs]


def layouts(monkeypatch) -> list:
    found = []
    for pod in pods():
        gpus = pod["resources"]["limits"]["nvidia.com/gpu"]
        monkeypatch.setattr("common.launch.gpus._driver_gpus", lambda count=gpus: count)
        python, script, *flags = [*pod["command"], *pod["args"]]
        assert (python, ROOT / script) == ("python3", MNIST)
        assert {flag for flag in flags if flag.startswith("-")} <= flags_of(MNIST)
        args, _ = cli.parser("").parse_known_args(flags)
        found.append(layout_from(cli.layout_flags(args), {}))
    return found


@pytest.mark.parametrize("manifest", [MANIFEST, ELASTIC], ids=["uneven", "elastic"])
def test_the_manifest_is_valid(manifest):
    assert [error.message for error in SCHEMA.iter_errors(manifest)] == []


def test_the_pods_that_come_and_go_do_in_bash_what_they_say(tmp_path):
    """With a trainer that says how it was called, and that a run is under way there, or not."""
    trainer, python = tmp_path / "mnist_ddp" / "mnist-distributed.py", tmp_path / "bin" / "python3"
    for file in (trainer, python):
        file.parent.mkdir()
    python.write_text('#!/bin/bash\necho "$@" >> calls\n[[ "$*" != *--join* ]] || exit $(cat code)\n')
    python.chmod(0o755)
    first, more = (
        job["template"]["spec"]["template"]["spec"]["containers"][0] for job in ELASTIC["spec"]["replicatedJobs"]
    )
    for pod, code, calls in ((first, 0, ["--join"]), (first, 1, ["--join", "--elastic"]), (more, 0, ["--join"])):
        (tmp_path / "calls").unlink(missing_ok=True)
        (tmp_path / "code").write_text(str(code))
        (text,) = pod["args"]
        path = f"{python.parent}:{os.environ['PATH']}"
        done = run(*pod["command"], text.replace("/shared", str(tmp_path / "shared")), cwd=tmp_path, PATH=path)
        assert done.code == 0, done.output
        said = (tmp_path / "calls").read_text().splitlines()
        assert [line.split()[1] for line in said] == calls
        for line in said:
            assert {word for word in line.split() if word.startswith("--")} <= flags_of(MNIST)


@pytest.mark.parametrize("path", ["spec.network.enableDnsHostnames", "spec.replicas", "spec.failurePolicy.maxRestart"])
def test_the_schema_refuses_a_field_that_kubernetes_does_not_know(path):
    wrong = copy.deepcopy(MANIFEST)
    *folders, name = path.split(".")
    place = wrong
    for folder in folders:
        place = place[folder]
    place[name] = 1
    assert name in "".join(error.message for error in SCHEMA.iter_errors(wrong))


def test_the_pods_are_all_nodes_of_one_layout(monkeypatch):
    ranks = [worker.rank for layout in layouts(monkeypatch) for worker in layout.workers()]
    assert ranks == list(range(10))


def test_the_pods_meet_at_the_name_that_the_jobset_gives_to_the_first(monkeypatch):
    name, first = MANIFEST["metadata"]["name"], MANIFEST["spec"]["replicatedJobs"][0]["name"]
    _, second = layouts(monkeypatch)
    assert host_and_port(second.init_method) == (f"{name}-{first}-0-0.{name}", 29500)


def test_every_replicated_job_is_one_node():
    for job in MANIFEST["spec"]["replicatedJobs"]:
        assert (job["replicas"], job["template"]["spec"]["parallelism"]) == (1, 1)
