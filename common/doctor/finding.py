"""A finding: something that a person should know, where it is, and how to fix it."""

from dataclasses import asdict, dataclass

from common.errors import ExplainedError


@dataclass(frozen=True)
class Finding:
    level: str  # "error": training would break; "warning": it may be slow or disturbed
    where: str
    problem: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def from_error(where: str, error: BaseException) -> Finding:
    """The finding for an exception. Messages of an ExplainedError end in ": how to fix it"."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, ExplainedError):
        return Finding("error", where, text.splitlines()[0], "see the message; it comes from torch or the driver")
    problem, found, fix = text.rpartition(": ")
    return Finding("error", where, problem, fix) if found else Finding("error", where, text, "see the message")
