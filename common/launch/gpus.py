"""How many GPUs this node has for the job, found without importing torch."""

from collections.abc import Mapping
from pathlib import Path

from common.errors import UserError
from common.launch.options import LayoutFlags
from common.launch.reading import count


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many CUDA devices a process here would see: those that NVIDIA's driver lists under /proc, without those
    that CUDA_VISIBLE_DEVICES hides."""
    present = _driver_gpus()
    named = _cuda_visible_devices(environ)
    return present if named is None else min(present, len(named))


def _driver_gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def _cuda_visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return names[: names.index("-1")] if "-1" in names else [name for name in names if name]


def places_here(flags: LayoutFlags, environ: Mapping[str, str]) -> int:
    """How many processes to start on this machine: one for each GPU, or one on its CPU."""
    return 1 if flags.device == "cpu" else max(1, visible_gpus(environ))


def has_one_device_of_its_own(flags: LayoutFlags, environ: Mapping[str, str], local_world_size: int) -> bool:
    """True where each task sees one GPU of its own (`srun --gpus-per-task=1`). Its index is then 0, not the local rank.

    If two tasks see the same GPU, the join reports it.
    """
    named = _cuda_visible_devices(environ)
    one_named = named is not None and len(named) == 1 and visible_gpus(environ) == 1
    return one_named and local_world_size > 1 and flags.device != "cpu" and not flags.oversubscribe


def devices_for(flags: LayoutFlags, environ: Mapping[str, str], wanted: int, asked_by: str) -> tuple[str, int]:
    """The device type of this node's workers and how many devices they have, checked against `wanted`."""
    present = visible_gpus(environ)
    if flags.device == "cpu" or (flags.device == "auto" and present == 0):
        return "cpu", 0
    if present == 0:
        raise UserError("--device is cuda, but this node has no visible GPU: use --device cpu, or see `nvidia-smi`")
    if wanted > present and not flags.oversubscribe:
        limit = environ.get("CUDA_VISIBLE_DEVICES")
        reason = f" (CUDA_VISIBLE_DEVICES={limit})" if limit is not None else ""
        raise UserError(
            f"{asked_by} asks for {count(wanted, 'GPU')}, but this node has {present}{reason}: "
            f"ask for at most {present}, or share them with --oversubscribe, or use --device cpu"
        )
    return "cuda", present
