"""The best weights of a run so far, in OUT_DIR/best/latest: a checkpoint without the state of training."""

from pathlib import Path

import torch
import torch.distributed as dist

from common.join.process_group import Group
from common.record import checkpoint


def score_so_far(group: Group, folder: Path | None, measure: str, step: int) -> float:
    """The score of the best weights saved up to `step`, -1 for none. `folder` counts on rank 0. Collective."""
    score = [-1.0]
    if group.worker.is_main and (found := _find(folder)) and found.state["step"] <= step:
        score = [found.state[measure]]
    dist.broadcast_object_list(score)
    return score[0]


def load(group: Group, folder: Path | None, net: torch.nn.Module) -> int | None:
    """Fill `net` on every rank with the best weights; returns their step, or None where there are none. Collective."""
    tree = None
    with group.others_wait("rank 0 reading the best weights"):
        if group.worker.is_main and (found := _find(folder)):
            found.load_model(net)
            tree = {"step": found.state["step"], "model": net.state_dict()}
    received = checkpoint.broadcast_tree(tree, group.device)
    if received is None:
        return None
    if not group.worker.is_main:
        net.load_state_dict(received["model"])
    return received["step"]


def _find(folder: Path) -> checkpoint.Checkpoint | None:
    return checkpoint.find(folder / "best") if (folder / "best").is_dir() else None
