"""The HDF5 shards of NVIDIA's BERT pipeline, which HetSeq trains from: read and written.

    input_ids, input_mask, segment_ids       [N, L]    words after masking; 1 before the padding; 1 in segment 2
    masked_lm_positions, masked_lm_ids       [N, P]    where the masks are and the words under them; 0 ends a row
    next_sentence_labels                     [N]       1 where the second segment is from elsewhere

Source of the layout: NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, create_pretraining_data.py.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert_ddp.text.progress import bar
from bert_ddp.text.settings import Settings
from bert_ddp.text.table import Rows, columns, unmask
from common.errors import UserError
from common.files import reading

MATRICES = ("input_ids", "input_mask", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids")
LABELS = "next_sentence_labels"
ROWS_AT_ONCE = 4096


def rows_of_shards(settings: Settings, vocab_size: int, special: dict[str, int]) -> Iterator[tuple[str, Rows]]:
    """(part, rows) of all shards; part is train or held_out. Without --held-out-corpus single rows are held out.

    Raises UserError naming the file and the row where a shard does not follow the layout, or its rows have another
    length than --sequence-length or, without that flag, than the first shard's.
    """
    row = 0
    files = [*settings.files["corpus"], *settings.files["held_out_corpus"]]
    shapes = [_shape(Path(path)) for path, *_ in files]
    length = settings.sequence_length or shapes[0][0]
    stored = settings.masking == "stored"
    most = max(most for _, most in shapes) if stored else None  # a column of the table has one width
    with bar("token rows", files) as progress:
        for part, name in (("train", "corpus"), ("held_out", "held_out_corpus")):
            for path, size, _ in settings.files[name]:
                for rows in _read(Path(path), length, vocab_size, special, most):
                    numbers = range(row, row + len(rows["length"]))
                    row = numbers.stop
                    if settings.held_out is None:
                        yield part, rows
                    else:
                        yield from _split(rows, np.array([settings.is_held_out(number) for number in numbers]))
                progress.update(size)


def _split(rows: Rows, held_out: np.ndarray) -> Iterator[tuple[str, Rows]]:
    """(part, rows) for each part that has rows; `held_out` (rows,) is True for a held-out row."""
    for part, those in (("train", ~held_out), ("held_out", held_out)):
        if those.any():
            yield part, {column: values[those] for column, values in rows.items()}


def _read(path: Path, length: int, vocab_size: int, special: dict[str, int], most: int | None) -> Iterator[Rows]:
    """The rows of one shard in pieces; with `most`, its stored masks too, `most` places in a row."""
    with _open(path) as shard:
        if shard["input_ids"].shape[1] != length:
            there = shard["input_ids"].shape[1]
            raise UserError(f"--corpus {path} has rows of {there} tokens, not {length}: give --sequence-length {there}")
        for start in range(0, len(shard["input_ids"]), ROWS_AT_ONCE):
            piece = {name: shard[name][start : start + ROWS_AT_ONCE] for name in (*MATRICES, *MASKS, LABELS)}
            yield _table_rows(path, start, piece, vocab_size, special, most)


def _shape(path: Path) -> tuple[int, int]:
    """(L, P) of this shard. Raises UserError where it does not follow the layout."""
    with _open(path) as shard:
        _check_shapes(path, shard)
        return shard["input_ids"].shape[1], shard[MASKS[0]].shape[1]


@contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        with reading(path, f"--corpus {path}"):
            pass
        with h5py.File(path) as shard:
            yield shard
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # a damaged file breaks where it is read
        raise UserError(f"--corpus {path} is not a whole HDF5 file: {str(error).splitlines()[0]}") from None


def _check_shapes(path: Path, shard: h5py.File) -> None:
    for name in (*MATRICES, *MASKS, LABELS):
        if not isinstance(shard.get(name), h5py.Dataset):
            raise UserError(f"--corpus {path} has no data set {name}: give shards of NVIDIA's BERT pipeline")
    for name in (*MATRICES, *MASKS, LABELS):
        if shard[name].dtype.kind not in "iub":
            raise UserError(f"--corpus {path}: {name} holds {shard[name].dtype}, not whole numbers")
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


def _table_rows(
    path: Path, start: int, piece: dict[str, np.ndarray], vocab_size: int, special: dict[str, int], most: int | None
) -> Rows:
    """Columns of the table for the rows `piece` of a shard, of which the first has number `start`.

    With `most`, stored masks are columns of that width. Raises UserError naming the file and the row.
    """
    for name, values in piece.items():
        wrong = (values.astype(np.int32) != values).reshape(len(values), -1).any(axis=1)
        _refuse(path, start, wrong, f"a number in {name} is larger than any vocabulary")
    piece = {name: values.astype(np.int32) for name, values in piece.items()}
    ids, mask, segments = (piece[name] for name in MATRICES)
    positions, labels = (piece[name] for name in MASKS)
    length = mask.sum(axis=1, dtype=np.int32)
    is_second = segments == 1
    second = np.where(is_second.any(axis=1), is_second.argmax(axis=1), length).astype(np.int32)
    listed = np.cumprod(positions != 0, axis=1).astype(bool)
    for wrong, what in _mistakes(piece, length, second, listed, vocab_size, special["pad"]):
        _refuse(path, start, wrong, what)
    original = unmask(ids, positions, np.where(listed, labels, 0))
    holds_padding = ((original == special["pad"]) & (np.arange(ids.shape[1]) < length[:, None])).any(axis=1)
    _refuse(path, start, holds_padding, "input_mask is 1 for a [PAD]: is --vocab the right one?")
    result = columns(original, special, piece[LABELS], second, length)
    if most is not None:
        # a step without masked tokens would divide its loss by zero
        no_mask = "no token is masked: give shards with masks, or --masking dynamic"
        _refuse(path, start, ~listed.any(axis=1), no_mask)
        fill = ((0, 0), (0, most - positions.shape[1]))
        stored = [np.pad(np.where(listed, numbers, 0), fill) for numbers in (positions, labels)]
        result |= {"input_ids": ids, "masked_positions": stored[0], "masked_labels": stored[1]}
        result["maskable"] = listed.sum(axis=1).astype(np.int32)
    return result


def _mistakes(
    piece: dict[str, np.ndarray], length: np.ndarray, second: np.ndarray, listed: np.ndarray, vocab_size: int, pad: int
) -> Iterator[tuple[Any, str]]:
    """(bool (rows,) of the wrong rows, what is wrong with them) for each rule of the layout."""
    ids, mask, segments = (piece[name] for name in MATRICES)
    positions, labels = (piece[name] for name in MASKS)
    place = np.arange(ids.shape[1])
    unknown = f"is not in a vocabulary of {vocab_size} words"
    yield _outside(ids, vocab_size).any(axis=1), f"a number in input_ids {unknown}"
    yield (listed & _outside(labels, vocab_size)).any(axis=1), f"a number in {MASKS[1]} {unknown}"
    yield ((mask == 1) != (place < length[:, None])).any(axis=1), "input_mask is not ones and then zeros"
    yield (listed & (positions >= length[:, None])).any(axis=1), f"{MASKS[0]} points beyond the row's end"
    yield (listed & (positions < 0)).any(axis=1), f"{MASKS[0]} holds a negative position"
    yield (listed & (labels == pad)).any(axis=1), f"{MASKS[1]} holds [PAD], which is no word to predict"
    ordered = np.sort(np.where(listed, positions, -1 - np.arange(positions.shape[1])), axis=1)
    yield (ordered[:, 1:] == ordered[:, :-1]).any(axis=1), f"{MASKS[0]} holds a position twice"
    yield length < 1, "input_mask says that it holds no token"
    expected = (place >= second[:, None]) & (place < length[:, None])
    wrong = ((segments == 1) != expected).any(axis=1) | (segments > 1).any(axis=1)
    yield wrong, "segment_ids is not zeros, ones, zeros"
    yield ~np.isin(piece[LABELS], (0, 1)), f"{LABELS} is neither 0 nor 1"


def _outside(numbers: np.ndarray, vocab_size: int) -> np.ndarray:
    return (numbers < 0) | (numbers >= vocab_size)


def _refuse(path: Path, start: int, wrong: Any, what: str) -> None:
    """Raise UserError for the first row of `wrong` (rows,), if there is one."""
    if wrong.any():
        raise UserError(f"--corpus {path}, row {start + int(wrong.argmax())}: {what}")


def write(path: Path, batches: Iterable[dict[str, np.ndarray]]) -> int:
    """Write one shard from batches of the six arrays above. Returns its rows.

    It is built in memory: on a full disk HDF5 cannot close a file, and crashes with a segmentation fault.
    """
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
