"""The errors that a person can mend: one line, no traceback, an exit code of its own."""

from collections.abc import Callable


class UserError(ValueError):
    """A mistake in a flag, a file or the environment: ends the program with one line and exit code 2.

    The message names the flag or file, its value, what is allowed and how to mend it. With
    `same_on_every_rank` all ranks raise it together, and only the first of each node says it.
    """

    exit_code = 2

    def __init__(self, message: str, same_on_every_rank: bool = False):
        super().__init__(message)
        self.same_on_every_rank = same_on_every_rank


class RunError(UserError):
    """Something outside went wrong (a node is missing, a disk is full, the loss is NaN): exit code 1."""

    exit_code = 1


def before_exit(error: BaseException, do: Callable[[], None]) -> None:
    """Have `do` run after an error has been said and before the process ends, such as a wait for the other ranks.

    Said first, because a launcher that sees another rank end may end this one during the wait.
    """
    error.before_exit = do
