"""Variables of the environment that torch and gloo read: one line that says what is wrong, the same at every door."""

import pytest
import torch.distributed as dist

from common import sockets
from common.errors import UserError
from common.join.devices import spare_ddp
from common.launch.environment import check_environment
from common.launch.layout import Layout, Worker
from tests.harness import MNIST, ROOT, Node, playing, run, torchrun_nodes, write_trainer
from tests.test_doctor import DOCTOR

FLAGS = ("--device", "cpu")
DOORS = {
    "launcher": (MNIST, [Node(["-g", 2, *FLAGS, "--dataset", "digits"])]),
    "torchrun": (MNIST, torchrun_nodes((2,), *FLAGS, "--dataset", "digits")),
    "doctor": (DOCTOR, [Node(["-g", 2, *FLAGS])]),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_interface_that_gloo_cannot_take_is_one_line(door, tmp_path):
    program, nodes = DOORS[door]
    for node in nodes:
        node.environ = {**(node.environ or {}), "GLOO_SOCKET_IFNAME": "^lo,docker"}
    for result in playing(program, nodes, tmp_path).results():
        said = [line for line in result.output.splitlines() if "GLOO_SOCKET_IFNAME is ^lo,docker, but" in line]
        assert result.code == (1 if door == "doctor" else 2) and len(said) == 1, result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize("name, value", [
    ("TORCH_DISTRIBUTED_DEBUG", "VERBOSE"),
    ("TORCH_DISTRIBUTED_DEBUG", ""),
    ("GLOO_DEVICE_TRANSPORT", "ib"),
    ("TORCH_FR_BUFFER_SIZE", "many"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "10m"),
])  # fmt: skip
def test_a_variable_that_torch_cannot_read_is_refused(name, value):
    with pytest.raises(UserError, match=f"^{name} is '{value}' in the environment"):
        check_environment({name: value})


def test_what_torch_can_read_is_taken():
    check_environment(
        {"TORCH_DISTRIBUTED_DEBUG": "detail", "GLOO_DEVICE_TRANSPORT": "TCP", "TORCH_FR_BUFFER_SIZE": "9"}
    )


def test_such_a_variable_is_answered_in_one_line_with_code_2():
    result = run("python", MNIST, TORCH_DISTRIBUTED_DEBUG="VERBOSE")
    assert result.code == 2
    assert "error: TORCH_DISTRIBUTED_DEBUG is 'VERBOSE'" in result.output.strip() and result.output.count("\n") == 1


def test_detailed_debugging_is_lowered_over_gloo_alone(capsys):
    worker = Worker(Layout("test", world_size=1, first_rank=0, local_world_size=1), 0, 0, 0)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        spare_ddp(worker, "nccl")
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        spare_ddp(worker, "gloo")
        assert dist.get_debug_level() == dist.DebugLevel.INFO
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    assert capsys.readouterr().out.startswith("[0] TORCH_DISTRIBUTED_DEBUG is DETAIL, taken as INFO: ")


BODY = """
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for batch in DataLoader(torch.ones(4, 1), batch_size=2, num_workers=1):
        model(batch).sum().backward()
    print("trained")
"""


@pytest.fixture(scope="module", params=DOORS)
def started(request, tmp_path_factory):
    """What a door says in an environment of both kinds that used to end DDP and loaders' processes."""
    folder = tmp_path_factory.mktemp("stranger")
    long = folder / ("a" * sockets.MOST_CHARACTERS)
    long.mkdir()
    environ = {"TMPDIR": str(long), "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONPATH": str(ROOT)}
    program = DOCTOR if request.param == "doctor" else write_trainer(folder, BODY)
    if request.param == "torchrun":
        return run("python", program, *FLAGS, **environ, **torchrun_nodes((1,))[0].environ)
    return run("python", program, "-g", 1, *FLAGS, **environ)


@pytest.mark.long
def test_detailed_debugging_ends_nothing(started):
    assert "TORCH_DISTRIBUTED_DEBUG is DETAIL, taken as INFO" in started.output
    assert started.code == 0, started.output


@pytest.mark.long
def test_a_tmpdir_that_is_too_long_for_sockets_ends_nothing(started):
    assert started.code == 0 and "AF_UNIX" not in started.output, started.output
