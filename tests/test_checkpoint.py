"""Checkpoints: which parts they hold, what their files are, and what is said when a run and a checkpoint differ."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.launch.layout import Layout
from common.record import checkpoint, run_json
from common.record.latest import latest_folder
from common.record.lock import refuse_odd_files
from common.record.resume import require_all_schedulers
from tests.harness import MNIST, nodes_of, play, playing
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--global-batch", 110, "--epochs", 1, "--lr", 1e-3)
PARTS = "        run.resume(net, optimizer=optimizer, scheduler=scheduler"
WITH_EMA = {
    PARTS: f"""\
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        second = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
{PARTS}, ema=ema, second=second""",
    "optimizer.zero_grad()": "[second.step(), ema.update_parameters(net), optimizer.zero_grad()]",
    "            run.end_step()\n": """            run.end_step()
        torch.save([ema.state_dict(), second.state_dict()], args.out_dir / f"parts-of-{worker.rank}.pt")
""",
}


def test_an_average_of_the_weights_and_a_second_optimizer_are_restored_on_every_rank_bit_for_bit(tmp_path):
    trainer = altered(tmp_path / "ema_ddp", WITH_EMA)
    play(trainer, (2, 1), tmp_path / "whole", *FLAGS, "--max-steps", 6)
    play(trainer, (2, 1), tmp_path / "halves", *FLAGS, "--max-steps", 3)
    play(trainer, (2, 1), tmp_path / "halves", *FLAGS, "--max-steps", 6, "--resume")
    for rank in range(3):
        whole, halves = (torch.load(tmp_path / run / f"parts-of-{rank}.pt") for run in ("whole", "halves"))
        assert whole[0]["n_averaged"] == 6
        torch.testing.assert_close(halves, whole, rtol=0, atol=0)


@pytest.mark.parametrize("saved_by, resumed_by, said", [
    ("plain", "ema_ddp", "it was saved without the part ema: resume without that part too"),
    ("ema_ddp", "plain", "it was saved with the part ema, which this run lacks: give that part to resume() again"),
])  # fmt: skip
def test_a_part_that_only_the_run_or_only_the_checkpoint_has_is_named_on_every_node(
    saved_by, resumed_by, said, tmp_path
):
    trainers = {"plain": MNIST, "ema_ddp": altered(tmp_path / "ema_ddp", WITH_EMA)}
    play(trainers[saved_by], (1,), tmp_path / "run", *FLAGS, "--max-steps", 2)
    nodes = nodes_of((1, 1), tmp_path / "run", *FLAGS, "--resume")
    for node in playing(trainers[resumed_by], nodes, tmp_path).results():
        assert node.code == 2, node.output
        assert said in node.output and "Traceback" not in node.output


def small_net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_a_part_whose_state_does_not_fit_is_named(tmp_path):
    net = small_net()
    one, two = torch.optim.SGD(net.parameters()), torch.optim.SGD([{"params": [one]} for one in net.parameters()])
    found = checkpoint.find(checkpoint.save(tmp_path, 1, net, {}, optimizer=one))
    with pytest.raises(
        UserError, match=r"--resume .*: the part optimizer does not take .*make that part as in the run"
    ):
        found.load_training(optimizer=two)


class Counter:
    """A part with a state of one object."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_a_part_whose_state_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(UserError, match=r"one of the parts counter has a state with a numpy\S+ in it"):
        checkpoint.save(tmp_path, 1, small_net(), {}, counter=Counter(np.float64(0.5)))
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_a_checkpoint_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path / "run", 1, small_net(), {}, write_extra=lambda path: (path / "a").touch(0o600))
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        ("a", "model.safetensors", "state.json", "training_state.pt"), "0o640"
    )


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_state_json_and_run_json_are_valid_json_although_clip_norm_is_infinite(tmp_path):
    play(MNIST, (1,), tmp_path, *FLAGS, "--max-steps", 1)
    for file in (tmp_path / "checkpoints" / "latest" / "state.json", tmp_path / "run.json"):
        assert '"inf"' in json.dumps(json.loads(file.read_text(), parse_constant=refuse))


def test_a_checkpoint_that_holds_the_infinity_of_earlier_versions_resumes_with_its_recipe_compared(tmp_path):
    path = checkpoint.save(tmp_path, 1, small_net(), {"clip_norm": math.inf})
    text = (path / "state.json").read_text()
    assert text.count('"inf"') == 1
    (path / "state.json").write_text(text.replace('"inf"', "Infinity"))
    found = checkpoint.find(path)
    found.require({"clip_norm": math.inf}, prefix="--")
    found.require({"clip_norm": "inf"}, prefix="--")
    with pytest.raises(UserError, match=r"written with --clip-norm inf, but this run has 1\.0"):
        found.require({"clip_norm": 1.0}, prefix="--")


