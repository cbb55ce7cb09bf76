"""One line on the terminal, tagged with the rank that prints it. Everything that prints goes through `say`."""

import contextlib
import os
import socket
import sys


def say(text: str, rank: int | None = None, error: bool = False) -> None:
    """Print `text`, each line tagged: `[0]` for rank 0, `[3 nodeb]` for another rank, no tag without a rank.

    All lines go out in one write, so that the output of several processes does not mix. `error` prints to stderr.
    A character that the terminal does not know goes out as its number, such as `\\xe4`.
    """
    tag = "[0] " if rank == 0 else f"[{rank} {socket.gethostname()}] " if rank else ""
    stream = sys.stderr if error else sys.stdout
    lines = "".join(f"{tag}{line}\n" for line in text.splitlines())
    # What the terminal cannot take must not end the training: a closed pipe on its side, or no terminal at all.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = stream.encoding or "utf-8"
        stream.flush()
        stream.write(lines.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def flush() -> None:
    """Write out what is buffered. Where the reader of a stream has gone, discard it, so that the exit does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, AttributeError, RuntimeError):  # closed, never there, or a signal came within a `say`
            pass
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
