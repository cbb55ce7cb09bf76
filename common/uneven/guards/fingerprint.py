"""A short text that is the same for the same data: to compare the data of two nodes, or of a run and its checkpoint."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from common.errors import UserError


def fingerprint(*values: Any) -> str:
    """Sixteen hex digits of tensors, arrays, numbers, texts, bytes, images, and tuples, lists or dicts of these.

    Raises UserError for a value of another kind.
    """
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()  # numpy has no bfloat16
        digest.update(str(tuple(value.shape)).encode())
        digest.update(data)
    elif isinstance(value, np.ndarray):
        digest.update(str(value.shape).encode())
        if value.dtype.hasobject:  # an array of references, which differ from process to process
            _feed(digest, value.tolist())
        else:
            digest.update(np.ascontiguousarray(value).view(np.uint8))
    elif isinstance(value, Mapping):
        for name in sorted(value):
            _feed(digest, name)
            _feed(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for one in value:
            _feed(digest, one)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, bool | int | float | complex | str | np.generic | None):
        digest.update(f"{type(value).__name__} {value}".encode())
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # a PIL image
        digest.update(f"{value.size} {getattr(value, 'mode', '')}".encode() + value.tobytes())
    else:
        raise UserError(f"a {type(value).__name__} has no fingerprint: give its tensors, numbers or texts instead")
