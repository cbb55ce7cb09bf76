"""Reading flags and environment variables: what was given, whole numbers, sets of variables that belong together."""

from collections.abc import Mapping

from common.errors import UserError
from common.launch.options import LayoutFlags

NODE_FLAGS = {"nodes": "-n/--nodes", "gpus": "-g/--gpus", "node_rank": "-i/--node-rank"}
HETSEQ_FLAGS = {
    "distributed_init_method": "--distributed-init-method",
    "distributed_world_size": "--distributed-world-size",
    "distributed_gpus": "--distributed-gpus",
    "distributed_rank": "--distributed-rank",
    "device_id": "--device-id",
    "distributed_no_spawn": "--distributed-no-spawn",
}


def typed(flags: LayoutFlags, names: Mapping[str, str]) -> list[str]:
    """Which of these flags are given, as a person would type them: '--distributed-rank 3'."""
    words = []
    for name, flag in names.items():
        value = getattr(flags, name)
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return words


def refuse_half_set(environ: Mapping[str, str], needed: tuple[str, ...], like: str, asked_by: str = "") -> None:
    """Raise UserError unless all the variables `needed` are set; `like` names a program that sets them together."""
    missing = [variable for variable in needed if not environ.get(variable)]
    if not missing:
        return
    found = [f"{variable}={environ[variable]}" for variable in needed if environ.get(variable)]
    present = " and ".join(filter(None, [asked_by, ", ".join(found)])) or needed[0]
    raise UserError(
        f"{present} is set, but {', '.join(missing)} is not: set all of {', '.join(needed)}, as {like} does, or none"
    )


def number(environ: Mapping[str, str], name: str, default: int | None = None, minimum: int = 0) -> int:
    """The whole number in this variable, or `default` where it is not set. Raises UserError for anything else."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise UserError(f"{name} is {text!r} in the environment, but must be a whole number") from None
    if value < minimum:
        raise UserError(f"{name} is {value} in the environment: it must be {minimum} or more")
    return value


def count(number: int, noun: str) -> str:
    """1, "GPU" -> "1 GPU"; 2, "GPU" -> "2 GPUs"."""
    return f"{number} {noun}{'s' * (number != 1)}"
