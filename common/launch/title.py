"""What `ps` and `top` show for our processes: `mnist-distributed.py rank 3 of 10 (node 0)`."""

import contextlib
import os
import sys
from pathlib import Path

from common.launch.layout import Layout, Worker

named: list[Worker] = []  # the place of this process, whose name those that it forks get


def name_worker(worker: Worker) -> None:
    """Show this process as that worker, and those that it forks, such as a plain DataLoader's, as its processes. Call
    it again in another place."""
    _show(_role(worker), worker.layout)
    if not named and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _show(f"process of {_role(named[0])}", named[0].layout))
    named[:] = [worker]


def _role(worker: Worker) -> str:
    return f"rank {worker.rank} of {worker.world_size}"


def name_supervisor(layout: Layout) -> None:
    """Show this process as the supervisor of its node's workers."""
    first, last = layout.first_rank, layout.first_rank + layout.local_world_size - 1
    ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
    _show(f"supervisor of {ranks if not layout.joins else 'a machine that joins'}", layout)


def _show(role: str, layout: Layout) -> None:
    with contextlib.suppress(ImportError):  # a title is no reason to fail: not every platform has the package
        from setproctitle import setproctitle  # here, because --help does not need it

        script = Path(sys.argv[0])
        name = script.parent.name if script.name == "__main__.py" else script.name
        setproctitle(f"{name} {role}" + f" (node {layout.node_rank})" * bool(layout.nodes and not layout.joins))
