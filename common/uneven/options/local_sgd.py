"""Nodes that exchange only every H steps, for links that are much slower than the computing (DiLoCo).

    step                    1   2   3  ...  H   H+1 ...
    ranks of a node         x   x   x       x    x          sum their gradients, as always
    nodes                                   x               average their changes: an outer step

Until an outer step each node trains by itself, on its part of each global batch. Then the nodes' changes are averaged,
weighted by their samples, and an outer optimizer takes a step with that average: SGD, with Nesterov momentum if wanted.
Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105.

This is another optimisation than training in which every rank takes part in every step: the result depends on which
ranks are on one node. With H = 1, an inner SGD without momentum, and an outer learning rate of 1 without momentum, both
are the same.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.uneven.guards.gradients import IS_REDUCED
from common.uneven.options.compression import Summed, sum_bucket
from common.uneven.options.timer import StepTimer
from common.uneven.sampling import UnevenDistributedSampler


class LocalSGD:
    """The outer steps of `net`. Every rank makes one, before `wrap`, which it is given to.

    It is a part of a checkpoint, which holds the outer momentum. The optimizer of the trainer differs from node to
    node; a checkpoint has that of rank 0's node, and all nodes of a resumed run begin with it.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        sampler: UnevenDistributedSampler,
        timer: StepTimer,
        nodes: Sequence[Sequence[int]],
        every: int | None,
        lr: float = 1.0,
        momentum: float = 0.0,
        timeout_seconds: float = 600.0,
    ):
        """Make a process group for each node, and one of the nodes' first ranks. Every rank must call this.

        `nodes` are the ranks of each node; `every` counts the steps between two outer steps, and with None all ranks
        exchange in every step, and nothing is done here; `timeout_seconds` is that of an exchange.
        """
        self.net, self.sampler, self.timer, self.every = net, sampler, timer, every or 0
        self.is_on = every is not None
        self.is_synchronized = True  # all nodes have the same weights
        self.evaluation_is_due = False
        if not self.is_on:
            return
        limit = timedelta(seconds=timeout_seconds)
        groups: list[Any] = [dist.new_group(list(ranks), limit) for ranks in nodes]
        self.leaders: Any = dist.new_group([ranks[0] for ranks in nodes], limit)
        self.ranks, self.group = next(
            (ranks, group) for ranks, group in zip(nodes, groups, strict=True) if dist.get_rank() in ranks
        )
        # The weights of the last outer step, in one vector, which the outer optimizer trains.
        self.anchor = torch.nn.Parameter(self._weights())
        setattr(self.anchor, IS_REDUCED, True)
        self.outer = torch.optim.SGD([self.anchor], lr, momentum, nesterov=momentum > 0)
        self.sent_as = self.anchor.dtype  # the numbers that nodes exchange
        self.are_many = len(nodes) > 1
        self.step = 0
        self.samples = self.node_samples = 0  # since the last outer step, of all nodes and of this one

    @property
    def states(self) -> dict[str, Any]:
        """What a checkpoint must have of this, by name."""
        return {"nodes": self} if self.is_on else {}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.outer.load_state_dict(state["outer"])

    @torch.no_grad()
    def start(self, compress: str = "off") -> None:
        """Give every rank the weights of rank 0. Every rank must call this.

        With `compress` bf16, the nodes' changes are sent with 8 significant bits.
        """
        if compress == "bf16" and self.are_many:
            self.sent_as = torch.bfloat16
        for tensor in (*self.net.parameters(), *self.net.buffers()):
            dist.broadcast(tensor, src=0)
        self.anchor.copy_(self._weights())

    def sum_gradients(self, bucket: dist.GradBucket) -> Summed:
        """Sum a bucket of DDP's gradients over the ranks of this node, times global samples / samples of this node.

        The trainer divides its loss by the count of the global batch, of which this node has only a part. So this is
        the mean over the node's samples, and over its tokens where those are in proportion to the samples.
        """
        mine = self._node_samples()
        scale = self.sampler.plan.global_count(self.step) / mine if mine else 0.0
        return sum_bucket(bucket, ranks=self.group, scale=scale)

    @property
    def synchronizes_next(self) -> bool:
        """Whether all nodes have the same weights after the next step."""
        return not self.is_on or (self.step + 1) % self.every == 0

    def end_step(self, evaluation_is_due: bool, now: bool) -> bool:
        """Call after each step of the trainer's optimizer. Every H-th call takes the outer step, and so does one with
        `now`, which is for the last step of all. Every rank must call this.

        Weights may be evaluated and saved only where `is_synchronized`, so what is due waits for an outer step. Returns
        whether to evaluate now.
        """
        if not self.is_on:
            return evaluation_is_due
        self.evaluation_is_due = self.evaluation_is_due or evaluation_is_due
        self.node_samples += self._node_samples()
        self.samples += self.sampler.plan.global_count(self.step)
        self.step += 1
        self.is_synchronized = now or self.step % self.every == 0
        if not self.is_synchronized:
            return False
        self._take_outer_step()
        evaluates, self.evaluation_is_due = self.evaluation_is_due, False
        return evaluates

    @torch.no_grad()
    def _take_outer_step(self) -> None:
        change = ((self.anchor - self._weights()) * (self.node_samples / self.samples)).to(self.sent_as)
        self.samples = self.node_samples = 0
        with self.timer.exchange():
            if dist.get_rank() == self.ranks[0]:
                dist.all_reduce(change, group=self.leaders)
            dist.broadcast(change, src=self.ranks[0], group=self.group)
        self.anchor.grad = change.to(self.anchor.dtype)
        self.outer.step()
        self.anchor.grad = None
        start = 0
        for parameter in self._trained():
            parameter.copy_(self.anchor[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def _weights(self) -> torch.Tensor:
        """All trained weights, in one vector."""
        return torch.cat([one.detach().flatten() for one in self._trained()])

    def _trained(self) -> list[torch.nn.Parameter]:
        return [one for one in self.net.parameters() if one.requires_grad]

    def _node_samples(self) -> int:
        """Samples of the current step on this node."""
        return sum(len(self.sampler.part(self.step, rank)) for rank in self.ranks)
