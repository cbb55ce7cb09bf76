"""What a person gets wrong: one clear line, the right exit code, nothing half-written."""

import fcntl
import http.client

import psutil
import pytest
import torch

from common.errors import ExplainedError, RunError, UserError
from mnist_ddp import data
from tests.harness import MNIST, SHARED, Node, nodes_of, play, playing, start, wait_until
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--max-steps", 2)


def refusal(tmp_path, *flags, code: int = 2, gpus=(2,)) -> str:
    """The one line of error of a run that must end with `code`."""
    nodes = [Node([*node.flags, *flags]) for node in nodes_of(gpus, tmp_path / "out")]
    (tmp_path / "logs").mkdir(exist_ok=True)
    results = playing(MNIST, nodes, tmp_path / "logs").results()
    said = [line for result in results for line in result.output.splitlines() if "error:" in line]
    assert all(result.code == code for result in results), results
    assert len(said) == len(gpus), results
    assert not any("Traceback" in result.output for result in results)
    return said[0]


def mnist_files(folder, **damage):
    """MNIST's folder with all four files of the right size; `damage` replaces what is in some."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count, greys in (("train", 60_000, 251), ("t10k", 10_000, 241)):
        header = (2049).to_bytes(4) + count.to_bytes(4)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + bytes(range(10)) * (count // 10))
        shape = b"".join(number.to_bytes(4) for number in (2051, count, 28, 28))
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(
            shape + (bytes(range(greys)) * (count * 28 * 28 // greys + 1))[: count * 28 * 28]
        )
    for name, content in damage.items():
        (raw / name.replace("_", "-")).write_bytes(content)
    return folder


def test_a_data_file_cut_short_is_named_with_both_sizes(tmp_path):
    folder = mnist_files(tmp_path / "data", t10k_labels_idx1_ubyte=b"short")
    said = refusal(tmp_path, "--data-dir", folder)
    assert "t10k-labels-idx1-ubyte is damaged: 5 bytes, not 10,008: delete it and start again" in said


def test_a_data_file_with_another_header_is_named(tmp_path):
    folder = mnist_files(tmp_path / "data", t10k_labels_idx1_ubyte=bytes(10_008))
    assert "t10k-labels-idx1-ubyte is damaged" in refusal(tmp_path, "--data-dir", folder)


def test_data_that_differ_between_nodes_are_refused(tmp_path):
    """Each node reads its own disk: here node 1's files are another data set than node 0's."""
    here = mnist_files(tmp_path / "here")
    labels = (2049).to_bytes(4) + (10_000).to_bytes(4) + bytes(range(10)) * 999 + bytes([1]) * 10
    there = mnist_files(tmp_path / "there", t10k_labels_idx1_ubyte=labels)
    nodes = nodes_of((1, 1), tmp_path / "out")
    nodes = [Node([*node.flags, "--data-dir", data]) for node, data in zip(nodes, (here, there), strict=True)]
    for result in playing(MNIST, nodes, tmp_path).results():
        assert result.code == 2, result.output
        assert "has data mnist " in result.output


def test_data_that_cannot_be_downloaded_are_explained(tmp_path):
    """No test downloads anything: the proxy here is a port that nobody listens on."""
    nodes = nodes_of((2,), tmp_path / "out", "--data-dir", tmp_path / "data")
    nodes[0].environ = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    (result,) = playing(MNIST, nodes, tmp_path).results()
    assert result.code == 1, result.output
    assert "mnist is not there and could not be downloaded" in result.output
    assert "use --dataset digits, which needs no download" in result.output


def test_a_data_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    said = refusal(tmp_path, "--data-dir", tmp_path / "file")
    assert f"--data-dir {tmp_path / 'file'}: mnist is not there, and that folder cannot be written" in said


def test_an_out_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    said = refusal(tmp_path, *FLAGS, "--out-dir", tmp_path / "file" / "run")
    assert f"--out-dir {tmp_path / 'file' / 'run'} cannot be written: Not a directory: name another" in said


def test_an_out_dir_with_another_run_is_not_overwritten(tmp_path):
    play(MNIST, (1,), tmp_path / "out", *FLAGS)
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "holds a run already: go on with --resume, or name another directory" in refusal(tmp_path, *FLAGS)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before


def test_of_two_runs_that_begin_in_one_folder_at_the_same_moment_the_second_is_refused(tmp_path):
    patient = "import torch\nimport common.record.lock as locks\n\nlocks.SECONDS = 600.0\n"
    script = altered(tmp_path / "patient_ddp", {"import torch\n": patient})
    with (tmp_path / ".lock").open("w") as lock:  # the first has begun, and has written nothing yet
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = start("python", script, *FLAGS, "-g", 1, "--device", "cpu", "--out-dir", tmp_path)
        process = psutil.Process(second.process.pid)
        wait_until(lambda: str(tmp_path / ".lock") in [file.path for file in process.open_files()], second)
        (tmp_path / "metrics.jsonl").write_text("{}\n")
    result = second.result()
    assert result.code == 2 and result.output.count("holds a run already: go on with --resume") == 1, result.output
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_loss_that_is_not_finite_ends_every_rank_and_names_the_step(tmp_path):
    said = refusal(tmp_path, "--dataset", "digits", "--lr", 1e30, code=1, gpus=(1, 1))
    assert "of step 2 is " in said or "of step 3 is " in said
    assert "lower --lr, set --clip-norm" in said
    assert not list((tmp_path / "out").glob("checkpoints/*"))


def test_a_full_disk_ends_the_run_and_leaves_nothing_half_written(tmp_path):
    """A limit on the size of files stands for the disk: every Unix has one, and the error is as sudden."""
    (tmp_path / "limited.py").write_text(
        "import resource, runpy, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))\n"
        f"runpy.run_path({str(MNIST)!r}, run_name='__main__')\n"
    )
    flags = ["--dataset", "digits", "--device", "cpu", "--epochs", "1", "--out-dir", tmp_path / "out"]
    (result,) = playing(tmp_path / "limited.py", [Node(flags)], tmp_path).results()
    assert result.code == 1, result.output
    assert "could not write the checkpoint" in result.output
    assert "the earlier ones are intact" in result.output
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


@pytest.mark.skipif(not (SHARED / "MNIST").is_dir(), reason="real MNIST is not at ../shared/data")
def test_data_found_on_disk_need_no_network_and_no_write_permission(tmp_path):
    play(MNIST, (2,), tmp_path, "--data-dir", SHARED, "--max-steps", 1)


# --- MNIST's files as they are found --------------------------------------------------------------------------------


def loaded(folder, monkeypatch):
    """What is said about the files in `folder`, where nothing can be downloaded."""

    def refuse(*args, **kwargs):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried https://a.b, got:\n<urlopen error no>")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", refuse)
    with pytest.raises(ExplainedError) as error:
        data.load("mnist", folder, torch.float32)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_one_file_that_is_missing_is_named_and_the_whole_reason_is_given(tmp_path, monkeypatch):
    raw = mnist_files(tmp_path) / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").unlink()
    said = loaded(tmp_path, monkeypatch)
    assert f"put t10k-labels-idx1-ubyte in {raw}, or use --dataset digits" in said
    assert "got: <urlopen error no>" in said


def test_files_by_other_names_are_named(tmp_path, monkeypatch):
    raw = mnist_files(tmp_path) / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").rename(raw / "t10k-labels.idx1-ubyte")  # as Kaggle has it
    assert f"there are {raw / 't10k-labels.idx1-ubyte'}: move, rename or unpack them" in loaded(tmp_path, monkeypatch)


@pytest.mark.parametrize("given", [".", "MNIST", "MNIST/raw"])
def test_files_in_another_folder_are_named(given, tmp_path, monkeypatch):
    deeper = mnist_files(tmp_path / "deeper") / "MNIST" / "raw"
    folder = tmp_path if given == "." else tmp_path / "deeper" / given
    assert f"there are {deeper / 't10k-images-idx3-ubyte'}, " in loaded(folder, monkeypatch)


def test_a_data_file_that_is_a_folder_is_one_line(tmp_path, monkeypatch):
    path = mnist_files(tmp_path) / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be read: Is a directory" in loaded(tmp_path, monkeypatch)


@pytest.mark.parametrize("content, said", [
    (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer and not the file itself: fetch it"),
    (b"\x1f\x8b\x08packed", "is packed with gzip: unpack it with `gunzip`"),
])  # fmt: skip
def test_a_data_file_that_stands_for_another_is_not_called_damaged(content, said, tmp_path, monkeypatch):
    folder = mnist_files(tmp_path, train_labels_idx1_ubyte=content)
    assert said in loaded(folder, monkeypatch)


def test_files_whose_names_were_exchanged_are_not_called_damaged(tmp_path, monkeypatch):
    raw = mnist_files(tmp_path) / "MNIST" / "raw"
    names = [raw / f"{part}-images-idx3-ubyte" for part in ("train", "t10k")]
    names[0].rename(raw / "aside")
    names[1].rename(names[0])
    (raw / "aside").rename(names[1])
    said = loaded(tmp_path, monkeypatch)
    assert "has 7,840,016 bytes, as t10k-images-idx3-ubyte should have: are their names exchanged?" in said


def test_images_that_end_in_nothing_are_refused(tmp_path, monkeypatch):
    path = mnist_files(tmp_path) / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[: -5000 * 784] + bytes(5000 * 784))
    assert "images of the training set are of one grey level, the first of them image" in loaded(tmp_path, monkeypatch)


def test_a_download_that_breaks_off_is_not_blamed_on_the_folder(tmp_path, monkeypatch):
    def break_off(*args, **kwargs):
        raise http.client.IncompleteRead(b"")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", break_off)
    with pytest.raises(RunError, match=r"mnist is not there and could not be downloaded .*IncompleteRead"):
        data.load("mnist", tmp_path, torch.float32)


def test_a_training_set_of_black_images_is_refused_once_and_not_by_its_loss(tmp_path):
    header = b"".join(number.to_bytes(4) for number in (2051, 60_000, 28, 28))
    folder = mnist_files(tmp_path / "data", train_images_idx3_ubyte=header + bytes(60_000 * 28 * 28))
    said = refusal(tmp_path, "--data-dir", folder)
    assert f"--data-dir {folder}: 1,000 images from all over the training set are 1 different ones: copy the" in said


SHAPE = b"".join(number.to_bytes(4) for number in (2051, 10_000, 28, 28))
WORTHLESS = [
    ({"t10k_images_idx3_ubyte": SHAPE + bytes(10_000 * 28 * 28)}, "1,000 images from all over the test set are 1 diff"),
    (
        {"t10k_labels_idx1_ubyte": (2049).to_bytes(4) + (10_000).to_bytes(4) + bytes(range(10)) * 50 + bytes(9_500)},
        "9,550 of 10,000 labels of the test set are 0",
    ),
    (
        {"train_labels_idx1_ubyte": (2049).to_bytes(4) + (60_000).to_bytes(4) + bytes(range(5)) * 12_000},
        "no training image has the label 5, which a test image has",
    ),
    (
        {"t10k_images_idx3_ubyte": SHAPE + (bytes(range(251)) * 19_000)[: 6_000 * 28 * 28] + bytes(4_000 * 28 * 28)},
        "4,000 of 10,000 images of the test set are of one grey level, the first of them image 6,001",
    ),
    (
        {"t10k_labels_idx1_ubyte": (2049).to_bytes(4) + (10_000).to_bytes(4) + bytes([7]) * 10_000},
        "10,000 of 10,000 labels of the test set are 7",
    ),
]


@pytest.mark.parametrize(("files", "said"), WORTHLESS)
def test_a_test_set_that_says_nothing_as_a_whole_is_refused(files, said, tmp_path):
    folder = mnist_files(tmp_path, **files)
    with pytest.raises(UserError, match=f"--data-dir {folder}: {said}"):
        data.load("mnist", folder, torch.float32)


@pytest.mark.parametrize("flag", ["--data-dir", "--out-dir", "--resume"])
def test_a_name_longer_than_the_system_takes_is_one_line(flag, tmp_path):
    flags = () if flag == "--data-dir" else FLAGS
    said = refusal(tmp_path, *flags, flag, tmp_path / ("x" * 300), gpus=(1,))
    assert "xxx" in said and "File name too long" in said
