"""The connections between the ranks, which a rank closes when it has lost contact with another one.

A survivor in a collective waits only for its neighbours, which may be survivors too: it would not notice that a rank is
lost before they end. torch closes gloo's connections with the last reference to the process group, which DDP and the
frames of the training loop hold.
"""

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class _Connection:
    """An open TCP connection of this process: its descriptor, and host and port of both ends."""

    descriptor: int
    here: tuple[Any, ...]
    there: tuple[Any, ...]


class Connections:
    """Make one before the ranks are connected; `note` those that were opened since, when they are."""

    def __init__(self) -> None:
        self.before = _established()
        self.ours: set[_Connection] = set()

    def note(self, *ports: int) -> None:
        """All that were opened since, but for those to or from stores, which have these `ports`."""
        new = _established() - self.before
        self.ours = {one for one in new if not {one.here[1], one.there[1]} & set(ports)}

    def closed_to(self) -> set[str]:
        """Hosts at the other end of connections that have been closed: gloo closes its end when the other one has."""
        return {one.there[0] for one in self.ours if not _is_open(one)}

    def close(self) -> None:
        """Shut them down: this rank's collectives fail now, and then those of the ranks that wait for it."""
        _shut_down(self.ours & _established())


def cut_off(store: dist.Store) -> None:
    """Shut down this process's connections to a store that does not answer, so that the requests to it fail which would
    wait for ever."""
    _shut_down({one for one in _established() if one.there[1] in ports_of(store)})


def ports_of(store: dist.Store) -> list[int]:
    """At which it is served; none for a store that is a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, dist.TCPStore) else []


def _shut_down(connections: set[_Connection]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as same:
            # gloo closes its sockets when one fails: another connection may have got this number meanwhile
            if _ends(same) == (connection.here, connection.there):
                same.shutdown(socket.SHUT_RDWR)


def _established() -> set[_Connection]:
    """Found by this process's descriptors: to read the system's table of all connections takes many times as long."""
    found = set()
    folder = Path("/dev/fd")  # Windows has none
    for descriptor in [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if _is_socket(descriptor):
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    if same.type == socket.SOCK_STREAM and same.family in (socket.AF_INET, socket.AF_INET6):
                        found.add(_Connection(descriptor, *_ends(same)))
    return found


def _is_socket(descriptor: int) -> bool:
    try:
        return str(Path(f"/dev/fd/{descriptor}").readlink()).startswith("socket:")
    except OSError:  # outside of Linux it is no link. On Linux, fstat would wait for a disk that hangs
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


def _is_open(connection: _Connection) -> bool:
    """Needs no further descriptor, of which there may be none left."""
    try:
        same = socket.socket(fileno=connection.descriptor)
    except OSError:
        return False
    try:
        return _ends(same) == (connection.here, connection.there)
    except OSError:
        return False
    finally:
        same.detach()


def _ends(connection: socket.socket) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Host and port of this end and of the other. Raises OSError where it is not connected."""
    return connection.getsockname()[:2], connection.getpeername()[:2]
