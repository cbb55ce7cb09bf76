"""One line on the terminal, tagged with the rank that prints it. Everything that prints goes through `say`."""

import contextlib
import os
import socket
import sys


def say(text: str, rank: int | None = None, error: bool = False) -> None:
    """Print `text`, each line tagged: `[0]` for rank 0, `[3 nodeb]` for another rank, no tag without a rank.

    All lines go out in one write, so that the output of several processes does not mix. `error` prints to stderr.
    """
    if rank is None:
        tag = ""
    elif rank == 0:
        tag = "[0] "
    else:
        tag = f"[{rank} {socket.gethostname()}] "
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError):  # a closed pipe on the terminal's side must not end the training
        stream.flush()
        stream.write("".join(f"{tag}{line}\n" for line in text.splitlines()))
        stream.flush()


def flush() -> None:
    """Write out what is buffered. Where the reader of a stream has gone, discard it, so that the exit does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
