"""Rows for mlm+nsp: two parts of text. In half of the rows the second follows the first."""

from collections.abc import Iterable, Iterator

import numpy as np

from bert_ddp.text.packed import ROWS_A_WRITE
from bert_ddp.text.table import Rows, columns
from common.uneven.seeding import derive_seed

BLOCK_TOKENS = 1 << 20  # text in memory, from which the wrong second parts are drawn


def pairs(documents: Iterable[np.ndarray], length: int, special: dict[str, int]) -> Iterator[Rows]:
    """Yield full rows [CLS] A [SEP] B [SEP]. B follows A in half of them, and is from another place in the others.

    A document, int32 (tokens,), that is too short for a pair is joined to the next one. The end of a document that
    fills no row continues in the next document: only at the end of a block is less than a row dropped. Where B is from
    another place, the next row begins with the text after A, as in the original BERT.
    """
    block: list[np.ndarray] = []
    size = number = 0
    for document in _long_enough(documents, length):
        block.append(document)
        size += len(document)
        if size >= BLOCK_TOKENS:
            yield from _pairs_of_block(block, length, special, number)
            block, size, number = [], 0, number + 1
    if block:
        yield from _pairs_of_block(block, length, special, number)


def _long_enough(documents: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    waiting: list[np.ndarray] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document)
        if size >= 2 * length:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if size >= length:
        yield np.concatenate(waiting)


def _pairs_of_block(block: list[np.ndarray], length: int, special: dict[str, int], number: int) -> Iterator[Rows]:
    random = np.random.default_rng(derive_seed(0, "pairs", number))
    inner = length - 3
    rows, seconds, labels = [], [], []
    stream, ends = np.concatenate(block), np.cumsum([len(document) for document in block])
    begin = 0
    while begin + inner <= len(stream):
        first = int(random.integers(inner // 4, inner - inner // 4 + 1))
        after, wanted = begin + first, inner - first
        label = int(random.random() < 0.5)
        if label:
            holds_a = np.searchsorted(ends, (begin, after - 1), side="right")
            source = _elsewhere(block, int(holds_a[0]), int(holds_a[1]), random)
            start = int(random.integers(len(source) - wanted + 1))
            b = source[start : start + wanted]
        else:
            b = stream[after : after + wanted]
        rows.append(np.concatenate([[special["cls"]], stream[begin:after], [special["sep"]], b, [special["sep"]]]))
        seconds.append(first + 2)
        labels.append(label)
        begin = after if label else after + wanted
    for start in range(0, len(rows), ROWS_A_WRITE):
        piece = slice(start, start + ROWS_A_WRITE)
        ids = np.stack(rows[piece]).astype(np.int32)
        yield columns(ids, special, np.array(labels[piece]), second=np.array(seconds[piece], dtype=np.int32))


def _elsewhere(block: list[np.ndarray], first: int, last: int, random: np.random.Generator) -> np.ndarray:
    """A document other than numbers `first` to `last`, which hold A; any document if there is no other."""
    taken = last - first + 1
    if taken == len(block):
        return block[int(random.integers(len(block)))]
    other = int(random.integers(len(block) - taken))
    return block[other + taken if other >= first else other]
