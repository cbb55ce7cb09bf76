"""The table of token rows: its columns, and the Arrow file that holds them.

    input_ids         [L]    token ids, without padding unless HDF5 shards have some
    length                   where the padding begins
    second                   where the second segment begins; `length` where there is none
    maskable                 how many tokens may be masked; with stored masks, how many are
    next_label               1 where the second segment is from elsewhere
    masked_positions  [P]    stored masks only: where they are; position 0 ends the list
    masked_labels     [P]    stored masks only: the words under them

A row holds L = --sequence-length tokens:

    mlm        [CLS] one stream of text, with [SEP] between documents, [SEP]
    mlm+nsp    [CLS] first part [SEP] second part [SEP]       the second follows the first, or is from elsewhere
"""

from pathlib import Path

import numpy as np
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter

Rows = dict[str, np.ndarray]  # columns by name: (rows,) or (rows, width), integers


def columns(
    ids: np.ndarray,
    special: dict[str, int],
    next_label: np.ndarray,
    second: np.ndarray | None = None,
    length: np.ndarray | None = None,
) -> Rows:
    """The columns of rows `ids` (rows, L). The other arrays are (rows,); without `second` there is one segment, and
    without `length` no padding."""
    full = np.full(len(ids), ids.shape[1], dtype=np.int32)
    length = full if length is None else length
    inside = np.arange(ids.shape[1]) < length[:, None]
    inside[:, 0] = False  # [CLS]; position 0 ends a list of masks
    maskable = inside & ~np.isin(ids, [special["cls"], special["sep"], special["pad"], special["mask"]])
    return {
        "input_ids": ids,
        "length": length,
        "second": length if second is None else second,
        "maskable": maskable.sum(axis=1).astype(np.int32),
        "next_label": next_label,
    }


def unmask(ids: np.ndarray, positions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """`ids` (rows, L) with `labels` (rows, P) put back at `positions` (rows, P), up to the first position 0."""
    rows, places = np.nonzero(np.cumprod(positions != 0, axis=1))
    result = ids.copy()
    result[rows, positions[rows, places]] = labels[rows, places]
    return result


def originals(rows: Rows) -> np.ndarray:
    """The tokens (rows, L) without the stored masks."""
    if "masked_positions" not in rows:
        return rows["input_ids"]
    return unmask(rows["input_ids"], rows["masked_positions"], rows["masked_labels"])


class TableWriter:
    """Appends rows to one Arrow file that `datasets.Dataset.from_file` reads, in the smallest types that fit."""

    def __init__(self, path: Path, vocab_size: int, rows: Rows):
        """`rows` gives the columns and their widths; it is not written."""
        self.rows, self.padded, self.length = 0, False, rows["input_ids"].shape[1]
        word = "uint16" if vocab_size <= 1 << 16 else "int32"
        kinds = {"input_ids": word, "masked_labels": word, "next_label": "int8"}
        types = {name: Value(kinds.get(name, "int16")) for name in rows}
        features = {
            name: List(types[name], values.shape[1]) if values.ndim == 2 else types[name]
            for name, values in rows.items()
        }
        self.writer = ArrowWriter(path=str(path), features=Features(features))

    def write(self, rows: Rows) -> None:
        """Append these rows."""
        self.writer.write_batch(rows)
        self.rows += len(rows["length"])
        self.padded |= bool((rows["length"] < self.length).any())

    def close(self) -> None:
        """Write the end of the file. Raises OSError where the disk is full."""
        self.writer.finalize()
