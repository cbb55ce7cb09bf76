"""Benchmarks find their data in data/, download them there, and say what to do where they cannot. None is measured."""

import functools
import hashlib
import http.server
import shutil
import threading
import urllib.error

import pytest

from benchmarks.data import download, require_mnist
from tests.environments import copy_of_the_checkout
from tests.harness import ROOT, run
from tests.test_bad_input import mnist_files

NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # a port that nobody listens on


@pytest.mark.parametrize("program, flags, lacks, by_hand", [
    pytest.param("mnist.py", (), "data has no MNIST", "data/MNIST/raw there by hand", marks=pytest.mark.long),
    pytest.param(
        "layouts.py", ("--out-dir", "runs/layouts"), "data has no MNIST", "data/MNIST/raw there by hand",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "finetune.py", (), "data/wnut17 has no WNUT 17", "put train.conll, dev.conll, test.conll there by hand",
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_a_fresh_clone_without_network_is_told_what_to_do(program, flags, lacks, by_hand, tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    shutil.copytree(ROOT / "benchmarks", checkout / "benchmarks")
    result = run("python", checkout / "benchmarks" / program, *flags, cwd=tmp_path, **NO_NETWORK)
    assert result.code == 1, result.output
    assert f"error: {checkout / lacks}" in result.output
    assert "could not be downloaded: connect this machine, or" in result.output and by_hand in result.output
    assert "Traceback" not in result.output


@pytest.mark.long
def test_the_loop_that_is_measured_on_a_gpu_runs_on_a_cpu():
    result = run("python", ROOT / "benchmarks" / "gpu.py", "--tiny", "--only", "ours", "--lengths", 32)
    assert result.code == 0, result.output
    assert "| 32 | 4 | ours | " in result.output


def test_data_that_are_there_need_no_network(tmp_path):
    require_mnist(mnist_files(tmp_path))


def test_make_bench_passes_the_folder_on():
    said = run("make", "--dry-run", "--old-file=.venv", "bench", "DATA=/elsewhere", cwd=ROOT).output
    assert said.count("--data-dir /elsewhere") == 2


@pytest.fixture
def site(tmp_path):
    """(address, folder) of a web server on this machine."""
    folder = tmp_path / "site"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_what_is_missing_is_downloaded_under_our_name_and_once(site, tmp_path):
    address, folder = site
    (folder / "theirs").write_text("text")
    files = {"ours": ("theirs", hashlib.sha256(b"text").hexdigest())}
    download(address, files, tmp_path / "data")
    (folder / "theirs").unlink()
    download(address, files, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["ours"]
    assert (tmp_path / "data" / "ours").read_text() == "text"


def test_another_file_than_the_one_that_was_measured_is_refused(site, tmp_path):
    address, folder = site
    (folder / "theirs").write_text("other text")
    with pytest.raises(OSError, match="theirs is another file today"):
        download(address, {"ours": ("theirs", hashlib.sha256(b"text").hexdigest())}, tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_a_file_that_is_not_there_is_an_os_error(site, tmp_path):
    with pytest.raises(urllib.error.URLError):  # an OSError
        download(site[0], {"ours": ("theirs", "")}, tmp_path / "data")
