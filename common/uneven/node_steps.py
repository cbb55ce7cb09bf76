"""Nodes that exchange only every H steps, for links that are much slower than the computing (DiLoCo).

    step                    1   2   3  ...  H   H+1 ...
    ranks of a node         x   x   x       x    x          sum their gradients, as always
    nodes                                   x               average their changes: an outer step

Until an outer step each node trains by itself, on its part of each global batch. Then the nodes' changes are averaged,
weighted by their samples, and an outer optimizer takes a step with that average: SGD, with Nesterov momentum if wanted.
Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105.

With a delay of D steps nobody waits for the link. The nodes train on while their changes travel, and take the outer
step D steps later, to which each adds what it has learned since:

    step                   50  51  ...  60  61 ...  100      H = 50, D = 10
    changes on their way    x   x   x    x           x
    weights                              outer step + the node's own change of steps 51 to 60

Between nodes, weights are the same only where an outer step waits, as it does where they are to be evaluated or saved.
Source: Douillard et al. 2025, https://arxiv.org/abs/2501.18512, who take a mean where this adds.

This is another optimisation than training in which every rank takes part in every step: the result depends on which
ranks are on one node. With H = 1, an inner SGD without momentum, and an outer learning rate of 1 without momentum, both
are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.uneven.compression import Summed, sum_bucket
from common.uneven.precision import IS_SUMMED
from common.uneven.sampling import UnevenDistributedSampler
from common.uneven.timer import StepTimer


@dataclass(frozen=True)
class _OnTheirWay:
    """The nodes' changes, between the beginning of an exchange and its end."""

    weights: torch.Tensor  # of this node, when the exchange began
    sent: torch.Tensor  # the changes' sum, once `work` is done
    work: Any  # of the node's first rank; None on the others


class NodeSteps:
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
        delay: int = 0,
        lr: float = 1.0,
        momentum: float = 0.0,
        timeout_seconds: float = 600.0,
    ):
        """Make a process group for each node, and one of the nodes' first ranks. Every rank must call this.

        `nodes` are the ranks of each node; `every` counts the steps between two outer steps, and with None all ranks
        exchange in every step, and nothing is done here; `delay`, less than `every`, is how many steps an outer step
        comes after the changes that it is made of; `timeout_seconds` is that of an exchange.
        """
        self.net, self.sampler, self.timer, self.every = net, sampler, timer, every or 0
        self.delay = delay
        self.is_on = every is not None
        self.are_same = True  # all nodes have the same weights
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
        setattr(self.anchor, IS_SUMMED, True)
        self.outer = torch.optim.SGD([self.anchor], lr, momentum, nesterov=momentum > 0)
        self.sent_as = self.anchor.dtype  # the numbers that nodes exchange
        self.are_many = len(nodes) > 1
        self.step = 0
        self.samples = self.node_samples = 0  # since the last exchange began, of all nodes and of this one
        self.on_their_way: _OnTheirWay | None = None

    @property
    def parts(self) -> dict[str, Any]:
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

    def end_step(self, evaluation_is_due: bool, checkpoint_is_due: bool, now: bool) -> bool:
        """Call after each step of the trainer's optimizer. Every H-th call takes the outer step, and so does one with
        `now`, which is for the last step of all. Every rank must call this.

        Weights may be evaluated and saved only where `are_same`. So what is due waits for an outer step, and that one
        for the link, whatever the delay. Returns whether to evaluate now.
        """
        if not self.is_on:
            return evaluation_is_due
        self.evaluation_is_due = self.evaluation_is_due or evaluation_is_due
        self.node_samples += self._node_samples()
        self.samples += self.sampler.plan.global_count(self.step)
        self.step += 1
        begins = now or self.step % self.every == 0
        self.are_same = begins and (now or not self.delay or self.evaluation_is_due or checkpoint_is_due)
        if self.on_their_way and (begins or self.step % self.every == self.delay):
            self._end_exchange()
        if begins:
            self._begin_exchange()
        if not self.are_same:
            return False
        self._end_exchange()
        evaluates, self.evaluation_is_due = self.evaluation_is_due, False
        return evaluates

    @torch.no_grad()
    def _begin_exchange(self) -> None:
        weights = self._weights()
        sent = ((self.anchor - weights) * (self.node_samples / self.samples)).to(self.sent_as)
        is_first = dist.get_rank() == self.ranks[0]
        work = dist.all_reduce(sent, group=self.leaders, async_op=True) if is_first else None
        self.on_their_way = _OnTheirWay(weights, sent, work)
        self.samples = self.node_samples = 0

    @torch.no_grad()
    def _end_exchange(self) -> None:
        """Wait for the changes, and take the outer step with them."""
        assert self.on_their_way
        begun, self.on_their_way = self.on_their_way, None
        with self.timer.exchange():
            if begun.work:
                begun.work.wait()
            dist.broadcast(begun.sent, src=self.ranks[0], group=self.group)
        self.anchor.grad = begun.sent.to(self.anchor.dtype)
        self.outer.step()
        self.anchor.grad = None
        weights = self.anchor + (self._weights() - begun.weights) if self.samples else self.anchor
        start = 0
        for one in self._trained():
            one.copy_(weights[start : start + one.numel()].view_as(one))
            start += one.numel()

    def _weights(self) -> torch.Tensor:
        """All trained weights, in one vector."""
        return torch.cat([one.detach().flatten() for one in self._trained()])

    def _trained(self) -> list[torch.nn.Parameter]:
        return [one for one in self.net.parameters() if one.requires_grad]

    def _node_samples(self) -> int:
        """Samples of the current step on this node."""
        return sum(len(self.sampler.part(self.step, rank)) for rank in self.ranks)
