"""The connections between the ranks, which a rank closes when it has lost contact with another one.

A survivor in a collective waits only for its neighbours, which may be survivors too: it would not notice that a rank is
lost before they end. torch closes gloo's connections with the last reference to the process group, which DDP and the
frames of the training loop hold.
"""

import contextlib
import os
import socket
from typing import Any

import psutil
import torch.distributed as dist


class Connections:
    """Make one before the ranks are connected; `note` those that were opened since, when they are."""

    def __init__(self) -> None:
        self.before = _established()
        self.ours: set[Any] = set()

    def note(self) -> None:
        self.ours = _established() - self.before

    def close(self) -> None:
        """Shut them down: this rank's collectives fail now, and then those of the ranks that wait for it."""
        _shut_down(self.ours & _established())


def cut_off(store: dist.Store) -> None:
    """Shut down this process's connections to a store that does not answer, so that the requests to it fail which would
    wait for ever."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        _shut_down({one for one in _established() if one.raddr.port == store.port})


def _shut_down(connections: set[Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as same:
            # gloo closes its sockets when one fails: another connection may have got this number meanwhile
            if same.getpeername()[:2] == connection.raddr and same.getsockname()[:2] == connection.laddr:
                same.shutdown(socket.SHUT_RDWR)


def _established() -> set[Any]:
    try:
        found = psutil.Process().net_connections("tcp")
    except psutil.Error:  # not allowed here
        return set()
    return {connection for connection in found if connection.status == psutil.CONN_ESTABLISHED}
