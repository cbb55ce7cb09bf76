"""Make the cache folder of a corpus: tokenizer, token rows, and what meta.json says about them."""

import json
import os
import shutil
from collections import Counter
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
from bert_ddp.text.tokens import Repeated, rows_of_text
from common.console import say
from common.errors import UserError

PARTS = ("train", "held_out")
MANY_UNKNOWN = 0.2  # part of the words
FEW_LETTERS = 0.1  # part of the words of text
MANY_CAPITALS = 0.05  # part of the words of a vocabulary
MANY_REPEATED = 0.1  # part of the characters that are held out


def build(folder: Path, settings: Settings, rank: int | None = None) -> None:
    """Make the cache `folder` in full or not at all: it is written aside and renamed. Raises UserError and OSError."""
    for leftover in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder.parent / f".building-{folder.name}-{os.getpid()}"
    aside.mkdir()
    try:
        say(f"making token rows of {' '.join(settings.corpus)} in {folder}, once", rank)
        for odd in _build_in(aside, settings):
            say(f"note: {odd}", rank)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build_in(folder: Path, settings: Settings) -> list[str]:
    """Returns what is odd about the corpus as a whole."""
    tokenizer = _tokenizer(settings)
    tokenizer.save_pretrained(folder / "tokenizer")
    words = vocabulary.words_of(tokenizer)
    np.save(folder / "continues.npy", np.array([word.startswith("##") for word in words]))
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    repeated = Repeated()
    if settings.shards:
        pieces = rows_of_shards(settings, len(words), special)
    else:
        pieces = rows_of_text(settings, tokenizer, special, repeated)
    digest = blake2b("\n".join(words).encode(), digest_size=8)
    noted = Noted(special)
    writers, counts = _write_tables(folder, noted.each(pieces), len(words), digest)
    _check_not_empty(writers, settings)
    for some in counts.values():
        some[[number for name, number in special.items() if name != "unk"]] = 0
    unknown = _check_words(counts, special["unk"], settings)
    meta = {
        "sequence_length": writers["train"].length,
        "vocab_size": len(words),
        "special": special,
        "rows": {part: writers[part].rows for part in PARTS},
        "padded": {part: writers[part].padded for part in PARTS},
        "stored_masks": settings.masking == "stored",
        "unigram_entropy": _entropy(counts["train"]),
        "fingerprint": digest.hexdigest(),
        "settings": asdict(settings),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    return [*_odd(settings, unknown, noted, repeated.share), *_odd_words(settings, tokenizer, words, counts)]


def _check_words(counts: dict[str, np.ndarray], unk: int, settings: Settings) -> dict[str, float]:
    """The part of the words that the vocabulary lacks, by the flag and files that hold them. Raises UserError where
    there is no word that it has."""
    unknown = {}
    for part, name in zip(PARTS, FLAGS, strict=True):
        if not (files := getattr(settings, name)):
            continue  # what is held out is a part of --corpus
        source, some = f"{FLAGS[name]} {' '.join(files)}", counts[part]
        if not some.any():
            raise UserError(f"{source} holds no words, only special tokens: give text")
        unknown[source] = float(some[unk] / some.sum())
        if unknown[source] == 1:
            raise UserError(f"--vocab {settings.vocab} has no word of {source}: give the vocabulary of its language")
    return unknown


class Noted:
    """What the rows of a corpus have as a whole."""

    def __init__(self, special: dict[str, int]):
        self.special = special
        self.rows = self.with_cls = self.with_second = self.masks = 0  # rows; [MASK] in them
        self.labels: Counter[int] = Counter()  # of next sentences

    def each(self, pieces: Iterator[tuple[str, Rows]]) -> Iterator[tuple[str, Rows]]:
        """These pieces, noted."""
        for part, rows in pieces:
            self.rows += len(rows["length"])
            self.with_cls += int((rows["input_ids"][:, 0] == self.special["cls"]).sum())
            self.with_second += int((rows["second"] < rows["length"]).sum())
            self.masks += int((rows["input_ids"] == self.special["mask"]).sum())
            self.labels.update(rows["next_label"].tolist())
            yield part, rows


def _odd(settings: Settings, unknown: dict[str, float], noted: Noted, repeated: float) -> Iterator[str]:
    """What is odd about the corpus as a whole, in one line each. `repeated` is the part of the held-out text that is
    trained on too."""
    corpus, held_out = ([Path(path) for path, *_ in files] for files in settings.files.values())
    said = list(sources.odd_files(corpus, held_out))
    for name in {*settings.corpus} & {*(settings.held_out_corpus or ())}:
        if sources.is_no_file(name):
            said.append(f"{name} is trained on and held out: its evaluation says nothing about other text")
    yield from said
    if repeated > MANY_REPEATED and not any("trained on" in line for line in said):
        both = " ".join([*settings.corpus, *(settings.held_out_corpus or ())])
        yield f"{repeated:.0%} of the text that is held out is trained on too: is it twice in {both}?"
    for source, part in unknown.items():
        if part > MANY_UNKNOWN:
            yield f"{part:.0%} of the words of {source} are not in the vocabulary: is it the right one?"
    names = " ".join(settings.corpus)
    if wrong := noted.rows - noted.with_cls:
        yield f"{wrong:,} rows of {names} do not begin with [CLS]: is --vocab the one that they were made with?"
    if settings.masking == "stored" and not noted.masks:
        yield f"no row of {names} has a [MASK], so the model sees what it is to predict: give --masking dynamic"
    if settings.shards and settings.objective == "mlm+nsp":
        if len(noted.labels) == 1:
            same = "has the same next_sentence_labels: --objective mlm+nsp learns nothing from them"
            yield f"every row of {names} {same}"
        if not noted.with_second:
            yield f"no row of {names} has a second segment (segment_ids): --objective mlm+nsp has nothing to compare"


def _odd_words(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, words: list[str], counts: dict[str, np.ndarray]
) -> Iterator[str]:
    """What is odd about the words of the corpus and those of the vocabulary."""
    has_letter = np.array([any(map(str.isalpha, word)) for word in words])
    if counts["train"][has_letter].sum() < FEW_LETTERS * counts["train"].sum():
        yield f"{' '.join(settings.corpus)} has hardly a word with a letter: are these numbers of words, and no text?"
    capitals = [word for word in words if word != word.lower() and not word.startswith("[")]
    normalizer = tokenizer.backend_tokenizer.normalizer  # None where text stays as it is
    if normalizer and normalizer.normalize_str("A") == "a" and len(capitals) > MANY_CAPITALS * len(words):
        word = capitals[0]
        yield f"--vocab {settings.vocab} has words with capitals, such as {word}, but text is lower-cased: --cased?"


def _write_tables(
    folder: Path, pieces: Iterator[tuple[str, Rows]], vocab_size: int, digest: blake2b
) -> tuple[dict[str, TableWriter], dict[str, np.ndarray]]:
    """Write each part's rows into its Arrow file and add them to `digest`.

    Returns the closed writers by part, and how often each word occurs in its rows, int64 (vocab_size,).
    """
    counts = {part: np.zeros(vocab_size, dtype=np.int64) for part in PARTS}
    writers: dict[str, TableWriter] = {}
    try:
        for part, rows in pieces:
            if part not in writers:
                writers[part] = TableWriter(folder / f"{part}.arrow", vocab_size, rows)
            writers[part].write(rows)
            digest.update(part.encode() + b"".join(rows[name].tobytes() for name in sorted(rows)))
            counts[part] += np.bincount(originals(rows).ravel(), minlength=vocab_size)
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
