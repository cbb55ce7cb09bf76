"""From flags and environment to this node's `Layout`.

Nothing here starts a process, opens a file or imports torch, so a wrong flag is answered in a tenth of a second.

    argv, environ -> LayoutFlags -> layout_from() -> Layout -> .workers() -> Worker

Each source is one function in a file of its own. It returns a Layout, or None when it does not apply, or raises
UserError when it applies but something is wrong.
"""

import os
from collections.abc import Mapping

from common.launch.hetseq import from_hetseq_flags
from common.launch.layout import Layout
from common.launch.mpi import from_mpich, from_openmpi
from common.launch.options import LayoutFlags
from common.launch.own_flags import from_join, from_node_flags, from_nothing
from common.launch.slurm import from_slurm
from common.launch.torchrun import from_torchrun

# Launchers, and the inner one before the outer one: torchrun or mpirun before the srun that has started it.
LAUNCHERS = (from_torchrun, from_openmpi, from_mpich, from_slurm)
SOURCES = (from_join, *LAUNCHERS, from_hetseq_flags, from_node_flags)


def layout_from(flags: LayoutFlags, environ: Mapping[str, str] = os.environ) -> Layout:
    """The layout of the first source that applies to flags and environment, or else all GPUs of this machine.

    Raises UserError before any process is started.
    """
    for source in SOURCES:
        layout = source(flags, environ)
        if layout is not None:
            return layout
    return from_nothing(flags, environ)
