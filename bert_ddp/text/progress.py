"""A progress bar over the bytes of files, for the work before training."""

import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from bert_ddp.text.settings import Stamp


def bar(title: str, files: Iterable[Stamp], passes: int = 1) -> "tqdm[Any]":
    """A bar that ends when `passes` times the bytes of these files have been counted; silent without a terminal."""
    use_plain_tqdm_lock()
    total = sum(size for _, size, _ in files) * passes
    return tqdm(total=total or None, desc=title, unit="B", unit_scale=True, disable=None, leave=False)


def use_plain_tqdm_lock() -> None:
    """Let tqdm, which `datasets` uses too, lock threads only: its own lock makes a semaphore that is never removed."""
    tqdm.set_lock(threading.RLock())
