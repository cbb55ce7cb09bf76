"""Where Python's fork servers, and the queues of a DataLoader's processes, put their sockets."""

import tempfile
from multiprocessing import util

from common.errors import UserError

MOST_CHARACTERS = 75  # of the folder: a socket's path has at most 107, of which Python's own names take 32
SHORT = "/tmp"


def keep_paths_short() -> None:
    """Let this process and those that it starts put their sockets into /tmp where TMPDIR is too long for them, as the
    folder of a job on a cluster may be. Raises UserError where /tmp cannot be written."""
    try:
        folder = tempfile.gettempdir()
    except OSError:  # no folder can be written: what needs one says so
        return
    if len(folder.encode()) <= MOST_CHARACTERS:
        return
    tempfile.tempdir = SHORT
    try:
        util.get_temp_dir()  # which Python remembers, and hands to its children
    except OSError as error:
        why = f"which is too long for sockets, and {SHORT} cannot be written ({error.strerror})"
        raise UserError(f"TMPDIR is {folder}, {why}: give a folder of at most {MOST_CHARACTERS} characters") from None
    finally:
        tempfile.tempdir = folder
