"""A process that is to be let into a run under way first prepares alone: a process group of its own, with which the
trainer loads its data and builds its model."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from common.console import say
from common.elastic.membership import Membership
from common.errors import RunError
from common.files import is_locked
from common.join.interfaces import name_interface
from common.join.process_group import Group
from common.join.store import split
from common.join.turn import SAY_EVERY_SECONDS
from common.join.view import view_of
from common.join.waiting import Every, poll
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.version import ROOT


class Alone(Group):
    """A group of one process. Others of its node may prepare at the same time."""

    @contextlib.contextmanager
    def first_on_node(self, what: str) -> Iterator[None]:
        """The processes of this machine that prepare run the body one after the other, for downloads and caches."""
        seconds, is_time = self.options.work_timeout_seconds, Every(SAY_EVERY_SECONDS)

        def meanwhile(elapsed_seconds: float) -> None:
            if is_time():
                say(f"waiting for another process of this machine: {what}", self.worker.rank)

        # A lock ends with its process. That of a folder which is always there leaves no file behind.
        folder = os.open(ROOT, os.O_RDONLY) if os.name != "nt" else -1
        try:
            if folder >= 0 and not poll(lambda: is_locked(folder), seconds, meanwhile):
                raise RunError(f"{what}: another process of this machine is at it for {seconds:.0f} s (--work-timeout)")
            yield
        finally:
            if folder >= 0:
                os.close(folder)


@contextlib.contextmanager
def alone(worker: Worker, options: JoinOptions, device: torch.device, membership: Membership) -> Iterator[Group]:
    """The process group of this process, which prepares."""
    view = view_of(worker, options, device, "gloo", {"standby": membership.address}, problem="")
    name_interface(worker, options, split(membership.address)[0])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Alone(worker, device, "gloo", [view], dist.HashStore(), worker.layout.init_method, options)
    finally:
        dist.destroy_process_group()
