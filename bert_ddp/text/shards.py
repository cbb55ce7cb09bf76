"""The HDF5 shards of NVIDIA's BERT pipeline, which HetSeq trains from: read and written.

    input_ids, input_mask, segment_ids       [N, L]    words with masks over them; 1 where there is no padding
    masked_lm_positions, masked_lm_ids       [N, P]    where the masks are and what is under them; position 0 ends a row
    next_sentence_labels                     [N]       1 where the second segment is from elsewhere

Source of the layout: NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, create_pretraining_data.py.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    import h5py
    import numpy as np

MATRICES = ("input_ids", "input_mask", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids")
LABELS = "next_sentence_labels"
ROWS_AT_ONCE = 4096


def unmask(ids: "np.ndarray", positions: "np.ndarray", labels: "np.ndarray") -> "np.ndarray":
    """`ids` (rows, L) with `labels` (rows, P) put back at `positions` (rows, P), up to the first position 0."""
    import numpy as np

    rows, places = np.nonzero(np.cumprod(positions != 0, axis=1))
    result = ids.copy()
    result[rows, positions[rows, places]] = labels[rows, places]
    return result


def read(path: Path, settings: dict, vocab_size: int, special: dict, most: int) -> Iterator[dict]:
    """The rows of one shard in pieces, as columns of the cache; stored masks have `most` places in a row.

    Raises UserError naming the file and the row where it does not follow the layout.
    """
    with _open(path) as shard:
        length = _check_shapes(path, shard, settings["sequence_length"])
        settings["sequence_length"] = length  # the first shard decides for the others
        for start in range(0, len(shard["input_ids"]), ROWS_AT_ONCE):
            piece = {name: shard[name][start : start + ROWS_AT_ONCE] for name in (*MATRICES, *MASKS, LABELS)}
            yield _columns(path, start, piece, vocab_size, special, most if settings["masking"] == "stored" else None)


def most_masked(path: Path) -> int:
    """P of this shard. Raises UserError where it does not follow the layout."""
    with _open(path) as shard:
        _check_shapes(path, shard, None)
        return shard[MASKS[0]].shape[1]


@contextmanager
def _open(path: Path) -> Iterator["h5py.File"]:
    import h5py

    try:
        with h5py.File(path) as shard:
            yield shard
    except OSError as error:
        raise UserError(f"--corpus {path} is not a whole HDF5 file: {str(error).splitlines()[0]}") from None


def _check_shapes(path: Path, shard: "h5py.File", wanted: int | None) -> int:
    import h5py

    for name in (*MATRICES, *MASKS, LABELS):
        if not isinstance(shard.get(name), h5py.Dataset):
            raise UserError(f"--corpus {path} has no data set {name}: give shards of NVIDIA's BERT pipeline")
    for name in (MATRICES[0], *MASKS):
        if len(shard[name].shape) != 2:
            raise UserError(
                f"--corpus {path}: {name} has the shape {shard[name].shape}, not (rows, tokens in a row): give shards "
                "of NVIDIA's BERT pipeline"
            )
    rows, length = shard["input_ids"].shape
    for name, shape in ((MATRICES[1], (rows, length)), (MATRICES[2], (rows, length)), (LABELS, (rows,))):
        if shard[name].shape != shape:
            raise UserError(f"--corpus {path}: {name} has the shape {shard[name].shape}, not {shape}")
    if shard[MASKS[0]].shape != shard[MASKS[1]].shape or shard[MASKS[0]].shape[0] != rows:
        raise UserError(f"--corpus {path}: {MASKS[0]} has the shape {shard[MASKS[0]].shape}, not that of {MASKS[1]}")
    if wanted and wanted != length:
        raise UserError(f"--corpus {path} has rows of {length} tokens, not {wanted}: give --sequence-length {length}")
    return length


def _columns(path: Path, start: int, piece: dict, vocab_size: int, special: dict, most: int | None) -> dict:
    """Columns of the cache, with stored masks of width `most` where one is given."""
    import numpy as np

    from bert_ddp.text.corpus import columns

    piece = {name: values.astype(np.int32) for name, values in piece.items()}
    ids, mask, segments = (piece[name] for name in MATRICES)
    positions, labels = (piece[name] for name in MASKS)
    place = np.arange(ids.shape[1])
    length = mask.sum(axis=1, dtype=np.int32)
    is_second = segments == 1
    second = np.where(is_second.any(axis=1), is_second.argmax(axis=1), length).astype(np.int32)
    listed = np.cumprod(positions != 0, axis=1).astype(bool)
    outside = lambda numbers: (numbers < 0) | (numbers >= vocab_size)  # noqa: E731

    def refuse(wrong: "np.ndarray", what: str) -> None:
        if wrong.any():
            raise UserError(f"--corpus {path}, row {start + int(wrong.argmax())}: {what}")

    refuse(outside(ids).any(axis=1), f"a number in input_ids is not of a vocabulary of {vocab_size} words")
    refuse(
        (listed & outside(labels)).any(axis=1), f"a number in {MASKS[1]} is not of a vocabulary of {vocab_size} words"
    )
    refuse(((mask == 1) != (place < length[:, None])).any(axis=1), "input_mask is not ones and then zeros")
    refuse((listed & (positions >= length[:, None])).any(axis=1), f"{MASKS[0]} points beyond the row's end")
    refuse((listed & (positions < 0)).any(axis=1), f"{MASKS[0]} holds a negative position")
    expected = (place >= second[:, None]) & (place < length[:, None])
    refuse((is_second != expected).any(axis=1) | (segments > 1).any(axis=1), "segment_ids is not zeros, ones, zeros")
    refuse(~np.isin(piece[LABELS], (0, 1)), f"{LABELS} is neither 0 nor 1")
    original = unmask(ids, positions, np.where(listed, labels, 0))
    result = columns(original, special, piece[LABELS], second, length)
    if most is not None:
        # a step whose rows have no masks would have no loss: a division by zero
        refuse(~listed.any(axis=1), "no token is masked: give shards with masks, or --masking dynamic")
        fill = ((0, 0), (0, most - positions.shape[1]))
        stored = [np.pad(np.where(listed, numbers, 0), fill) for numbers in (positions, labels)]
        result |= {"input_ids": ids, "masked_positions": stored[0], "masked_labels": stored[1]}
        result["maskable"] = listed.sum(axis=1).astype(np.int32)
    return result


def write(path: Path, batches: Iterator[dict]) -> int:
    """Write one shard from batches of the six arrays above; returns its rows.

    It is made in memory: HDF5 cannot close a file whose disk is full, and ends the process with a segmentation fault.
    """
    import h5py

    rows = 0
    image = io.BytesIO()
    with h5py.File(image, "w") as shard:
        for batch in batches:
            for name, values in batch.items():
                if name not in shard:
                    shape = (0, *values.shape[1:])
                    kind = "i1" if name in ("input_mask", "segment_ids", LABELS) else "i4"
                    shard.create_dataset(
                        name, shape, kind, maxshape=(None, *shape[1:]), compression="gzip", chunks=True
                    )
                shard[name].resize(rows + len(values), axis=0)
                shard[name][rows:] = values
            rows += len(batch["input_ids"])
    path.write_bytes(image.getbuffer())
    return rows
