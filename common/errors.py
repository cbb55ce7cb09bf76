"""Errors that a person can fix: printed in one line, without a traceback, with an exit code of their own."""

import traceback
from collections.abc import Callable
from typing import Any

LONGEST_MESSAGE = 2000  # characters; the middle of a longer one is left out


class ExplainedError(Exception):
    """An error whose message explains itself. Raise one of the two kinds below.

    With `same_on_every_rank` all ranks raise it together, and only the first worker of each node prints it.
    """

    exit_code = 1
    kind = "error"  # how the printed line begins

    def __init__(self, message: str, same_on_every_rank: bool = False):
        if len(message) > LONGEST_MESSAGE:  # it quotes a file that is one long line
            message = f"{message[: LONGEST_MESSAGE // 2]} [...] {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
        self.same_on_every_rank = same_on_every_rank


class UserError(ExplainedError):
    """A mistake in a flag, a file or the environment: exit code 2.

    The message names the flag or file, its value, what is allowed, and how to fix it.
    """

    exit_code = 2


class RunError(ExplainedError):
    """Something outside went wrong: a node is missing, a disk is full, the loss is NaN. Exit code 1."""

    exit_code = 1


class RankLost(RunError):
    """A rank has died, frozen or was cut off."""


class Interrupted(ExplainedError):
    """A signal has ended the run, after a checkpoint. Exit code 75, as EX_TEMPFAIL of sysexits.h: start it again."""

    exit_code = 75
    kind = "interrupted"


class RunEnded(ExplainedError):
    """The run is over, and this process, which waited to be let in, has nothing to do. Exit code 0."""

    exit_code = 0
    kind = "ended"


class Left(ExplainedError):
    """A signal has taken this node out of the run, which goes on without it (--elastic). Exit code 0."""

    exit_code = 0
    kind = "left"


class GuardWarning(UserWarning):
    """What a guard finds odd, though it may be right. A worker prints it in one line; another script as any warning."""


class MembersChanged(Exception):
    """Ranks were lost or have come (--elastic): go on as `worker`, from the state of the optimisation in memory."""

    def __init__(self, worker: Any):
        super().__init__("the members of the run have changed")
        self.worker = worker


def in_one_line(error: BaseException) -> str:
    """An error as it is printed where it explains itself; of another one, what its traceback ends with."""
    if not isinstance(error, ExplainedError):
        return "".join(traceback.format_exception_only(error)).splitlines()[0]
    return f"{error.kind}: {own_words(error)}"


def own_words(error: BaseException) -> str:
    """The message of an error; without the traceback that torch adds to one of a loader's process."""
    text = str(error).strip()
    return text.splitlines()[-1].partition(": ")[2] if text.startswith("Caught ") else text


def before_exit(error: BaseException, action: Callable[[], None]) -> None:
    """Run `action` after `error` has been printed and before the process ends, such as a wait for the other ranks.

    The error is printed first because a launcher that sees another rank end may kill this one while it waits.
    """
    error.before_exit = action  # type: ignore[attr-defined]


def is_known_to_all(error: ExplainedError) -> bool:
    """True where the run ends with this error. False for one that only this rank has met."""
    return error.same_on_every_rank or isinstance(error, RunEnded) or hasattr(error, "before_exit")