def test_an_optimizer_that_is_not_among_the_parts_is_missed_before_training(tmp_path):
    trainer = altered(tmp_path / "half_ddp", {"AdamW(net.parameters()": "AdamW(net.features.parameters()"})
    nodes = nodes_of((1, 1), tmp_path / "run", "--dataset", "digits", "--max-steps", 2)
    for node in playing(trainer, nodes, tmp_path).results():
        assert node.code == 2, node.output
        assert "no optimizer among the parts of a checkpoint holds classifier.1.weight" in node.output


def test_a_scheduler_that_is_not_among_the_parts_is_missed_before_training(tmp_path):
    trainer = altered(tmp_path / "half_ddp", {", scheduler=scheduler": ""})
    for node in playing(trainer, nodes_of((1, 1), tmp_path / "run", "--dataset", "digits"), tmp_path).results():
        assert node.code == 2, node.output
        assert "OneCycleLR changes from step to step, but run.resume() was not given it" in node.output


LATE = {  # made after resume(), and used after each step
    "ReduceLROnPlateau": ("used = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", "pass"),
    "AveragedModel": ("used = torch.optim.swa_utils.AveragedModel(net)", "used.update_parameters(net)"),
    "AveragedModel, from step 3 on": (
        "used = torch.optim.swa_utils.AveragedModel(net)",
        "run.step > 2 and used.update_parameters(net)",
    ),
}


def test_schedulers_within_schedulers_and_a_model_with_its_optimizer_are_not_missed():
    net = small_net()
    net.optimizer = optimizer = torch.optim.AdamW(net.parameters())
    schedulers = torch.optim.lr_scheduler
    chained = schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer), schedulers.LinearLR(optimizer)])
    whole = schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer), chained], milestones=[5])
    require_all_schedulers({"optimizer": optimizer, "scheduler": whole})
    with pytest.raises(UserError, match="was not given it"):
        require_all_schedulers({"optimizer": optimizer, "scheduler": chained})


@pytest.mark.parametrize("name", LATE)
def test_what_else_changes_from_step_to_step_and_is_not_among_the_states_is_named(name, tmp_path):
    loop, update, (made, use) = "        while True:\n", "            scheduler.step()\n", LATE[name]
    changes = {loop: f"        {made}\n{loop}", update: f"{update}            {use}\n"}
    trainer = altered(tmp_path / "more_ddp", changes)
    for node in playing(trainer, nodes_of((1,), tmp_path / "run", "--dataset", "digits"), tmp_path).results():
        assert node.code == 2, node.output
        assert f"{name.partition(',')[0]} changes from step to step, but run.resume() was not given it" in node.output


def test_resume_says_that_there_is_nothing_to_resume_from(tmp_path):
    (node,) = play(MNIST, (1,), tmp_path / "new", "--dataset", "digits", "--max-steps", 1, "--resume")
    assert f"--resume: there is no checkpoint in {tmp_path / 'new'} yet: starting from the beginning" in node.output


def test_an_optimizer_with_a_parameter_outside_the_model_is_refused(tmp_path):
    more = "AdamW([*net.parameters(), torch.nn.Parameter(torch.zeros(()))]"
    trainer = altered(tmp_path / "scale_ddp", {"AdamW(net.parameters()": more})
    for node in playing(trainer, nodes_of((1, 1), tmp_path / "run", "--dataset", "digits"), tmp_path).results():
        assert node.code == 2, node.output
        assert "the part optimizer of a checkpoint trains a parameter that is not in the model" in node.output


# --- copies of a run, and files that are not what they were --------------------------------------------------------


