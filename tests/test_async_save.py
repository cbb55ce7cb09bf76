"""--async-save: checkpoints are written beside the training, complete, and of the step that they name."""

import threading

import pytest
import torch

from common.errors import RunError
from common.record import checkpoint
from common.record.background import BackgroundWriter
from tests.harness import (
    FINETUNE,
    MNIST,
    largest_difference,
    nodes_of,
    play,
    playing,
    rows,
    rows_so_far,
    wait_until,
    weights,
)
from tests.small_bert import save_classes, save_model
from tests.trainers import NEXT_STEP, altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--epochs", 2, "--global-batch", 110)


class Tied(torch.nn.Module):
    """Two layers with the same weights, as a masked language model has."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.last.weight = self.first.weight


def test_what_is_written_is_the_state_at_the_time_of_the_call(tmp_path):
    torch.manual_seed(0)
    net, writer, may_write = Tied(), BackgroundWriter(), threading.Event()
    optimizer = torch.optim.AdamW(net.parameters())

    def one_step() -> None:
        net.last(net.first(torch.ones(1, 3))).sum().backward()
        optimizer.step()

    one_step()
    wanted = [tensor.clone() for tensor in (*net.parameters(), *(one["exp_avg"] for one in optimizer.state.values()))]
    path = checkpoint.save(
        tmp_path, 1, net, {}, write_extra=lambda path: may_write.wait(300), writer=writer, optimizer=optimizer
    )
    one_step()
    assert not path.exists()
    may_write.set()
    writer.finish()
    found = checkpoint.find(tmp_path)
    found.load_model(net)
    found.load_training(optimizer=optimizer)
    now = [*net.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
    assert all(torch.equal(*pair) for pair in zip(now, wanted, strict=True))
    assert net.last.weight is net.first.weight


def test_an_error_of_the_writing_is_raised_by_the_next_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    writer = BackgroundWriter()
    checkpoint.save(tmp_path / "file" / "checkpoints", 1, torch.nn.Linear(2, 2), {}, writer=writer)
    with pytest.raises(RunError, match=r"could not write the checkpoint .*file/checkpoints/step-00000001"):
        checkpoint.save(tmp_path / "run", 2, torch.nn.Linear(2, 2), {}, writer=writer)


def test_a_run_has_the_checkpoints_that_it_has_without(tmp_path):
    play(MNIST, (1, 1), tmp_path / "before", *FLAGS, "--save-every", 5, "--keep", 9)
    play(MNIST, (1, 1), tmp_path / "beside", *FLAGS, "--save-every", 5, "--keep", 9, "--async-save")
    saved = [sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("before", "beside")]
    assert saved[0] == saved[1]
    for name in saved[0]:
        pair = [checkpoint.find(tmp_path / run / "checkpoints" / name) for run in ("before", "beside")]
        assert pair[0].state["checksums"] == pair[1].state["checksums"]


def test_a_run_that_is_killed_while_it_writes_resumes_from_the_checkpoint_before(tmp_path):
    line = "                run.save("
    waits = "lambda path: __import__('time').sleep(600 if 'step-00000020' in path.name else 0)"
    slow = {line: f"{line}write_extra={waits}"}
    trainer = altered(tmp_path / "slow_ddp", slow)
    node = playing(trainer, nodes_of((2,), tmp_path / "run", *FLAGS, "--save-every", 10, "--async-save"), tmp_path)
    wait_until(lambda: any(row["step"] == 22 for row in rows_so_far(tmp_path / "run", "train")), node)
    node.kill()  # steps go on while step 20 is being written
    assert checkpoint.find(tmp_path / "run").state["step"] == 14
    play(MNIST, (1, 1), tmp_path / "run", *FLAGS, "--resume")
    play(MNIST, (1,), tmp_path / "whole", *FLAGS)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "whole")) < 1e-9
    starts = [row["step"] for row in rows(tmp_path / "run", "train")]
    assert starts == list(range(1, len(starts) + 1))


def test_a_full_disk_ends_the_run_on_every_node_and_leaves_the_last_checkpoint(tmp_path):
    line = "                run.save("
    full = "lambda path: 'step-00000020' in path.name and open('/dev/full', 'wb', 0).write(b'x')"
    trainer = altered(tmp_path / "full_ddp", {line: f"{line}write_extra={full}"})
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS, "--save-every", 10, "--async-save")
    for node in playing(trainer, nodes, tmp_path).results():
        assert node.code == 1 and "Traceback" not in node.output, node.output
        assert "No space left on device" in node.output and "step-00000020" in node.output, node.output
    assert checkpoint.find(tmp_path / "run").state["step"] == 14


def test_fine_tuning_evaluates_the_best_weights_although_they_were_just_being_written(tmp_path):
    model, data = save_model(tmp_path / "model"), save_classes(tmp_path / "data")
    flags = ("--task", "classify", "--model", model, "--data", data, "--epochs", 2)
    play(FINETUNE, (1, 1), tmp_path / "run", *flags, "--async-save", "--dropout", 0)
    best = checkpoint.find(tmp_path / "run" / "best").state
    (summary,) = rows(tmp_path / "run", "summary")
    assert summary["best_step"] == best["step"]


FAILS = "            if run.step == 8:\n                raise __import__('common.errors').errors.UserError('no more')\n"


def test_a_disk_that_hangs_does_not_hold_a_run_that_ends_with_an_error(tmp_path):
    save, hangs = "                run.save(", "lambda path: __import__('time').sleep(3600)"
    trainer = altered(tmp_path / "hung_ddp", {save: f"{save}write_extra={hangs}", NEXT_STEP: FAILS + NEXT_STEP})
    flags = (*FLAGS, "--save-every", 5, "--async-save", "--work-timeout", 6)
    (node,) = playing(trainer, nodes_of((1,), tmp_path / "run", *flags), tmp_path).results()
    waits = "waiting for the checkpoint that is being written, before this rank ends with error: no more"
    gives_up = "error: no more\n[0] error: what this rank writes in the end (--work-timeout) did not end within 6 s"
    assert node.code == 2 and node.output.index(waits) < node.output.index(gives_up), node.output


def test_a_checkpoint_that_could_not_be_written_is_named_where_the_run_ends_with_another_error(tmp_path):
    save, full = "                run.save(", "lambda path: open('/dev/full', 'wb', 0).write(b'x')"
    trainer = altered(tmp_path / "full_ddp", {save: f"{save}write_extra={full}", NEXT_STEP: FAILS + NEXT_STEP})
    nodes = nodes_of((1,), tmp_path / "run", *FLAGS, "--save-every", 5, "--async-save")
    (node,) = playing(trainer, nodes, tmp_path).results()
    assert node.code == 2 and "error: no more" in node.output, node.output
    assert "error: could not write the checkpoint" in node.output, node.output
