"""Where a number was measured: machine, versions, commit. Printed under every table."""

import os
import platform
from pathlib import Path

from common.version import git_commit


def describe() -> str:
    """One line, such as 'AMD EPYC, 2 cores, 24 GiB; Python 3.11.7, torch 2.15.0; commit 0123456789ab'."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python, load = platform.python_version(), os.getloadavg()[0]
    return (
        f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB (load {load:.1f} at the end); "
        f"Python {python}, torch {torch.__version__}; commit {git_commit()}"
    )
