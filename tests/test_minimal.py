"""minimal.py: exact under torchrun's variables on uneven nodes, and resumed from its own file."""

import re
import struct

import pytest
import torch

from tests.harness import ROOT, playing, start, torchrun_nodes

MINIMAL = ROOT / "mnist_ddp" / "minimal.py"
SAMPLES = 600


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small data set in the files of MNIST."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", SAMPLES), ("t10k", 10)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.numpy().tobytes())
    return folder


CONSTANTS = 'DATA, CHECKPOINT, PART, EPOCHS = "data", Path("minimal.pt"), Path("minimal.pt.part"), 3'


def losses_of(gpus, data, folder, epochs=3) -> dict[int, float]:
    """Step -> loss, as rank 0 prints them, with the processes that torchrun would start, in float64."""
    folder.mkdir(exist_ok=True)
    source = MINIMAL.read_text().replace("parents[1]", "parent")  # where common is installed
    assert source.count(CONSTANTS) == 1
    files = f"Path({str(folder / 'minimal.pt')!r}), Path({str(folder / 'part')!r})"
    mine = f"DATA, CHECKPOINT, PART, EPOCHS = {str(data)!r}, {files}, {epochs}"
    (folder / "minimal.py").write_text(source.replace(CONSTANTS, f"{mine}\ntorch.set_default_dtype(torch.float64)"))
    results = playing(folder / "minimal.py", torchrun_nodes(gpus), folder).results()
    for result in results:
        assert result.code == 0, result.output
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", results[0].output)}


def test_every_loss_is_that_of_one_process_augmentation_included(data, tmp_path):
    one = losses_of((1,), data, tmp_path / "one")
    assert sorted(one) == list(range(1, 10))
    assert losses_of((3, 1), data, tmp_path / "uneven") == pytest.approx(one, abs=1e-9, rel=0)


def test_it_goes_on_from_its_own_file_on_another_layout(data, tmp_path):
    whole = losses_of((1,), data, tmp_path / "whole")
    first = losses_of((2, 1), data, tmp_path / "parts", epochs=1)
    second = losses_of((1, 1), data, tmp_path / "parts")
    assert (sorted(first), sorted(second)) == ([1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert {**first, **second} == pytest.approx(whole, abs=1e-9, rel=0)


AT_ONCE = """
import sys
import torch
import torch.distributed as dist
from common.uneven import ddp
from common.uneven.global_batches import GlobalBatchLoader

dist.init_process_group("gloo")
sys.setswitchinterval(1.0)  # nothing takes the interpreter's lock from the main thread
net = torch.nn.Linear(4, 4)
batches = GlobalBatchLoader(torch.ones(12, 4), 4)
model = ddp.wrap(net, batches, lambda model, micro: model(micro).sum())
for batch in batches:
    for micro, is_last in batch.micro_batches():
        with model.no_sync(enabled=not is_last):
            model(micro).sum().backward()
    net.zero_grad()
"""


# without the wait at exit, 2 to 5 of 12 such scripts aborted
@pytest.mark.long
@pytest.mark.parametrize("attempt", range(3))
def test_a_script_may_end_at_once_after_its_last_backward(attempt, tmp_path):
    """As processes of their own: one that is forked does not end as Python ends."""
    script = tmp_path / "at_once.py"
    script.write_text(AT_ONCE)
    ranks = [start("python", script, PYTHONPATH=str(ROOT), **node.environ) for node in torchrun_nodes((2,))]
    for rank in ranks:
        result = rank.result()
        assert result.code == 0, result.output


def test_it_is_short_and_needs_nothing_but_torch_and_common_uneven():
    lines = MINIMAL.read_text().splitlines()
    assert len(lines) <= 60
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {"sys", "pathlib", "torch", "torchvision", "common"}
    assert all(line.startswith("from common.uneven") for line in lines if line.startswith("from common"))
