"""What prepare-corpus.py does: fill the cache, and write HDF5 shards of it on request."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bert_ddp.pretrain import rows
from bert_ddp.text import corpus, shards
from bert_ddp.text.build import PARTS
from bert_ddp.text.flags import CorpusOptions
from common.console import say
from common.errors import RunError, UserError

TOKENIZER, VOCAB = "tokenizer", "vocab.txt"  # beside the shards
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class ShardOptions:
    """Which shards to write, as typed."""

    folder: Path  # --hdf5-dir
    rows_per_shard: int  # at most
    mask_probability: float
    whole_words: bool
    seed: int  # of the masks


def prepare(options: CorpusOptions, wanted: ShardOptions | None) -> None:
    """Make the token rows, or find them in the cache, and write the `wanted` shards.

    Raises UserError for flags and files that cannot work, and RunError where the disk is full.
    """
    if wanted:
        check_free(wanted.folder)
    text = corpus.load(options)
    say(f"{text.folder}: {text.describe()}")
    if wanted:
        write_shards(text, wanted)


def check_free(folder: Path) -> None:
    """Raise UserError if an earlier run has written here: training would read its shards and the new ones together."""
    for name in (*PARTS, TOKENIZER, VOCAB):
        if (folder / name).exists():
            raise UserError(
                f"--hdf5-dir {folder} holds {name} already, and shards of two runs must not mix: "
                "name a new folder, or remove this one first"
            )


def write_shards(text: corpus.Corpus, options: ShardOptions) -> None:
    """Write `train/` and `held_out/` with shards, and their tokenizer and vocab.txt beside them: all or nothing.

    Raises UserError if such files exist already, and RunError where the disk is full.
    """
    folder = options.folder
    check_free(folder)
    is_new = not folder.exists()
    aside = folder / ".unfinished"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left by a run that was killed
        aside.mkdir(parents=True)
        counts = _write_shards_in(aside, text, options)
        for made in sorted(aside.iterdir()):
            made.rename(folder / made.name)
    except OSError as error:
        raise RunError(
            f"--hdf5-dir {folder} cannot be written ({error.strerror or error}): make room there, or name another "
            "folder"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    for name, count in counts.items():
        say(f"{folder / name}: {count:,} rows")


def _write_shards_in(folder: Path, text: corpus.Corpus, options: ShardOptions) -> dict[str, int]:
    """The rows of each shard by its name below `folder`."""
    counts = {}
    parts = rows.of_corpus(text, options.mask_probability, options.whole_words, options.seed)
    for part, table in zip(PARTS, parts, strict=True):
        (folder / part).mkdir()
        for number, start in enumerate(range(0, len(table), options.rows_per_shard)):
            name, stop = f"{part}/shard-{number:05d}.hdf5", min(len(table), start + options.rows_per_shard)
            counts[name] = shards.write(folder / name, (rows.as_shard(table, some) for some in _pieces(start, stop)))
    (folder / TOKENIZER).mkdir()
    text.copy_tokenizer(folder / TOKENIZER)
    text.write_vocab(folder / VOCAB)
    return counts


def _pieces(start: int, stop: int) -> Iterator[range]:
    for begin in range(start, stop, ROWS_AT_ONCE):
        yield range(begin, min(stop, begin + ROWS_AT_ONCE))
