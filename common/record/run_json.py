"""run.json: how a run was started, each time: command, versions, commit, layout, flags."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.launch.cli import plain
from common.launch.layout import Layout
from common.version import git_commit, versions


def add_start(
    folder: Path,
    layout: Layout,
    views: Sequence[dict],
    shares: Sequence[int],
    flags: Mapping[str, Any],
    facts: Mapping[str, object],
    first_step: int,
) -> None:
    """Add this start to `folder/run.json`. Raises OSError."""
    path, starts = folder / "run.json", []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # not what a run has written
        starts = list(json.loads(path.read_text())["starts"])
    start = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "directory": str(Path.cwd()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "first_step": first_step,
        "seed": flags.get("seed"),
        "layout": {"source": layout.source, "world_size": layout.world_size},
        "shares": shares,
        "ranks": [{name: view[name] for name in ("rank", "host", "pid", "device")} for view in views],
        "versions": versions(),
        "commit": git_commit(),
        "facts": {name: str(value) for name, value in facts.items()},
        "flags": flags,
    }
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(plain({"starts": [*starts, start]}), indent=1, allow_nan=False))
    aside.replace(path)
