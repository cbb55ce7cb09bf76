"""From a command line to running workers. A trainer's entry calls `main` and nothing else.

-n/-g/-i, HetSeq's flags, or no flags    this process starts a worker for each place here, and supervises them
one process in all, torchrun, srun, ...  this process is the worker; so it is where HetSeq's flags start one here
--join, --stop                           a run that is under way tells where its members are, and its flags
"""

import importlib
import importlib.util
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from common.errors import ExplainedError, UserError
from common.launch import cli, joining_flags, supervisor, worker
from common.launch.detect import layout_from
from common.launch.environment import check_environment
from common.launch.interruption import INTERRUPTED
from common.launch.layout import Layout
from common.sockets import keep_paths_short

OUTSIDE = "common.elastic.outside"  # imported by its name, as the trainer: it needs torch, which --help does not load


def main(parser: ArgumentParser, target: str, check: Callable[[Namespace, Layout], None] | None = None) -> NoReturn:
    """Parse the flags, find the layout, and run `target` on each worker of this node.

    `target` is written "module:function" and is called as `function(worker, args)`; the module is imported after the
    flags have been checked, so `--help` and wrong flags need no torch. `check(args, layout)` may refuse further
    combinations of flags with UserError.

    Never returns. Exit code 0: every worker ended well; 2: a user's mistake; another number: any other failure.
    """
    try:
        check_environment(os.environ)
        keep_paths_short()
        outside = joining_flags.flags_outside(parser)
        if outside and outside.stop:
            _require_torch()
            parser.exit(0, f"{importlib.import_module(OUTSIDE).stop(*joining_flags.run_to_find(outside))}\n")
        args, layout = _joining(parser, outside) if outside else _starting(parser, check)
        _require_torch()
    except ExplainedError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:  # while it looks for a run
        parser.exit(INTERRUPTED)
    workers = layout.workers()
    # A process among others has a supervisor, which can say why it has ended, and replaces it (--elastic).
    if (layout.spawn and layout.world_size > 1) or getattr(args, "elastic", None):
        sys.exit(supervisor.supervise(target, workers, args))
    worker.run(target, workers[0], args)


def _starting(parser: ArgumentParser, check: Callable[[Namespace, Layout], None] | None) -> tuple[Namespace, Layout]:
    args = parser.parse_args()
    layout = layout_from(cli.layout_flags(args))
    if check:
        check(args, layout)
    return args, layout


def _joining(parser: ArgumentParser, outside: Namespace) -> tuple[Namespace, Layout]:
    """The flags are those of the run, which it has checked, where none is typed here."""
    _require_torch()
    supervisor.expect_lost_processes()
    layout = layout_from(cli.layout_flags(outside))
    leader, run = importlib.import_module(OUTSIDE).find(*joining_flags.run_to_find(outside))
    place = replace(layout, leader=leader, run_size=run["size"], init_method=run["meets"])
    return joining_flags.flags_of_run(parser, run["flags"]), place


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{sys.executable} has no torch: install it, or use .venv/bin/python, which `make .venv` makes")
