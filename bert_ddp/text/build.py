"""Make the cache folder of a corpus: tokenizer, token rows, and what meta.json says about them."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from bert_ddp.text import sources, vocabulary
from bert_ddp.text.progress import bar
from bert_ddp.text.settings import FLAGS, Settings
from bert_ddp.text.shards import rows_of_shards
from bert_ddp.text.table import Rows, TableWriter, originals
from bert_ddp.text.tokens import rows_of_text
from common.console import say
from common.errors import UserError

PARTS = ("train", "held_out")


def build(folder: Path, settings: Settings, rank: int | None = None) -> None:
    """Make the cache `folder` in full or not at all: it is written aside and renamed. Raises UserError and OSError."""
    for leftover in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder.parent / f".building-{folder.name}-{os.getpid()}"
    aside.mkdir()
    try:
        say(f"making token rows of {' '.join(settings.corpus)} in {folder}, once", rank)
        _build_in(aside, settings)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build_in(folder: Path, settings: Settings) -> None:
    tokenizer = _tokenizer(settings)
    tokenizer.save_pretrained(folder / "tokenizer")
    words = vocabulary.words_of(tokenizer)
    np.save(folder / "continues.npy", np.array([word.startswith("##") for word in words]))
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    if settings.shards:
        pieces = rows_of_shards(settings, len(words), special)
    else:
        pieces = rows_of_text(settings, tokenizer, special)
    digest = blake2b("\n".join(words).encode(), digest_size=8)
    writers, counts = _write_tables(folder, pieces, len(words), digest)
    _check_not_empty(writers, settings)
    counts[[number for name, number in special.items() if name != "unk"]] = 0
    if not counts.any():
        raise UserError(f"--corpus {' '.join(settings.corpus)} holds no words, only special tokens: give text")
    meta = {
        "sequence_length": writers["train"].length,
        "vocab_size": len(words),
        "special": special,
        "rows": {part: writers[part].rows for part in PARTS},
        "padded": {part: writers[part].padded for part in PARTS},
        "stored_masks": settings.masking == "stored",
        "unigram_entropy": _entropy(counts),
        "fingerprint": digest.hexdigest(),
        "settings": asdict(settings),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _write_tables(
    folder: Path, pieces: Iterator[tuple[str, Rows]], vocab_size: int, digest: blake2b
) -> tuple[dict[str, TableWriter], np.ndarray]:
    """Write each part's rows into its Arrow file and add them to `digest`.

    Returns the closed writers by part, and how often each word occurs in the training rows, int64 (vocab_size,).
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    writers: dict[str, TableWriter] = {}
    try:
        for part, rows in pieces:
            if part not in writers:
                writers[part] = TableWriter(folder / f"{part}.arrow", vocab_size, rows)
            writers[part].write(rows)
            digest.update(part.encode() + b"".join(rows[name].tobytes() for name in sorted(rows)))
            if part == "train":
                counts += np.bincount(originals(rows).ravel(), minlength=vocab_size)
    finally:
        for writer in writers.values():
            writer.close()
    return writers, counts


def _tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    if settings.vocab:
        return vocabulary.load(settings.vocab, settings.lowercase)
    if next(sources.documents(settings.corpus), None) is None:
        raise UserError(f"--corpus {' '.join(settings.corpus)} is empty: there is no text in it")
    assert settings.vocab_size is not None
    with bar("vocabulary", settings.files["corpus"], passes=2) as progress:
        return vocabulary.train(
            lambda: sources.documents(settings.corpus, progress.update), settings.vocab_size, settings.lowercase
        )


def _check_not_empty(writers: dict[str, TableWriter], settings: Settings) -> None:
    """Raise UserError if a part has no rows. The message says whether there is too little text or none was held out."""
    missing = [part for part in PARTS if part not in writers]
    if not missing:
        return
    fraction, names = settings.held_out, " ".join(settings.corpus)
    if fraction is None or len(missing) == len(PARTS):
        name = "corpus" if "train" in missing else "held_out_corpus"
        row = f"row of {settings.sequence_length} tokens" if settings.sequence_length else "row"
        raise UserError(
            f"{FLAGS[name]} {' '.join(getattr(settings, name))} does not fill one {row}: it is empty or too short; "
            "give more text or a smaller --sequence-length"
        )
    if not settings.shards and len(list(islice(sources.documents(settings.corpus), 2))) < 2:
        raise UserError(
            f"--corpus {names} has no blank lines, so it is one document and no part can be held out: put "
            "blank lines between documents, or name other text with --held-out-corpus"
        )
    if missing == ["train"]:
        raise UserError(
            f"--held-out {fraction} of --corpus {names} leaves no row to train on: lower it, or give more text"
        )
    raise UserError(f"--held-out {fraction} of --corpus {names} is less than one row: raise it, or give more text")


def _entropy(counts: np.ndarray) -> float:
    """Entropy of the words' frequencies in nats per token: the loss of the best guess that ignores context."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
