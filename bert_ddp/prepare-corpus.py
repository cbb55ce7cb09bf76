#!/usr/bin/env python3
"""Make the token rows of a corpus ahead of time, and HDF5 shards of them where wanted.

    prepare-corpus.py --corpus 'books/*.txt'                  # fills the cache that bert-distributed.py looks into
    prepare-corpus.py --corpus 'books/*.txt' --hdf5-dir out   # also NVIDIA's and HetSeq's shards, masks included

Train from the shards with
    bert-distributed.py --corpus out/train --held-out-corpus out/held_out --vocab out/tokenizer
Other programs may want out/vocab.txt: the same words in the same order, but it cannot say whether case counts.
"""

import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from bert_ddp.text import corpus
from common.errors import RunError, UserError
from common.launch import cli
from common.record.report import say

TOKENIZER, VOCAB = "tokenizer", "vocab.txt"  # beside the shards


def flags() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=cli.Formatter, allow_abbrev=False)
    corpus.add_corpus_flags(parser)
    group = parser.add_argument_group("HDF5 shards")
    group.add_argument("--hdf5-dir", type=Path, metavar="DIR", help="write shards and their vocabulary here")
    group.add_argument(
        "--rows-per-shard", type=cli.positive_int, default=100_000, metavar="N", help="at most; made in memory"
    )
    group.add_argument("--mask-probability", type=cli.probability, default=0.15, metavar="P", help="of each token")
    group.add_argument("--whole-words", action="store_true", help="mask all tokens of a word together")
    group.add_argument("--seed", type=cli.natural_int, default=0, help="of the masks")
    return parser


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    try:
        if args.hdf5_dir:
            check_free(args.hdf5_dir)
        text = corpus.load(args, lambda line: say(None, line))
        say(None, f"{text.folder}: {text.describe()}")
        if args.hdf5_dir:
            write_shards(text, args)
    except UserError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")


def check_free(folder: Path) -> None:
    """Raises UserError where an earlier run has written: training would read its shards among the new ones."""
    for name in (*corpus.PARTS, TOKENIZER, VOCAB):
        if (folder / name).exists():
            raise UserError(
                f"--hdf5-dir {folder} holds {name} already, and shards of two runs must not mix: "
                "name a new folder, or remove this one first"
            )


def write_shards(text: corpus.Corpus, args) -> None:
    """Write `train/` and `held_out/` with shards, and their tokenizer and vocab.txt beside them: all or nothing.

    Raises UserError where such are there already, and RunError where the disk is full.
    """
    check_free(args.hdf5_dir)
    is_new = not args.hdf5_dir.exists()
    aside = args.hdf5_dir / ".unfinished"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left behind by a run that was killed
        aside.mkdir(parents=True)
        counts = _write_shards_in(aside, text, args)
        for made in sorted(aside.iterdir()):
            made.rename(args.hdf5_dir / made.name)
    except OSError as error:
        raise RunError(
            f"--hdf5-dir {args.hdf5_dir} cannot be written ({error.strerror or error}): make room there, or name "
            "another folder"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new and args.hdf5_dir.exists() and not any(args.hdf5_dir.iterdir()):
            args.hdf5_dir.rmdir()
    for name, count in counts.items():
        say(None, f"{args.hdf5_dir / name}: {count:,} rows")


def _write_shards_in(folder: Path, text: corpus.Corpus, args) -> dict[str, int]:
    """The rows of each shard by its name below `folder`."""
    from bert_ddp.pretrain import rows
    from bert_ddp.text import shards

    counts = {}
    parts = rows.of_corpus(text, args.mask_probability, args.whole_words, args.seed)
    for part, table in zip(corpus.PARTS, parts, strict=True):
        (folder / part).mkdir()
        for number, start in enumerate(range(0, len(table), args.rows_per_shard)):
            name, stop = f"{part}/shard-{number:05d}.hdf5", min(len(table), start + args.rows_per_shard)
            counts[name] = shards.write(folder / name, (rows.as_shard(table, some) for some in _pieces(start, stop)))
    (folder / TOKENIZER).mkdir()
    text.copy_tokenizer(folder / TOKENIZER)
    text.write_vocab(folder / VOCAB)
    return counts


def _pieces(start: int, stop: int, size: int = 1024):
    for begin in range(start, stop, size):
        yield range(begin, min(stop, begin + size))


if __name__ == "__main__":
    main()
