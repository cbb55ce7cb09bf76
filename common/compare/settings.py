"""What was different from the start: seed, data, flags, layout, versions and commit of two runs."""

from typing import Any

from common.compare.run import Run
from common.launch import cli

# may change in a resumed run, and change the last digits
NUMERIC = {"micro_batch", "precision", "compile", "backend", "device"}
NOT_SHOWN = (cli.MAY_DIFFER | cli.MAY_CHANGE) - NUMERIC


def unequal(a: Run, b: Run, step: int) -> dict[str, tuple[str, str]]:
    """Name -> (A's value, B's value) of all that differs at this step and is in the files of both runs."""
    first, second = a.start_at(step), b.start_at(step)
    if not first or not second:
        return {}
    pairs: dict[str, tuple[Any, Any]] = {}
    if a.state and b.state:
        pairs["data fingerprint"] = (a.state.get("data"), b.state.get("data"))
    for name in sorted(first["facts"].keys() | second["facts"].keys()):
        pairs[name] = (first["facts"].get(name), second["facts"].get(name))
    for name in sorted((first["flags"].keys() | second["flags"].keys()) - NOT_SHOWN):
        pairs[f"--{name.replace('_', '-')}"] = (first["flags"].get(name), second["flags"].get(name))
    pairs["global batch"] = (sum(first["shares"]), sum(second["shares"]))
    pairs["shares"] = (first["shares"], second["shares"])
    pairs["layout"] = (first["layout"]["source"], second["layout"]["source"])
    for name in first["versions"]:
        pairs[name] = (first["versions"][name], second["versions"].get(name))
    pairs["commit"] = (first["commit"], second["commit"])
    return {name: (cli.shown(mine), cli.shown(other)) for name, (mine, other) in pairs.items() if mine != other}


def decides(name: str, a: Run, b: Run) -> bool:
    """Do two runs with another value of this optimise something else? Paths, for example, do not, if the data agree.

    A checkpoint holds the flags that must stay the same when a run is resumed, which are those that decide.
    """
    flag = name.removeprefix("--").replace("-", "_")
    return name in ("data fingerprint", "global batch") or (name.startswith("--") and flag in a.state.keys() | b.state)
