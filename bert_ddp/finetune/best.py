"""The best weights of a run so far, in OUT_DIR/best/latest: a checkpoint without training state."""

from pathlib import Path

import torch
import torch.distributed as dist

from common.join.process_group import Group
from common.record import checkpoint


def score_so_far(group: Group, folder: Path, measure: str, step: int) -> float:
    """The score of the best weights that were saved up to `step`, -1 for none. Every rank must call this.

    Only rank 0 reads `folder`.
    """
    score = [-1.0]
    if group.worker.is_main and (found := _find(folder)) and found.state["step"] <= step:
        score = [found.state[measure]]
    dist.broadcast_object_list(score)
    return score[0]


def load(group: Group, folder: Path, net: torch.nn.Module) -> int | None:
    """Fill `net` on every rank with the best weights. Returns their step, or None where there are none.

    Rank 0 reads them and sends them to the others. Every rank must call this.
    """
    step: list[int | None] = [None]
    with group.others_wait("rank 0, which reads the best weights"):
        if group.worker.is_main and (found := _find(folder)):
            found.load_model(net)
            step = [found.state["step"]]
    dist.broadcast_object_list(step)
    if step[0] is not None:
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
    return step[0]


def _find(folder: Path) -> checkpoint.Checkpoint | None:
    return checkpoint.find(folder / "best") if (folder / "best").is_dir() else None
