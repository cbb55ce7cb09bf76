"""Token rows of one length on disk: made once per node from text or HDF5 shards, and found again by a digest.

    cache/corpus-1a2b3c4d/train.arrow       the table of rows (see table.py)
                          held_out.arrow    for evaluation: whole documents that training never sees
                          tokenizer/        what from_pretrained reads
                          meta.json         sizes, special tokens, unigram entropy, fingerprint of the rows

The folder's name is a digest of the files' names, sizes and times and of all settings, so a second start reads no text
again. The fingerprint in meta.json depends on the rows and the vocabulary alone, so nodes can compare what they have.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from filelock import FileLock, Timeout
from transformers import AutoTokenizer

from bert_ddp.text import vocabulary
from bert_ddp.text.build import PARTS, build
from bert_ddp.text.flags import CorpusOptions
from bert_ddp.text.progress import use_plain_tqdm_lock
from bert_ddp.text.settings import settings_of
from common.errors import UserError

LOCK_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Corpus:
    """Token rows on disk: `train` and `held_out` are memory-mapped tables."""

    folder: Path
    meta: dict[str, Any]  # contents of meta.json
    train: datasets.Dataset
    held_out: datasets.Dataset
    continues: np.ndarray  # (words,) True for a word that continues another one, such as ##ing

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the rows and the vocabulary, equal on two nodes that hold the same."""
        return self.meta["fingerprint"]

    @property
    def tokenizer_folder(self) -> Path:
        """A folder that `AutoTokenizer.from_pretrained` reads."""
        return self.folder / "tokenizer"

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer's files into `folder`, such as a checkpoint."""
        for file in self.tokenizer_folder.iterdir():
            shutil.copyfile(file, folder / file.name)

    def write_vocab(self, path: Path) -> None:
        """Write the vocabulary as a vocab.txt, one word a line, with the words that were added to a tokenizer."""
        words = vocabulary.words_of(AutoTokenizer.from_pretrained(self.tokenizer_folder))
        lines = (f"{word or f'[unused-{number}]'}\n" for number, word in enumerate(words))
        path.write_text("".join(lines), encoding="utf-8")

    def describe(self) -> str:
        """One line for the log: rows, their length, words, entropy."""
        counts, meta = self.meta["rows"], self.meta
        return (
            f"{counts['train']:,} + {counts['held_out']:,} rows of {meta['sequence_length']} tokens, "
            f"{meta['vocab_size']:,} words, unigram entropy {meta['unigram_entropy']:.3f} nats"
        )


def load(options: CorpusOptions, init_from: str | None = None, rank: int | None = None) -> Corpus:
    """The corpus that the flags describe, from the cache or made now, one process at a time.

    `init_from` is a model whose vocabulary is the default for --vocab; `rank` tags the line that says what is made.
    Raises UserError for sources, vocabularies and settings that cannot work, and leaves nothing in the cache then.
    """
    settings = settings_of(options, init_from)
    cache = options.cache_dir
    folder = cache / f"corpus-{settings.key}"
    if not (folder / "meta.json").exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f".corpus-{settings.key}.lock", timeout=LOCK_SECONDS):
                if not (folder / "meta.json").exists():
                    build(folder, settings, rank)
        except Timeout:
            raise UserError(f"--cache-dir {cache}: another process has been writing there for a day: end it") from None
        except OSError as error:
            raise UserError(f"--cache-dir {cache} cannot be written: {error.strerror or error}") from None
    corpus = _open(folder)
    if options.vocab and init_from:
        _require_same_words(corpus, options.vocab, init_from)
    return corpus


def _require_same_words(corpus: Corpus, vocab: str, init_from: str) -> None:
    """Raise UserError where the model of --init-from has a vocabulary of its own, of that size, with other words."""
    try:
        theirs = vocabulary.words_of(vocabulary.load(init_from))
    except UserError:  # it has none, so --vocab says which
        return
    ours = vocabulary.words_of(AutoTokenizer.from_pretrained(corpus.tokenizer_folder))
    if len(ours) == len(theirs) and ours != theirs:
        number = next(number for number, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1)
        raise UserError(
            f"--vocab {vocab}: word {number} is {ours[number]!r}, but {theirs[number]!r} in --init-from {init_from}, "
            "whose weights were trained with its own: leave out --vocab"
        )


def _open(folder: Path) -> Corpus:
    use_plain_tqdm_lock()
    try:
        meta = json.loads((folder / "meta.json").read_text())
        train, held_out = (datasets.Dataset.from_file(str(folder / f"{name}.arrow")) for name in PARTS)
        corpus = Corpus(folder, meta, train, held_out, np.load(folder / "continues.npy"))
        next(corpus.tokenizer_folder.iterdir())
        return corpus
    except (OSError, ValueError, StopIteration) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder} of --cache-dir is damaged ({reason}): remove it, and it is made again") from None
