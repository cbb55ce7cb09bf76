"""With --elastic, a run's files are kept on each node's own disk where the nodes share none: a disk may be lost too.

The first rank of such a node writes what rank 0 writes: checkpoints, metrics.jsonl, run.json and curves.png. It prints
nothing. Where rank 0 is lost, its successor goes on in its own files.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from common.console import say
from common.errors import UserError
from common.join.process_group import Group
from common.join.view import node_of, place

NO_COPIES = "no copies of the run's files here"
COPIED = ("metrics.jsonl", "run.json")


def ranks_with_copies(
    group: Group, generation: int, folder: Path, resume: str | None, newest_step: Callable[[Path], int]
) -> list[int]:
    """The first rank of each node that does not see rank 0's files in `folder`. `newest_step(folder)` is that of a
    folder's newest checkpoint, or 0. Every rank must call this.

    Raises UserError where a node's own disk holds another run, or a later checkpoint than rank 0's.
    """
    first_of_nodes = list({node_of(view): view["rank"] for view in reversed(group.views)}.values())
    probe = folder / f".disk-{generation}-{group.views[0]['nonce']}"
    mine = probe.with_name(f"{probe.name}-{group.worker.rank}")
    is_first, can_write = group.worker.rank in first_of_nodes, True
    if is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
        except OSError as error:
            can_write = False
            say(f"{folder} cannot be written ({error.strerror}): {NO_COPIES}", group.worker.rank)
    try:
        dist.barrier()
        seen = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        known: list = [None] * group.worker.world_size
        state = (sorted(seen), can_write, (folder / "metrics.jsonl").exists(), newest_step(folder) if is_first else 0)
        dist.all_gather_object(known, state)
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                mine.unlink()
    alone = [rank for rank in first_of_nodes if rank and known[rank][1] and not _share(known, probe.name, rank)]
    if not generation:
        for rank in alone:
            _require_older(group, folder, resume, rank, known)
    return sorted(alone)


def _share(known: list, probe: str, rank: int) -> bool:
    """Does one of the two ranks see the other's file? A network disk may show it late to one of them."""
    return f"{probe}-0" in known[rank][0] or f"{probe}-{rank}" in known[0][0]


def _require_older(group: Group, folder: Path, resume: str | None, rank: int, known: list) -> None:
    where = place(group.views[rank])
    if resume is None and known[rank][2]:
        raise UserError(
            f"--out-dir {folder} holds a run already on the disk of {where}: go on with --resume, or name another "
            "directory",
            same_on_every_rank=True,
        )
    if resume == "auto" and known[rank][3] > known[0][3]:
        raise UserError(
            f"--resume: {where} has step {known[rank][3]} of this run in {folder} on its own disk, but rank 0 has "
            f"{f'step {known[0][3]}' if known[0][3] else 'no checkpoint'}: copy that folder to rank 0's node, or start "
            "that node as -i 0",
            same_on_every_rank=True,
        )


def send_files(group: Group, folder: Path, ranks: list[int]) -> None:
    """Give the files of rank 0 so far to the ranks that keep copies. Every rank must call this. One whose disk cannot
    take them keeps none: it is taken out of its own `ranks`."""
    if not ranks:
        return
    texts: list = [None]
    if group.worker.is_main:
        texts = [{name: (folder / name).read_text() for name in COPIED}]
    dist.broadcast_object_list(texts, src=0)
    if group.worker.rank in ranks:
        try:
            for name, text in texts[0].items():
                _replace(folder / name, text)
        except OSError as error:
            ranks.remove(group.worker.rank)
            say(f"{folder} cannot be written ({error.strerror}): {NO_COPIES}", group.worker.rank)


def _replace(path: Path, text: str) -> None:
    """Write a file wholly or not at all."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
