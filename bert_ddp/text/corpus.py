"""From text to token rows of one length: made once per node, kept as Arrow, found again by a fingerprint.

    cache/corpus-1a2b3c4d/train.arrow       one row a line of the table below
                          held_out.arrow    for evaluation: whole documents that training never sees
                          tokenizer/        what from_pretrained reads
                          meta.json         sizes, special tokens, unigram entropy, fingerprint of the rows

The cache's name is a digest of the files' names, sizes and times and of all settings, so a second start reads
nothing again; the fingerprint in meta.json is of the rows themselves, so nodes can compare what they have.

A row holds L = --sequence-length tokens, without padding unless HDF5 shards bring some:

    mlm        [CLS] one stream of text, documents apart by [SEP] [SEP]
    mlm+nsp    [CLS] first part [SEP] second part [SEP]       the second follows the first, or is from elsewhere
"""

import json
import math
import os
import shutil
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from bert_ddp.text import sources
from common.errors import UserError
from common.launch import cli
from common.uneven.seeding import derive_seed

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerFast

FORMAT = 3  # raise it when the same settings give other rows, so that old caches are made anew
PARTS = ("train", "held_out")
TOGETHER = 512  # documents tokenised at once
TOGETHER_CHARACTERS = 1 << 22  # of them; beyond that no further document is added, for encodings take much memory
ROWS_A_WRITE = 1024
PAIRS_FROM = 1 << 20  # tokens of text in memory, among which the wrong second parts are drawn
LOCK_SECONDS = 24 * 3600.0
SOURCES = {"corpus": "--corpus", "held_out_corpus": "--held-out-corpus"}
PATHS = ("corpus", "held_out_corpus", "vocab", "cache_dir")  # flags; what they lead to has a fingerprint
OBJECTIVES = ("mlm", "mlm+nsp")


def add_corpus_flags(parser: ArgumentParser) -> _ArgumentGroup:
    """The flags that say what the rows are made of; `load` reads them."""
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--corpus",
        nargs="+",
        default=[sources.PYTHON_DOCS],
        metavar="NAME",
        help="text or HDF5 files, folders, globs, or hf:NAME,CONFIG; the default comes with Python",
    )
    group.add_argument("--held-out-corpus", nargs="+", metavar="NAME", help="evaluate on these, hold nothing else out")
    group.add_argument("--held-out", type=_fraction, default=0.05, metavar="P", help="part of the documents held out")
    group.add_argument("--vocab", metavar="NAME", help="vocab.txt, tokenizer folder or hub name; trained if left out")
    group.add_argument("--vocab-size", type=cli.positive_int, default=8192, metavar="V", help="words of a trained one")
    group.add_argument("--cased", action="store_true", help="tell capital letters from small ones")
    group.add_argument(
        "--sequence-length", type=cli.positive_int, metavar="L", help="tokens in a row (128; that of the shards)"
    )
    group.add_argument("--objective", choices=OBJECTIVES, default="mlm", help="mlm+nsp: also next sentence prediction")
    group.add_argument(
        "--masking",
        choices=("dynamic", "stored"),
        default="dynamic",
        help="stored: the masks of the HDF5 shards, the same in every epoch",
    )
    group.add_argument("--cache-dir", type=Path, default=Path("cache"), metavar="DIR", help="where token rows are kept")
    return group


def _fraction(text: str) -> float:
    value = cli.probability(text)
    if not 0 < value < 1:
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Corpus:
    """Token rows on disk: `train` and `held_out` are memory-mapped tables."""

    folder: Path
    meta: dict
    train: "datasets.Dataset"
    held_out: "datasets.Dataset"

    @property
    def fingerprint(self) -> str:
        """Of the rows and the vocabulary: equal on two nodes that hold the same."""
        return self.meta["fingerprint"]

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's files into a checkpoint."""
        for file in self.tokenizer_folder.iterdir():
            shutil.copyfile(file, folder / file.name)

    def write_vocab(self, path: Path) -> None:
        """The vocabulary as a vocab.txt, one word a line, with the words that were added to a tokenizer."""
        from transformers import AutoTokenizer

        words = _words(AutoTokenizer.from_pretrained(self.tokenizer_folder))
        path.write_text("".join(f"{word or f'[unused-{number}]'}\n" for number, word in enumerate(words)))

    def describe(self) -> str:
        counts, meta = self.meta["rows"], self.meta
        return (
            f"{counts['train']:,} + {counts['held_out']:,} rows of {meta['sequence_length']} tokens, "
            f"{meta['vocab_size']:,} words, unigram entropy {meta['unigram_entropy']:.3f} nats"
        )


