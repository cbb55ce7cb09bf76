"""The parser of all programs: a mistake is answered in one line, which names our flag for one of another program."""

import argparse
import difflib
import re
from typing import NoReturn

SHORTEST = 3  # letters of a flag that may be a part of one of ours
MOST_HINTS = 3  # flags that are named for one
UNKNOWN = "unrecognized arguments: "
# flags of torchrun, transformers, Lightning and many a script, as `_bare` gives them -> what does the same here
ELSEWHERE = {
    "batch": "--global-batch, over all ranks, or --batch-per-gpu",
    "batchsize": "--global-batch, over all ranks, or --batch-per-gpu",
    "perdevicetrainbatchsize": "--batch-per-gpu",
    "perdeviceevalbatchsize": "--eval-batch",
    "gradientaccumulationsteps": "--micro-batch, the most samples in one forward; the global batch stays",
    "learningrate": "--lr",
    "numepochs": "--epochs",
    "maxepochs": "--epochs",
    "numtrainepochs": "--epochs",
    "nnodes": "-n/--nodes",
    "numnodes": "-n/--nodes",
    "nprocpernode": "-g/--gpus, one number for each node",
    "numgpus": "-g/--gpus, one number for each node",
    "devices": "-g/--gpus, one number for each node",
    "maxgradnorm": "--clip-norm",
    "gradientclipval": "--clip-norm",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "amp": "--precision bf16",
    "outputdir": "--out-dir",
    "savedir": "--out-dir",
    "datapath": "--data-dir",
    "resumefromcheckpoint": "--resume",
    "savesteps": "--save-every",
    "savetotallimit": "--keep",
    "loggingsteps": "--log-every",
    "nocuda": "--device cpu",
    "cpu": "--device cpu",
}


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and shows a flag's default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_silent = action.default is None or action.default is False or action.default == argparse.SUPPRESS
        return action.help if is_silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Abbreviations are off: `--step` is an error, and not `--max-steps`."""

    def __init__(self, description: str | None = None, prog: str | None = None, add_help: bool = True):
        super().__init__(
            prog, description=description, add_help=add_help, formatter_class=Formatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """End with exit code 2. argparse would print the usage first, of which there are twenty lines."""
        words = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else []
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        hints = [f"for {flag} {hint}" for flag in flags if (hint := self._hint(flag))]
        self.exit(2, f"{self.prog}: error: {': '.join(filter(None, (message, '; '.join(hints))))}; see --help\n")

    def _hint(self, unknown: str) -> str:
        """What to write in place of a flag that this parser does not know; empty where nothing is like it."""
        ours = {_bare(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
        bare = _bare(unknown)
        if not bare.startswith("outer"):  # nobody means those of --sync-every by --momentum
            ours = {name: flag for name, flag in ours.items() if not name.startswith("outer")}
        if unknown in self._option_string_actions:  # what follows "--" are values
            return ""
        elsewhere = ELSEWHERE.get(bare, "")
        if elsewhere and set(re.findall("--[a-z-]+", elsewhere)) <= {*ours.values()}:
            return f"write {elsewhere}"
        parts = [flag for flag in ours if len(bare) >= SHORTEST and bare in flag]
        like = [bare] if bare in ours else parts or difflib.get_close_matches(bare, ours, n=1, cutoff=0.75)
        return f"write {' or '.join(ours[flag] for flag in like)}" if 0 < len(like) <= MOST_HINTS else ""


def _bare(flag: str) -> str:
    """--Num_Epochs -> numepochs"""
    return flag.lower().replace("-", "").replace("_", "")
