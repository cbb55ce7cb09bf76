"""Rows for mlm: one stream of text, cut into full rows."""

from collections.abc import Iterable, Iterator

import numpy as np

from bert_ddp.text.table import Rows, columns

ROWS_A_WRITE = 1024


def packed(documents: Iterable[np.ndarray], length: int, special: dict[str, int]) -> Iterator[Rows]:
    """Yield rows [CLS] L - 2 tokens [SEP] of one stream: the documents, int32 (tokens,), with [SEP] in between.

    An incomplete row at the end is dropped.
    """
    inner = length - 2
    separator = np.array([special["sep"]], dtype=np.int32)
    waiting: list[np.ndarray] = []
    size = 0
    for document in documents:
        waiting += [document, separator]
        size += len(document) + 1
        if size >= ROWS_A_WRITE * inner:
            stream = np.concatenate(waiting)
            whole = len(stream) // inner * inner
            yield _as_rows(stream[:whole].reshape(-1, inner), special)
            waiting, size = [stream[whole:]], len(stream) - whole
    if size >= inner:
        stream = np.concatenate(waiting)
        yield _as_rows(stream[: len(stream) // inner * inner].reshape(-1, inner), special)


def _as_rows(inner: np.ndarray, special: dict[str, int]) -> Rows:
    count, width = inner.shape
    ids = np.full((count, width + 2), special["sep"], dtype=np.int32)
    ids[:, 0] = special["cls"]
    ids[:, 1:-1] = inner
    return columns(ids, special, next_label=np.zeros(count, dtype=np.int32))
