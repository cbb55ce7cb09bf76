"""Checkpoints that survive: written aside, synced, renamed; checked when read; good for any layout.

    checkpoints/step-00001200/model.safetensors      the weights, without pickle
                              training_state.pt      optimizer, scheduler, scaler; loaded with weights_only=True
                              state.json             step, seed, global batch, layout, fingerprints, checksums
    checkpoints/latest -> step-00001200              moved last

For a `transformers` model the directory is also what `from_pretrained` reads. Rank 0 saves;
on resume it reads and sends the state to the others.
"""

import contextlib
import hashlib
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import RunError, UserError
from common.process_group import Group
from common.report import say

FORMAT = 1
REPLACED = ".writing-old-"
WEIGHTS, TRAINING_STATE, STATE = "model.safetensors", "training_state.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk whose files have the checksums that its state.json gives."""

    path: Path
    state: dict[str, Any]

    def load_model(self, model: torch.nn.Module) -> None:
        """Fill `model` with the weights. Raises UserError where they are of another model."""
        weights = load_file(self.path / WEIGHTS)
        expected = model.state_dict()
        for name in expected.keys() & weights.keys():
            if weights[name].shape != expected[name].shape:
                raise _other_model(
                    self.path, f"{name} is {_size(weights[name])} there and {_size(expected[name])} here"
                )
        if missing := expected.keys() - weights.keys() - _tied(model):
            raise _other_model(self.path, f"it has no {sorted(missing)[0]}")
        if unknown := weights.keys() - expected.keys():
            raise _other_model(self.path, f"its {sorted(unknown)[0]} is unknown here")
        model.load_state_dict(weights, strict=False)

    def load_training(self, **parts: Any) -> None:
        """Fill the optimizer, scheduler and scaler that are named, each through its `load_state_dict`."""
        saved = torch.load(self.path / TRAINING_STATE, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            _fill(part, saved[name])

    def require(self, fields: dict[str, Any], prefix: str = "") -> None:
        """Raise UserError unless the checkpoint was written with these values, as far as it has noted them.

        `prefix` is "--" where their names are flags.
        """
        for name, here in fields.items():
            there = self.state.get(name, here)
            if there != here:
                label = prefix + name.replace("_", "-")
                raise UserError(
                    f"--resume {self.path}: it was written with {label} {there}, but this run has {here}: "
                    "resume with the same, or start anew with another --out-dir",
                    same_on_every_rank=True,
                )


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    state: dict[str, Any],
    keep: int | None = None,
    write_extra: Callable[[Path], None] | None = None,
    **parts: Any,
) -> Path:
    """Write `folder/step-XXXXXXXX` whole or not at all, point `latest` to it, and drop all but `keep`.

    `parts` are objects with a `state_dict`; `write_extra(path)` may add files, such as a model's config.
    Only rank 0 calls this. Raises RunError when the disk is full or not writable; what was there stays.
    """
    target = folder / f"step-{step:08d}"
    aside = folder / f".writing-{target.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        aside.mkdir()
        save_file(_weights_of(model), aside / WEIGHTS, metadata={"format": "pt"})
        torch.save({name: part.state_dict() for name, part in parts.items()}, aside / TRAINING_STATE)
        if write_extra:
            write_extra(aside)
        checksums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
        text = json.dumps({"format": FORMAT, "step": step, **state, "checksums": checksums}, indent=1)
        (aside / STATE).write_text(text)
        for path in [*aside.iterdir(), aside]:
            _sync(path)
        if target.exists():  # a resumed run that comes to the same step again
            target.rename(folder / f"{REPLACED}{target.name}")
        aside.rename(target)
        _sync(folder)
        _point_latest(folder, target.name)
        others = sorted((path for path in _by_step(folder) if path != target), key=lambda path: path.stat().st_mtime)
        for old in others[: max(0, len(others) + 1 - keep)] if keep else []:
            shutil.rmtree(old)
        _remove_leftovers(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError on a full disk
        free = _free_space(folder)  # before the part that was written is taken away
        shutil.rmtree(aside, ignore_errors=True)
        _bring_back_replaced(folder)
        raise RunError(
            f"could not write the checkpoint {target}: {error}; the earlier ones are whole. {free}"
        ) from error
    return target


def _free_space(folder: Path) -> str:
    try:
        return f"The disk had {shutil.disk_usage(folder).free / 1e6:.1f} MB left: make room, or lower --keep"
    except OSError as error:
        return f"The disk does not answer: {error.strerror}"


def resume(
    group: Group,
    args: Namespace,
    folder: Path | None,
    model: torch.nn.Module,
    identity: dict[str, Any],
    recipe: dict[str, Any],
    **parts: Any,
) -> int:
    """Bring every rank to the checkpoint that `--resume` asks for. Returns the optimizer steps done; 0 for none.

    Rank 0 reads, checks that the checkpoint is of the same data (`identity`) and goes on with the same flags
    (`recipe`, which an evaluation alone does not need), and sends everything to the other ranks, so the nodes need no
    shared disk. Collective; raises UserError on every rank.
    """
    if args.resume is None:
        return 0
    found = None
    with group.others_wait("rank 0, which reads the checkpoint"):
        if group.worker.is_main:
            found = _find_wanted(args.resume, folder, lambda text: say(group.worker, text))
            if found:
                found.require(identity)
                if not args.eval_only:
                    found.require(recipe, prefix="--")
                found.load_model(model)
                found.load_training(**parts)
                if not args.eval_only:
                    _go_back_to(found, folder / "checkpoints")
                say(group.worker, f"resuming from {found.path}")
    tree = {name: part.state_dict() for name, part in {"model": model, **parts}.items()} if found else None
    received = broadcast_tree({"step": found.state["step"], "parts": tree} if found else {"step": 0}, group.device)
    if received["step"] and not group.worker.is_main:
        for name, part in {"model": model, **parts}.items():
            _fill(part, received["parts"][name])
    return received["step"]


def _find_wanted(wanted: str, folder: Path, complain: Callable[[str], None]) -> Checkpoint | None:
    if wanted == "auto":
        return find(folder, complain)
    if not Path(wanted).is_dir():
        raise UserError(f"--resume {wanted}: there is no such directory: name a checkpoint, or a run's --out-dir")
    found = find(Path(wanted), complain)
    if found is None:
        raise UserError(f"--resume {wanted}: there is no checkpoint in it: name a checkpoint, or a run's --out-dir")
    return found


def broadcast_tree(tree: Any, device: torch.device) -> Any:
    """Rank 0's nested dicts, lists and tensors on every rank; tensors arrive on the CPU, one at a time. Collective."""
    tensors: list[torch.Tensor] = []

    def strip(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            tensors.append(node)
            return torch.empty_like(node, device="meta", memory_format=torch.contiguous_format)
        if isinstance(node, dict):
            return {key: strip(value) for key, value in node.items()}
        return [strip(value) for value in node] if isinstance(node, list | tuple) else node

    def fill(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            tensor = torch.empty_like(node, device=device)
            dist.broadcast(tensor, src=0)
            return tensor.cpu()
        if isinstance(node, dict):
            return {key: fill(value) for key, value in node.items()}
        return [fill(value) for value in node] if isinstance(node, list) else node

    skeleton = [strip(tree)]
    dist.broadcast_object_list(skeleton, src=0)
    if dist.get_rank() > 0:
        return fill(skeleton[0])
    for tensor in tensors:
        dist.broadcast(tensor.to(device).contiguous(), src=0)
    return tree


def find(path: Path, complain: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest whole checkpoint at `path`: one checkpoint, a folder of them, or a run's --out-dir.

    A damaged one is named through `complain` and passed over for the one before. None where there is none at
    all. Raises UserError where all are damaged, or the one that was named.
    """
    if (path / STATE).exists() or path.name.startswith("step-"):
        checkpoint, damage = _check(path.resolve())  # `latest` is a link
        if damage:
            raise UserError(f"--resume {path}: {damage}: name another checkpoint", same_on_every_rank=True)
        return checkpoint
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    _bring_back_replaced(folder)
    latest = _latest(folder)
    # newest first, but one beyond `latest` last: it is of a branch that was left when a run went back
    candidates = sorted(_by_step(folder), key=lambda path: (path.name <= latest, path.name), reverse=True)
    for candidate in candidates:
        checkpoint, damage = _check(candidate)
        if checkpoint:
            return checkpoint
        complain(f"checkpoint {candidate} is damaged ({damage}): passing it over for the one before")
    if candidates:
        raise UserError(f"--resume {path}: every checkpoint there is damaged: start anew with another --out-dir")
    return None


def _check(path: Path) -> tuple[Checkpoint | None, str]:
    try:
        state = json.loads((path / STATE).read_text())
        if state["format"] > FORMAT:
            return None, f"it has format {state['format']}, this code reads up to {FORMAT}"
        for name, checksum in state["checksums"].items():
            if _checksum(path / name) != checksum:
                return None, f"{name} is not what was written"
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{STATE} cannot be read: {error}"
    return Checkpoint(path, state), ""


def _fill(part: Any, state: dict[str, Any]) -> None:
    if state:  # the scaler of a run that was not in fp16 has none
        part.load_state_dict(state)


def _weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name not in _tied(model)
    }


def _tied(model: torch.nn.Module) -> set[str]:
    """Names that are second names of a tensor saved already: safetensors keeps each tensor once."""
    seen: set[int] = set()
    names = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():
            names.add(name)
        seen.add(tensor.data_ptr())
    return names


def _other_model(path: Path, what: str) -> UserError:
    return UserError(f"--resume {path}: its weights are of another model: {what}", same_on_every_rank=True)


def _size(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _by_step(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _bring_back_replaced(folder: Path) -> None:
    """A checkpoint that was moved aside for a new one of the same step, which then never came."""
    with contextlib.suppress(OSError):  # a folder that cannot be written is still good to read from
        for path in folder.glob(f"{REPLACED}*"):
            original = folder / path.name.removeprefix(REPLACED)
            if not original.exists():
                path.rename(original)


def _remove_leftovers(folder: Path) -> None:
    _bring_back_replaced(folder)
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def _point_latest(folder: Path, name: str) -> None:
    """A link, so that other programs can read `checkpoints/latest/`; a file with the name where there are no links."""
    link = folder / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name)
    except OSError:
        link.write_text(name)
    link.replace(folder / "latest")


def _go_back_to(found: Checkpoint, folder: Path) -> None:
    """What is newer in this run's own folder is left behind, also where this run is killed before its next save."""
    if found.path.parent.resolve() == folder.resolve() and found.path.name != _latest(folder):
        try:
            _point_latest(folder, found.path.name)
        except OSError as error:
            raise UserError(
                f"--resume: {folder} cannot be written: {error.strerror}", same_on_every_rank=True
            ) from None


def _latest(folder: Path) -> str:
    """The name of the checkpoint that `latest` points to, or an empty string."""
    link = folder / "latest"
    if link.is_symlink():
        return link.readlink().name
    return link.read_text() if link.is_file() else ""


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync(path: Path) -> None:
    """Push a file or a folder's entries to the disk, so that a power cut cannot leave a rename without its data."""
    if os.name == "nt":  # Windows syncs no directories, and no files that are open for reading alone
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