def load(args: Namespace, say: Callable[[str], None] = print, init_from: str | None = None) -> Corpus:
    """The corpus that the flags describe, from the cache or made now, one process at a time.

    `init_from` is a model's folder whose vocabulary is taken where no --vocab is given. Raises UserError for
    sources, vocabularies and settings that cannot work; the cache stays whole then.
    """
    from filelock import FileLock, Timeout

    settings = _settings(args, init_from)
    key = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = args.cache_dir / f"corpus-{key}"
    if not (folder / "meta.json").exists():
        try:
            args.cache_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(args.cache_dir / f".corpus-{key}.lock", timeout=LOCK_SECONDS):
                if not (folder / "meta.json").exists():
                    _build(folder, settings, say)
        except Timeout:
            raise UserError(
                f"--cache-dir {args.cache_dir}: another process has been at work for a day: end it"
            ) from None
        except OSError as error:
            raise UserError(f"--cache-dir {args.cache_dir} cannot be written: {error.strerror or error}") from None
    return _open(folder)


def _open(folder: Path) -> Corpus:
    import datasets

    _plain_tqdm_lock()
    meta = json.loads((folder / "meta.json").read_text())
    parts = {name: datasets.Dataset.from_file(str(folder / f"{name}.arrow")) for name in PARTS}
    return Corpus(folder, meta, **parts)


def _settings(args: Namespace, init_from: str | None) -> dict:
    """All that the rows follow from, as plain JSON. Raises UserError for a combination that cannot work."""
    files = {name: sources.find_files(getattr(args, name) or [], flag) for name, flag in SOURCES.items()}
    shards = _are_shards(args, files)
    vocab = args.vocab or init_from
    if shards and not vocab:
        raise UserError(
            f"--corpus {files['corpus'][0]} holds numbers of words: give the --vocab that they were made with"
        )
    if args.masking == "stored" and not shards:
        raise UserError("--masking stored takes its masks from HDF5 shards, but --corpus names text: use dynamic")
    shortest = 8
    if args.sequence_length and args.sequence_length < shortest:
        raise UserError(f"--sequence-length is {args.sequence_length}: give {shortest} or more")
    return {
        "format": FORMAT,
        "corpus": args.corpus,
        "held_out_corpus": args.held_out_corpus,
        "files": {name: [_stamp(file) for file in found] for name, found in files.items()},
        "data_set_files": [
            _stamp(file) for file in sources.data_set_files([*args.corpus, *(args.held_out_corpus or [])])
        ],
        "shards": shards,
        "held_out": None if args.held_out_corpus else args.held_out,
        "vocab": vocab,
        "vocab_stamp": [_stamp(file) for file in _vocabulary_files(vocab)],
        "vocab_size": None if vocab else args.vocab_size,
        "lowercase": not args.cased,
        "sequence_length": args.sequence_length or (None if shards else 128),
        "objective": args.objective,
        "masking": args.masking,
    }


def _are_shards(args: Namespace, files: dict[str, list[Path]]) -> bool:
    """Is it HDF5 shards that both flags name? Raises UserError where it is both shards and text."""
    found = files["corpus"] + files["held_out_corpus"]
    shards = sources.is_hdf5(found)
    for name, flag in SOURCES.items():
        for given in getattr(args, name) or []:
            if shards and sources.is_no_file(given):
                raise UserError(f"{flag} is {given}, which is text, but {found[0]} is an HDF5 shard: give one kind")
    return shards


def _stamp(file: Path) -> list:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _vocabulary_files(vocab: str | None) -> list[Path]:
    if vocab is None or not Path(vocab).exists():
        return []
    path = Path(vocab)
    return [path] if path.is_file() else sorted(file for file in path.glob("*[vt]o*") if file.is_file())


# --- building ---------------------------------------------------------------------------------------------------


