"""docs/faults.md explains every message of a run that breaks."""

import ast
import re

from tests.harness import ROOT

ROOMS = ("common/join", "common/launch", "common/record", "common/uneven", "mnist_ddp")
ERRORS = {"RunError", "RankLost", "RunEnded", "Interrupted"}  # UserError names the flag and the fix by itself
NOT_OF_FAULTS = {
    "common/record/terminal.py",  # steps
    "common/record/wording.py",
}
NO_FAULTS = ("on node ", "done  ", "s of training", "files  ", "resuming from", "curves.png, metrics", "nothing to do")
LENGTH = 30


def literals(node: ast.expr) -> list[str]:
    """The fixed parts of a message."""
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def messages():
    """(where, the beginning of the longest fixed part) of each message that is written where it is given."""
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())) if name not in NOT_OF_FAULTS else ():
            if isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func).rpartition(".")[2]
                parts = literals(node.args[0]) if called in ERRORS | {"say"} else []
                parts = [part.removeprefix("error: ").strip(" :;,()") for part in parts]
                longest = max(parts, key=len, default="")
                if len(longest) > 8 and not any(text in part + " " for text in NO_FAULTS for part in parts):
                    yield f"{name}:{node.lineno}", longest[:LENGTH]


def words(text: str) -> str:
    return re.sub(r"[\d.]+", "#", re.sub(r"\s+", " ", text))


def test_every_message_of_a_run_that_breaks_is_explained():
    table = words((ROOT / "docs" / "faults.md").read_text().partition("## Messages")[2])
    found = list(messages())
    assert len(found) > 25
    missing = [f"{where}: {text}" for where, text in found if words(text) not in table]
    assert not missing, "\n".join(missing)
