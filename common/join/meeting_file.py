"""The file of `file://`, where the ranks of a job meet instead of at an address that is known before.

Rank 0 serves the store at a port that its system chooses, and writes into the file where. The others read it. The file
is there only while the ranks join: one that a run which died has left names a store that is gone, and rank 0 writes it
anew. (torch's FileStore keeps every value in the file: a rank that dies while it writes one leaves half of it
there, and whoever reads on waits for the other half without end.)
"""

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.launch.cli import JOIN_TIMEOUT_SECONDS
from common.launch.layout import Layout

# File systems that only one machine can see. A network file system, or an unknown one, may be shared.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
MOST_BYTES = 1000
LOCAL_DISK_SECONDS = 6.0  # the join timeout for a file that other machines cannot see


@dataclass(frozen=True)
class Place:
    """Where rank 0 serves the store of a run."""

    host: str  # an address of its machine
    port: int
    key: str  # that this run's store has, and no other one: a later run's may listen at the same port


def check(url: str) -> Path:
    """The path of file:///PATH. Raises UserError unless a file can be created there, or a run has left one."""
    path = Path(url.removeprefix("file://"))
    says = f"--distributed-init-method is {url}"
    if not path.parent.is_dir():
        raise UserError(
            f"{says}, but there is no folder {path.parent} here: make it, shared by all nodes, or use tcp://HOST:PORT"
        )
    if path.is_dir():
        raise UserError(f"{says}, which is a folder: name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{says}, which this user may not write: choose another folder that all nodes share")
    if path.is_symlink() and not path.exists():
        raise UserError(f"{says}, which is a link to a file that is not there: name the file itself")
    if path.is_fifo() or (_content(path) and not read(path)):
        raise UserError(f"{says}, which exists and is something else: name a file that does not exist yet")
    return path


def read(path: Path) -> Place | None:
    """What rank 0 has written, if it has."""
    # The folder is opened because a client of NFS that has found no file asks the server again only then.
    os.scandir(path.parent).close()
    written = re.fullmatch(r"Uneven DDP: rank 0 listens at (\S+) (\d{1,5}) (\w+)\n", _content(path), re.ASCII)
    return Place(written[1], int(written[2]), written[3]) if written else None


def write(path: Path, place: Place, instead_of: Place | None = None) -> bool:
    """Write the place, unless another process has written one after this one has read `instead_of`. Returns whether it
    has. Nobody ever sees half a file. Raises UserError where none can be written."""
    private = path.with_name(f".{path.name}.{place.key}")
    try:
        if read(path) != instead_of:
            return False
        if path.exists():  # a run that died has left it
            path.rename(private)
            if read(private) != instead_of:  # no, another process has just written it
                os.link(private, path)
                return False
        private.write_text(f"Uneven DDP: rank 0 listens at {place.host} {place.port} {place.key}\n")
        os.link(private, path)
        return True
    except (FileExistsError, FileNotFoundError):  # another process was faster
        return False
    except OSError as error:
        raise UserError(
            f"--distributed-init-method is file://{path}, which cannot be written ({error.strerror}): choose another "
            "folder that all nodes share"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            private.unlink()


def remove(path: Path, place: Place) -> None:
    """Unless another run has written its own."""
    with contextlib.suppress(OSError):
        if read(path) == place:
            path.unlink()


def _content(path: Path) -> str:
    """Empty where there is no file, or none any more."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def advice_for_local_disk(layout: Layout) -> str:
    """How to fix a file:// on a disk that only this machine sees; empty for any other address."""
    url = layout.init_method
    kind = local_file_system(Path(url.removeprefix("file://"))) if layout.meets_at_file else None
    if not kind or layout.nodes == 1:
        return ""
    return (
        f"{url} is on a disk of {socket.gethostname()} alone ({kind}), which no other machine can see: name a file in "
        "a folder that all nodes share, or use tcp://HOST:PORT (or raise --join-timeout, if all are on this machine)"
    )


def patience_seconds(layout: Layout, join_timeout_seconds: float) -> float:
    """How long to wait for the other ranks: a short time where they may not see this file, unless the user said how
    long."""
    shorter = join_timeout_seconds == JOIN_TIMEOUT_SECONDS and advice_for_local_disk(layout)
    return LOCAL_DISK_SECONDS if shorter else join_timeout_seconds


def local_file_system(path: Path) -> str | None:
    """The type of the file system that holds `path`, such as ext4, if only this machine can see it; else None."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    folder = path.parent.resolve()
    holding = [(len(mount[1]), mount[2]) for mount in mounts if folder.is_relative_to(_unescaped(mount[1]))]
    longest = max((length for length, _ in holding), default=0)
    kinds = [kind for length, kind in holding if length == longest]  # the one mounted last is the one in use
    return kinds[-1] if kinds and kinds[-1] in LOCAL else None


def _unescaped(mount_point: str) -> str:
    """/proc writes a space in a name as \\040."""
    return mount_point.encode().decode("unicode_escape")
