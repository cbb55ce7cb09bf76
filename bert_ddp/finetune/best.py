"""The best weights of a run so far, in OUT_DIR/best/latest: a checkpoint without training state."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from common.record import checkpoint
from common.run import Run


class BestWeights:
    """Those with the highest `measure`, a name among the numbers of an evaluation. Every rank must make one, and call
    its methods; only rank 0 reads and writes the folder."""

    def __init__(self, run: Run, measure: str, write_extra: Callable[[Path], None]):
        self.run, self.measure, self.write_extra = run, measure, write_extra
        score = [-1.0]
        if run.worker.is_main and (found := self._find()) and found.state["step"] <= run.step:
            score = [found.state[measure]]
        dist.broadcast_object_list(score)
        self.score = score[0]

    def save_if_better(self, numbers: Mapping[str, float]) -> None:
        """Save the weights if they score more than all before them."""
        if numbers[self.measure] > self.score:
            self.score = numbers[self.measure]
            self.run.save("best", self.write_extra, **{self.measure: self.score})

    def load(self, net: torch.nn.Module) -> int:
        """Fill `net` with the best weights. Returns their step: that of the run, whose weights stay, if there are none.

        Rank 0 reads them and sends them to the others.
        """
        step: list[int | None] = [None]
        with self.run.group.others_wait("rank 0, which reads the best weights"):
            if self.run.worker.is_main and (found := self._find()):
                found.load_model(net)
                step = [found.state["step"]]
        dist.broadcast_object_list(step)
        if step[0] is None:
            return self.run.step
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
        return step[0]

    def _find(self) -> checkpoint.Checkpoint | None:
        folder = self.run.folder / "best"
        return checkpoint.find(folder) if folder.is_dir() else None
