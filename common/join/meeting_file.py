"""Checks of the file of `file://`, where the ranks of a job meet instead of at an address."""

import os
from pathlib import Path

from common.errors import UserError

# File systems that only one machine can see. A network file system, or an unknown one, may be shared.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
FIRST_KEYS = (b"refcount/", b"cleanup/", b"/")  # of torch's FileStore: length (4 bytes), key, length, value, ...
LONGEST_KEY = 1 << 16  # in bytes; the first four bytes of a text are a much larger number


def check(url: str) -> Path:
    """The path of file:///PATH. Raises UserError unless a file can be created there, or torch's FileStore wrote it."""
    path = Path(url.removeprefix("file://"))
    says = f"--distributed-init-method is {url}"
    if not path.parent.is_dir():
        raise UserError(
            f"{says}, but there is no folder {path.parent} here: make it, shared by all nodes, or use tcp://HOST:PORT"
        )
    if path.is_dir():
        raise UserError(f"{says}, which is a folder: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{says}, which this user may not write: choose another folder that all nodes share")
    if path.exists() and not _is_store(path):
        raise UserError(f"{says}, which exists and is something else: name a file that does not exist yet")
    return path


def _is_store(path: Path) -> bool:
    """The first key may be incomplete, because another rank may be writing it at this moment."""
    with path.open("rb") as file:
        beginning = file.read(32)
    length = int.from_bytes(beginning[:4], "little")
    key = beginning[4 : 4 + length]
    begins_a_key = any(key[: len(first)] == first[: len(key)] for first in FIRST_KEYS)
    return not beginning or (len(beginning) >= 4 and length < LONGEST_KEY and begins_a_key)


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
