"""Checkpoints: written to a temporary folder, synced and renamed; verified when read; usable on any layout.

    checkpoints/step-00001200/model.safetensors      the weights, without pickle
                              training_state.pt      optimizer, scheduler, scaler; loaded with weights_only=True
                              state.json             step, seed, global batch, layout, fingerprints, checksums
    checkpoints/latest -> step-00001200              moved last

For a `transformers` model the directory is also what `from_pretrained` reads. Rank 0 alone saves and reads; see
resume.py for the other ranks.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch.serialization import get_unsafe_globals_in_checkpoint

from common.console import say
from common.errors import RunError, UserError
from common.files import refuse_stand_in
from common.launch.cli import plain
from common.record.background import BackgroundWriter
from common.record.latest import STATE, WEIGHTS, by_step, is_copy, latest_name
from common.state import Stateful, copied, fill, not_finite, not_floating

FORMAT = 1
REPLACED = ".writing-old-"
TRAINING_STATE = "training_state.pt"
NAME = re.compile(r"step-\d{8,}")
OTHER_MODEL = "its weights belong to another model"
WriteExtra = Callable[[Path], None]  # adds files to the folder of a checkpoint, such as a model's config


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk whose files have the checksums that its state.json gives."""

    path: Path
    state: dict[str, Any]

    def load_model(self, model: torch.nn.Module) -> None:
        """Fill `model` with the weights. Raises UserError if they belong to another model, or are not finite."""
        try:
            trained = {name for name, one in model.named_parameters() if one.is_floating_point()}
            for name, kind in sorted(not_floating(self.path / WEIGHTS).items()):
                if name in trained:
                    raise self._refusal(f"its {name} is of type {kind}, which loses the digits of weights")
            missing, unknown = load_model(model, self.path / WEIGHTS, strict=False)
        except RuntimeError as error:  # a size differs; torch says which in its last line
            raise self._refusal(f"{OTHER_MODEL}: {_last_line(error)}") from None
        except (SafetensorError, OSError) as error:
            raise self._refusal(f"{WEIGHTS} cannot be read: {_last_line(error)}") from None
        if missing:
            raise self._refusal(f"{OTHER_MODEL}: it has no {sorted(missing)[0]}")
        if unknown:
            raise self._refusal(f"{OTHER_MODEL}: its {sorted(unknown)[0]} is unknown here")
        if name := not_finite(model):
            raise self._refusal(f"its {name} holds NaN or infinity: the run had failed by then: name an earlier one")

    def load_training(self, may_have_more: bool = False, **parts: Stateful) -> None:
        """Fill all parts. Raises UserError unless they are those that were saved, and each takes its state; with
        `may_have_more`, the checkpoint may have others too. Raises it too for a file that holds more than tensors,
        numbers, text, lists and dicts: torch never runs what such a file asks for."""
        try:
            saved = torch.load(self.path / TRAINING_STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's own words advise to run what is in the file
            what = f"{TRAINING_STATE} cannot be read ({type(error).__name__}), or is not from a training run"
            raise self._refusal(f"{what}: copy the checkpoint again, or name another one") from None
        if not isinstance(saved, dict):
            raise self._refusal(f"{TRAINING_STATE} holds no parts of a run: name another checkpoint")
        new_run = "or start a new run with another --out-dir"
        for name in sorted(parts.keys() - saved.keys()):
            raise self._refusal(f"it was saved without the part {name}: resume without that part too, {new_run}")
        for name in sorted(saved.keys() - parts.keys()) if not may_have_more else ():
            known = f"it was saved with the part {name}, which this run lacks"
            raise self._refusal(f"{known}: give that part to resume() again, {new_run}")
        for name, part in parts.items():
            try:
                fill(part, saved[name])
                for group in part.param_groups if isinstance(part, torch.optim.Optimizer) else ():
                    if not group["lr"] >= 0:
                        raise ValueError(f"a learning rate of {group['lr']}")
                if isinstance(part, torch.optim.Optimizer):
                    _require_possible_moments(part)
            except Exception as error:  # the state may hold anything
                problem = f"the part {name} does not take the state that was saved ({_last_line(error)})"
                raise self._refusal(f"{problem}: make that part as in the run that saved it, {new_run}") from None

    def require(self, fields: dict[str, Any], prefix: str = "") -> None:
        """Raise UserError if the checkpoint has another value of a field. A field that it lacks is not compared.

        `prefix` is "--" where the fields are flags.
        """
        for name, value in fields.items():
            here, there = plain(value), plain(self.state.get(name, value))  # earlier versions wrote inf as a number
            if there != here:
                label, was, now = prefix + name.replace("_", "-"), str(there) or "''", str(here) or "''"
                raise self._refusal(
                    f"it was written with {label} {was}, but this run has {now}: resume with the same, or start a new "
                    "run with another --out-dir"
                )

    def _refusal(self, why: str) -> UserError:
        return UserError(f"--resume {self.path}: {why}", same_on_every_rank=True)


def _require_possible_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a state that no step can have left, with which the next loss would be no number."""
    for one in optimizer.state.values():
        for name, value in one.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                if not value.isfinite().all():
                    raise ValueError(f"{name} holds NaN or infinity")
                if name == "exp_avg_sq" and (value < 0).any():
                    raise ValueError(f"{name} holds negative numbers")


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    state: dict[str, Any],
    keep: int | None = None,
    write_extra: WriteExtra | None = None,
    writer: BackgroundWriter | None = None,
    **parts: Stateful,
) -> Path:
    """Write `folder/step-XXXXXXXX` completely or not at all, point `latest` to it, and remove all but `keep`.

    `parts` are what `resume` fills again, by the same names (see common/state.py). Only rank 0 calls this. Raises
    RunError when the disk is full or not writable, UserError for a part whose state could not be read back; earlier
    checkpoints stay. With a `writer` this copies the state to memory and returns, while the writer writes it; errors
    are the writer's.
    """
    target, fields = folder / f"step-{step:08d}", {"format": FORMAT, "step": step, **state}
    states = {name: part.state_dict() for name, part in parts.items()}
    if writer:
        weights, states = copied(model.state_dict()), copied(states)
        frozen = SimpleNamespace(state_dict=lambda: dict(weights))
        writer.start(lambda: _write(target, frozen, states, fields, keep, write_extra))
    else:
        _write(target, model, states, fields, keep, write_extra)
    return target


def _write(
    target: Path, model: Any, states: dict[str, Any], fields: dict[str, Any], keep: int | None, extra: WriteExtra | None
) -> None:
    folder = target.parent
    aside = folder / f".writing-{target.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        aside.mkdir()
        save_model(model, str(aside / WEIGHTS), metadata={"format": "pt"})
        torch.save(states, aside / TRAINING_STATE)
        _require_readable(aside / TRAINING_STATE, states)
        if extra:
            extra(aside)
        checksums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
        (aside / STATE).write_text(json.dumps(plain({**fields, "checksums": checksums}), indent=1, allow_nan=False))
        for path in aside.iterdir():  # safetensors writes for the owner only; state.json follows the umask
            if path.stat().st_mode != (aside / STATE).stat().st_mode:
                shutil.copymode(aside / STATE, path)
        for path in [*aside.iterdir(), aside]:
            _sync(path)
        if target.exists():  # a resumed run that reaches the same step again
            target.rename(folder / f"{REPLACED}{target.name}")
        aside.rename(target)
        _sync(folder)
        point_latest(folder, target.name)
        others = sorted((path for path in by_step(folder) if path != target), key=lambda path: path.stat().st_mtime)
        for old in others[: max(0, len(others) + 1 - keep)] if keep else []:
            shutil.rmtree(old)
        _remove_leftovers(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError on a full disk
        free = _free_space(folder)  # before the unfinished checkpoint is removed
        shutil.rmtree(aside, ignore_errors=True)
        _bring_back_replaced(folder)
        raise RunError(
            f"could not write the checkpoint {target}: {error}; the earlier ones are intact. {free}"
        ) from error
    except UserError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _require_readable(file: Path, states: dict[str, Any]) -> None:
    """Raise UserError where a state holds what `load_training` would refuse to read."""
    if unsafe := get_unsafe_globals_in_checkpoint(file):
        raise UserError(
            f"one of the parts {', '.join(states)} has a state with a {sorted(unsafe)[0]} in it, which cannot be read "
            "back from a checkpoint: its state_dict() may hold tensors, numbers, text, lists, tuples and dicts"
        )


def _free_space(folder: Path) -> str:
    try:
        return f"The disk had {shutil.disk_usage(folder).free / 1e6:.1f} MB left: make room, or lower --keep"
    except OSError as error:
        return f"The disk does not answer: {error.strerror}"


def find(path: Path) -> Checkpoint | None:
    """The newest intact checkpoint at `path`: one checkpoint, a folder of them, or a run's --out-dir.

    A damaged one is reported and skipped. Returns None if there is no checkpoint. Raises UserError if all are damaged,
    or if `path` names a damaged one.
    """
    if (path / STATE).exists() or (NAME.fullmatch(path.name) and not (path / "checkpoints").is_dir()):
        checkpoint, damage = _check(path.resolve())  # `latest` is a link
        if damage:
            raise UserError(f"--resume {path}: {damage}: name another checkpoint", same_on_every_rank=True)
        return checkpoint
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    _bring_back_replaced(folder)
    latest = latest_name(folder)
    # Newest first, but those newer than `latest` last: a run that went back to an earlier checkpoint has left them.
    candidates = sorted(by_step(folder), key=lambda path: (path.name <= latest, path.name), reverse=True)
    if is_copy(folder / "latest"):  # a copy of that checkpoint, or all that was copied of it
        candidates.insert(int(latest in [path.name for path in candidates]), folder / "latest")
    for candidate in candidates:
        checkpoint, damage = _check(candidate)
        if checkpoint:
            return checkpoint
        say(f"checkpoint {candidate} is damaged ({damage}): using the one before", rank=0)
    if candidates:
        raise UserError(f"--resume {path}: every checkpoint there is damaged: start a new run with another --out-dir")
    return None


def _check(path: Path) -> tuple[Checkpoint | None, str]:
    try:
        _require_file(path / STATE)
        state = json.loads((path / STATE).read_text())
        if state["format"] > FORMAT:
            return None, f"it has format {state['format']}, this code reads up to {FORMAT}"
        if type(state["step"]) is not int or state["step"] < 0:
            return None, f"{STATE} gives no step"
        if NAME.fullmatch(path.name) and path.name != f"step-{state['step']:08d}":
            return None, f"{STATE} gives step {state['step']}"
        if WEIGHTS not in state["checksums"]:
            return None, f"{STATE} has no checksum of {WEIGHTS}"
        for name, checksum in state["checksums"].items():
            if Path(name).name != name:
                return None, f"{STATE} names a file of another folder"
            _require_file(path / name)
            refuse_stand_in(path / name, name)
            if _checksum(path / name) != checksum:
                return None, f"the checksum of {name} is wrong"
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except UserError as error:
        return None, str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, f"{STATE} cannot be read: {_last_line(error)}"
    return Checkpoint(path, state), ""


def _require_file(path: Path) -> None:
    """Raise UserError for a folder, a pipe or a device by the name of a checkpoint's file."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path.name} is no file")


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of a run; 0 where there is none."""
    with contextlib.suppress(UserError):
        found = find(folder)
        return found.state["step"] if found else 0
    return 0


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()


def _bring_back_replaced(folder: Path) -> None:
    """Restore a checkpoint that was moved aside for a new one of the same step that was never completed."""
    with contextlib.suppress(OSError):  # a folder that cannot be written is still good to read from
        for path in folder.glob(f"{REPLACED}*"):
            original = folder / path.name.removeprefix(REPLACED)
            if not original.exists():
                path.rename(original)


def _remove_leftovers(folder: Path) -> None:
    _bring_back_replaced(folder)
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".latest-*"):
        path.unlink(missing_ok=True)


def point_latest(folder: Path, name: str) -> None:
    """Make `latest` a link to the checkpoint `name`, or a file with this name in it where the system has no links."""
    link, latest = folder / f".latest-{os.getpid()}", folder / "latest"
    link.unlink(missing_ok=True)
    if is_copy(latest):  # what the link was before the run was copied: `cp -rL`, `scp -r`, object stores
        original = folder / (latest_name(folder) or "unknown")
        if _check(original)[0]:
            shutil.rmtree(latest)
        else:
            latest.rename(folder / f"copy-of-{original.name}" if original.exists() else original)
    try:
        link.symlink_to(name)
    except OSError:
        link.write_text(name)
    link.replace(latest)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync(path: Path) -> None:
    """Write a file's data or a folder's entries to the disk, so that a power cut cannot leave a rename without data."""
    if os.name == "nt":  # Windows cannot sync directories, nor files that are open for reading only
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