def _build(folder: Path, settings: dict, say: Callable[[str], None]) -> None:
    """Write the cache aside and rename it into place: it is there whole or not at all."""
    for leftover in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder.parent / f".building-{folder.name}-{os.getpid()}"
    aside.mkdir()
    try:
        say(f"making token rows of {' '.join(settings['corpus'])} in {folder}, once")
        _build_in(aside, settings)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build_in(folder: Path, settings: dict) -> None:
    import numpy as np

    tokenizer = _tokenizer(settings)
    tokenizer.save_pretrained(folder / "tokenizer")
    words = _words(tokenizer)
    np.save(folder / "continues.npy", np.array([word.startswith("##") for word in words]))
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    digest = blake2b("\n".join(words).encode(), digest_size=8)
    counts = np.zeros(len(words), dtype=np.int64)
    build = _rows_of_shards if settings["shards"] else _rows_of_text
    writers = {}
    try:
        for part, rows in build(settings, tokenizer, len(words), special):
            if part not in writers:
                writers[part] = _Writer(folder / f"{part}.arrow", len(words), rows)
            writers[part].write(rows)
            digest.update(part.encode() + b"".join(rows[name].tobytes() for name in sorted(rows)))
            if part == "train":
                counts += np.bincount(_originals(rows).ravel(), minlength=len(words))
    finally:
        for writer in writers.values():
            writer.close()
    _check_not_empty(writers, settings)
    counts[[number for name, number in special.items() if name != "unk"]] = 0
    if not counts.any():
        raise UserError(f"--corpus {' '.join(settings['corpus'])} holds no words, only special tokens: give text")
    meta = {
        "sequence_length": writers["train"].length,
        "vocab_size": len(words),
        "special": special,
        "rows": {part: writers[part].rows for part in PARTS},
        "padded": {part: writers[part].padded for part in PARTS},
        "stored_masks": settings["masking"] == "stored",
        "unigram_entropy": _entropy(counts),
        "fingerprint": digest.hexdigest(),
        "settings": settings,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _words(tokenizer: "PreTrainedTokenizerFast") -> list[str]:
    """The words in the order of their numbers; a number that stands for none becomes an empty word."""
    vocabulary = tokenizer.get_vocab()
    words = [""] * (max(vocabulary.values()) + 1)
    for word, number in vocabulary.items():
        words[number] = word
    return words


def _tokenizer(settings: dict) -> "PreTrainedTokenizerFast":
    from bert_ddp.text import vocabulary

    if settings["vocab"]:
        return vocabulary.load(settings["vocab"], settings["lowercase"])
    texts = lambda: sources.documents(settings["corpus"])  # noqa: E731
    if next(texts(), None) is None:
        raise UserError(f"--corpus {' '.join(settings['corpus'])} is empty: there is no text in it")
    with _bar("vocabulary", settings["files"]["corpus"], passes=2) as bar:
        return vocabulary.train(
            lambda: sources.documents(settings["corpus"], bar.update), settings["vocab_size"], settings["lowercase"]
        )


def _bar(title: str, stamps: list[list], passes: int = 1):
    from tqdm import tqdm

    _plain_tqdm_lock()
    total = sum(size for _, size, _ in stamps) * passes
    return tqdm(total=total or None, desc=title, unit="B", unit_scale=True, disable=None, leave=False)


def _plain_tqdm_lock() -> None:
    """tqdm, which `datasets` uses too, would make a semaphore for several processes that nobody takes down."""
    import threading

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _check_not_empty(writers: dict, settings: dict) -> None:
    """Raises UserError where a part has no rows: it says whether text lacks, or only the way it was parted."""
    missing = [part for part in PARTS if part not in writers]
    if not missing:
        return
    fraction, names = settings["held_out"], " ".join(settings["corpus"])
    if fraction is None or len(missing) == len(PARTS):
        name = "corpus" if "train" in missing else "held_out_corpus"
        raise UserError(
            f"{SOURCES[name]} {' '.join(settings[name])} gives not one row of {settings['sequence_length']} tokens: "
            "it is empty or too short; give more text or a smaller --sequence-length"
        )
    if not settings["shards"] and len(list(islice(sources.documents(settings["corpus"]), 2))) < 2:
        raise UserError(
            f"--corpus {names} has no blank lines and so is one document, of which no part can be held out: put "
            "blank lines between documents, or name other text with --held-out-corpus"
        )
    if missing == ["train"]:
        raise UserError(
            f"--held-out {fraction} of --corpus {names} leaves no row to train on: lower it, or give more text"
        )
    raise UserError(f"--held-out {fraction} of --corpus {names} is less than one row: raise it, or give more text")


def _entropy(counts: "np.ndarray") -> float:
    """Nats per token of the best guess that knows only how frequent each word is."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * [math.log(share) for share in shares]).sum())


def _originals(rows: dict) -> "np.ndarray":
    """The tokens before stored masks were put over them."""
    if "masked_positions" not in rows:
        return rows["input_ids"]
    from bert_ddp.text.shards import unmask

    return unmask(rows["input_ids"], rows["masked_positions"], rows["masked_labels"])


class _Writer:
    """Appends rows, given as arrays by column, to one Arrow file that `datasets` reads."""

    def __init__(self, path: Path, vocab_size: int, rows: dict):
        import pyarrow

        self.rows, self.padded, self.length = 0, False, rows["input_ids"].shape[1]
        small = pyarrow.uint16() if vocab_size <= 1 << 16 else pyarrow.int32()
        kinds = {"input_ids": small, "masked_labels": small, "next_label": pyarrow.int8()}
        fields = []
        for name, values in rows.items():
            kind = kinds.get(name, pyarrow.int16())
            fields.append((name, pyarrow.list_(kind, values.shape[1]) if values.ndim == 2 else kind))
        self.schema = pyarrow.schema(fields)
        self.stream = pyarrow.ipc.new_stream(str(path), self.schema)

    def write(self, rows: dict) -> None:
        import pyarrow

        columns = []
        for field in self.schema:
            values = rows[field.name]
            flat = pyarrow.array(values.ravel(), getattr(field.type, "value_type", field.type))
            columns.append(pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1]) if values.ndim == 2 else flat)
        columns = [column.cast(field.type) for column, field in zip(columns, self.schema, strict=True)]
        self.stream.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=self.schema))
        self.rows += len(rows["length"])
        self.padded |= bool((rows["length"] < self.length).any())

    def close(self) -> None:
        self.stream.close()


# --- rows of text -----------------------------------------------------------------------------------------------


def _rows_of_text(settings: dict, tokenizer, vocab_size: int, special: dict) -> Iterator[tuple[str, dict]]:
    """(part, rows) in pieces of bounded size."""
    pack = _pairs if settings["objective"] == "mlm+nsp" else _packed
    length = settings["sequence_length"]
    files = [*settings["files"]["corpus"], *settings["files"]["held_out_corpus"]]
    with _bar("token rows", files, passes=1 if settings["held_out_corpus"] else 2) as bar:
        for part in PARTS:
            tokens = _tokens(part, settings, tokenizer, bar.update)
            for rows in pack(tokens, length, special):
                yield part, rows


def _tokens(part: str, settings: dict, tokenizer, advance: Callable[[int], object]) -> Iterator["np.ndarray"]:
    """The documents of one part as int32 arrays of word numbers."""
    import numpy as np

    names = settings["corpus"] if part == "train" else settings["held_out_corpus"] or settings["corpus"]
    fraction = settings["held_out"]
    chosen = (
        text
        for number, text in enumerate(sources.documents(names, advance))
        if fraction is None or (_is_held_out(number, fraction) == (part == "held_out"))
    )
    backend = tokenizer.backend_tokenizer
    for together in _batches(chosen):
        for encoding in backend.encode_batch_fast(together, add_special_tokens=False):
            if encoding.ids:
                yield np.array(encoding.ids, dtype=np.int32)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Some texts at a time: not too many, and not too much, whatever their lengths."""
    together, size = [], 0
    for text in texts:
        together.append(text)
        size += len(text)
        if len(together) == TOGETHER or size >= TOGETHER_CHARACTERS:
            yield together
            together, size = [], 0
    if together:
        yield together


def _is_held_out(number: int, fraction: float) -> bool:
    """Does document (or row) `number` belong to the held-out part? Independent of seeds and layouts."""
    return derive_seed(0, "held out", number) < fraction * 2**63


def _packed(documents: Iterator["np.ndarray"], length: int, special: dict) -> Iterator[dict]:
    """Rows filled with one stream of text; what is left at the end, less than a row, is dropped."""
    import numpy as np

    inner = length - 2
    separator = np.array([special["sep"]], dtype=np.int32)
    waiting, size = [], 0
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


def _as_rows(inner: "np.ndarray", special: dict) -> dict:
    import numpy as np

    count, width = inner.shape
    ids = np.full((count, width + 2), special["sep"], dtype=np.int32)
    ids[:, 0] = special["cls"]
    ids[:, 1:-1] = inner
    return columns(ids, special, next_label=np.zeros(count, dtype=np.int32))


def columns(
    ids: "np.ndarray",
    special: dict,
    next_label: "np.ndarray",
    second: "np.ndarray | None" = None,
    length: "np.ndarray | None" = None,
) -> dict:
    """The columns of rows `ids` (rows, L): `second` is where the second segment begins, `length` where padding does,
    `maskable` how many tokens may be masked."""
    import numpy as np

    full = np.full(len(ids), ids.shape[1], dtype=np.int32)
    length = full if length is None else length
    inside = np.arange(ids.shape[1]) < length[:, None]
    inside[:, 0] = False  # [CLS]; 0 ends a list of positions
    maskable = inside & ~np.isin(ids, [special["cls"], special["sep"], special["pad"], special["mask"]])
    return {
        "input_ids": ids,
        "length": length,
        "second": length if second is None else second,
        "maskable": maskable.sum(axis=1).astype(np.int32),
        "next_label": next_label,
    }


def _pairs(documents: Iterator["np.ndarray"], length: int, special: dict) -> Iterator[dict]:
    """[CLS] A [SEP] B [SEP] of full length: B follows A in half of the rows, and is from another place in the others.

    Documents too short for a pair are joined to the next one, and so is the end of each, which fills no row: of a
    block only the last tokens, less than a row, are dropped. Where B is from elsewhere, the text after A is not lost:
    the next row begins with it, as in the original BERT.
    """
    block: list = []
    size = number = 0
    for document in _long_enough(documents, length):
        block.append(document)
        size += len(document)
        if size >= PAIRS_FROM:
            yield from _pairs_of_block(block, length, special, number)
            block, size, number = [], 0, number + 1
    if block:
        yield from _pairs_of_block(block, length, special, number)


def _long_enough(documents: Iterator["np.ndarray"], length: int) -> Iterator["np.ndarray"]:
    import numpy as np

    waiting, size = [], 0
    for document in documents:
        waiting.append(document)
        size += len(document)
        if size >= 2 * length:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if size >= length:
        yield np.concatenate(waiting)


def _pairs_of_block(block: list, length: int, special: dict, number: int) -> Iterator[dict]:
    import numpy as np

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
            source = _elsewhere(block, *np.searchsorted(ends, (begin, after - 1), side="right"), random)
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


def _elsewhere(block: list, first: int, last: int, random: "np.random.Generator") -> "np.ndarray":
    """A document that is none of those from number `first` to `last`, which hold A; any if there is no other."""
    taken = last - first + 1
    if taken == len(block):
        return block[int(random.integers(len(block)))]
    other = int(random.integers(len(block) - taken))
    return block[other + taken if other >= first else other]


def _rows_of_shards(settings: dict, tokenizer, vocab_size: int, special: dict) -> Iterator[tuple[str, dict]]:
    """(part, rows) of HDF5 shards: rows are held out one by one where no --held-out-corpus is named."""
    import numpy as np

    from bert_ddp.text import shards

    row = 0
    files = [*settings["files"]["corpus"], *settings["files"]["held_out_corpus"]]
    most = max(shards.most_masked(Path(path)) for path, *_ in files)  # the Arrow column has one width
    with _bar("token rows", files) as bar:
        for name in ("corpus", "held_out_corpus"):
            for path, size, _ in settings["files"][name]:
                for rows in shards.read(Path(path), settings, vocab_size, special, most):
                    numbers = range(row, row + len(rows["length"]))
                    row = numbers.stop
                    if settings["held_out"] is None:
                        yield "train" if name == "corpus" else "held_out", rows
                        continue
                    chosen = np.array([_is_held_out(number, settings["held_out"]) for number in numbers], dtype=bool)
                    for part, those in (("train", ~chosen), ("held_out", chosen)):
                        if those.any():
                            yield part, {column: values[those] for column, values in rows.items()}
                bar.update(size)
