"""A finding: something that a person should know, where it is, and how to fix it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from common.errors import ExplainedError

Facts = ParamSpec("Facts")


@dataclass(frozen=True)
class Finding:
    level: str  # "error": training would break; "warning": it may be slow or disturbed
    where: str
    problem: str
    fix: str


def listed(rule: Callable[Facts, Iterator[Finding]]) -> Callable[Facts, list[Finding]]:
    """A rule that yields its findings, as a function that returns them."""
    return wraps(rule)(lambda *args, **kwargs: list(rule(*args, **kwargs)))


def from_error(where: str, error: BaseException) -> Finding:
    """The finding for an exception. Messages of an ExplainedError end in ": how to fix it"."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, ExplainedError):
        return Finding("error", where, text.splitlines()[0], "see the message; it comes from torch or the driver")
    problem, found, fix = text.rpartition(": ")
    return Finding("error", where, problem, fix) if found else Finding("error", where, text, "see the message")