def copied(tmp_path, *removed):
    """The checkpoints of steps 1 and 2 as a copy without links has them: `latest` is a folder."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "run" / "checkpoints", step, small_net(), {})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # follows links, as cp -rL, scp -r and object stores do
    folder = tmp_path / "copy" / "checkpoints"
    for name in removed:
        shutil.rmtree(folder / name)
    assert not (folder / "latest").is_symlink()
    return folder


def test_a_run_whose_latest_is_a_folder_goes_on_and_has_a_link_again(tmp_path):
    folder = copied(tmp_path)
    assert checkpoint.find(tmp_path / "copy").path.name == "step-00000002"
    checkpoint.save(folder, 3, small_net(), {})
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step-0000000{n}" for n in (1, 2, 3))]
    assert (folder / "latest").is_symlink() and checkpoint.latest_name(folder) == "step-00000003"


def test_a_latest_that_is_the_only_copy_of_its_checkpoint_is_found_and_kept(tmp_path):
    folder = copied(tmp_path, "step-00000001", "step-00000002")
    found = checkpoint.find(tmp_path / "copy")
    assert found.state["step"] == 2
    checkpoint.save(folder, 3, small_net(), {})
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_a_copied_latest_stands_in_for_its_damaged_checkpoint_and_is_not_removed(tmp_path):
    folder = copied(tmp_path)
    (folder / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint.find(tmp_path / "copy").path == folder / "latest"
    checkpoint.point_latest(folder, "step-00000001")
    assert checkpoint.find(folder / "copy-of-step-00000002").state["step"] == 2


def test_a_link_of_a_killed_save_is_cleared_away(tmp_path):
    (tmp_path / ".latest-99").symlink_to("step-00000001")
    checkpoint.save(tmp_path, 1, small_net(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("content", [b"step-00000001\r\n", b"\xff\xfe", b""])
def test_a_latest_that_is_a_file_is_read_whatever_is_in_it(content, tmp_path):
    checkpoint.save(tmp_path, 1, small_net(), {})
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_bytes(content)
    assert checkpoint.find(tmp_path).state["step"] == 1
    assert latest_folder(tmp_path).name == "step-00000001"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("content", [POINTER, b"\x80\x02damaged", b""])
def test_a_training_state_that_torch_cannot_read_gets_no_advice_to_run_it(content, tmp_path):
    found = checkpoint.find(checkpoint.save(tmp_path, 1, small_net(), {}))
    (found.path / "training_state.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"training_state.pt cannot be read .*: copy the checkpoint again") as error:
        found.load_training()
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_of_pointers_says_how_to_fetch_it(tmp_path):
    path = checkpoint.save(tmp_path, 1, small_net(), {})
    (path / "model.safetensors").write_bytes(POINTER)
    with pytest.raises(UserError, match=r"model.safetensors is a git-lfs pointer .*`git lfs pull`"):
        checkpoint.find(path)


def test_weights_that_state_json_does_not_know_and_that_are_missing_are_one_line(tmp_path):
    found = checkpoint.find(checkpoint.save(tmp_path, 1, small_net(), {}))
    (found.path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        found.load_model(small_net())


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_checkpoint_s_file_is_not_waited_for(name, tmp_path):
    path = checkpoint.save(tmp_path, 1, small_net(), {})
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(UserError, match=f"{name} is no file: name another checkpoint"):
        checkpoint.find(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "checkpoints/latest"])
@pytest.mark.parametrize("make, kind", [(os.mkfifo, "a pipe or a device"), (os.mkdir, "a folder")])
def test_what_has_the_name_of_a_run_s_file_and_is_none_is_refused(make, kind, name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    make(tmp_path / name)
    if name.endswith("latest") and kind == "a folder":  # what a copy makes of the link
        return refuse_odd_files(tmp_path)
    with pytest.raises(UserError, match=f"its {name} is {kind}, and not a file of a run: remove it"):
        refuse_odd_files(tmp_path)
    assert latest_folder(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "latest"


@pytest.mark.parametrize("name, number", [("exp_avg", math.nan), ("exp_avg_sq", -1.0)])
def test_a_state_of_an_optimizer_that_no_step_leaves_is_refused(name, number, tmp_path):
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(parameter.sum() for parameter in net.parameters()).backward()
    optimizer.step()
    optimizer.state[next(net.parameters())][name].fill_(number)
    found = checkpoint.find(checkpoint.save(tmp_path, 1, net, {}, optimizer=optimizer))
    with pytest.raises(UserError, match=f"the part optimizer does not take the state .*{name} holds"):
        found.load_training(optimizer=torch.optim.AdamW(small_net().parameters()))


@pytest.mark.parametrize("content", ["{}", "[]", '{"starts": 1}', "[" * 100_000])
def test_a_run_json_of_someone_else_is_replaced(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    layout = Layout("-g 1", world_size=1, first_rank=0, local_world_size=1, init_method="env://")
    run_json.add_start(tmp_path, layout, [], [1], {}, {}, 0)
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 1
