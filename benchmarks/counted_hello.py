"""What benchmarks/start.py runs on each rank: hello, with its requests to the store counted."""

from argparse import Namespace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common.console import say
from common.join.process_group import choose, connect, disconnect, join
from common.join.store import OpenStore, open_store
from common.launch import cli
from common.launch.layout import Worker

REQUESTS = ("set", "get", "add", "check", "wait", "compare_set", "delete_key", "append", "multi_get", "multi_set")


class CountedStore(dist.Store):
    """A store that passes every request on and counts it."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.inner, self.requests = store, 0

    def __getattribute__(self, name: str) -> Any:
        if name not in REQUESTS:
            return super().__getattribute__(name)

        def request(*arguments: Any) -> Any:
            self.requests += 1
            return getattr(self.inner, name)(*arguments)

        return request

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout  # type: ignore[attr-defined]  # torch's stub leaves it out

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def greet(worker: Worker, args: Namespace) -> None:
    """Join, connect, and print on rank 0 how many requests the ranks have made for it."""
    options = cli.join_options(args)
    device, backend, problem = choose(worker, options)
    opened = open_store(worker, options)
    store = CountedStore(opened.store)
    counted = OpenStore(store, opened.own_address, opened.master_address, opened.leads)
    joined = join(worker, options, counted, device, backend, problem)
    to_join = store.requests
    connect(worker, options, device, backend, joined)
    counts: list[Any] = [None] * worker.world_size
    dist.all_gather_object(counts, (to_join, store.requests - to_join))
    if worker.is_main:
        own, torchs = (sum(count) for count in zip(*counts, strict=True))
        others = max((count[0] for count in counts[1:]), default=0)
        say(f"requests join {own} connect {torchs} rank0 {counts[0][0]} others {others}")
    disconnect(worker, joined)
