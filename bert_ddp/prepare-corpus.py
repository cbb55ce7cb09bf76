#!/usr/bin/env python3
"""Make the token rows of a corpus ahead of time, and HDF5 shards of them where wanted.

    prepare-corpus.py --corpus 'books/*.txt'                  # fills the cache that bert-distributed.py looks into
    prepare-corpus.py --corpus 'books/*.txt' --hdf5-dir out   # also NVIDIA's and HetSeq's shards, masks included

Train from the shards with
    bert-distributed.py --corpus out/train --held-out-corpus out/held_out --vocab out/vocab.txt
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from bert_ddp import corpus
from common import cli
from common.errors import UserError
from common.report import say


def flags() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=cli.Formatter, allow_abbrev=False)
    corpus.add_corpus_flags(parser)
    group = parser.add_argument_group("HDF5 shards")
    group.add_argument("--hdf5-dir", type=Path, metavar="DIR", help="write shards and vocab.txt here")
    group.add_argument("--rows-per-shard", type=cli.positive_int, default=100_000, metavar="N", help="at most")
    group.add_argument("--mask-probability", type=cli.probability, default=0.15, metavar="P", help="of each token")
    group.add_argument("--whole-words", action="store_true", help="mask all tokens of a word together")
    group.add_argument("--seed", type=cli.natural_int, default=0, help="of the masks")
    return parser


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    try:
        text = corpus.load(args, lambda line: say(None, line))
        say(None, f"{text.folder}: {text.describe()}")
        if args.hdf5_dir:
            write_shards(text, args)
    except UserError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")


def write_shards(text: corpus.Corpus, args) -> None:
    """Write `train/` and `held_out/` with shards, and vocab.txt beside them."""
    from bert_ddp import rows, shards

    parts = rows.of_corpus(text, args.mask_probability, args.whole_words, args.seed)
    for name, part in zip(corpus.PARTS, parts, strict=True):
        folder = args.hdf5_dir / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--hdf5-dir {args.hdf5_dir} cannot be written: {error.strerror}") from None
        for number, start in enumerate(range(0, len(part), args.rows_per_shard)):
            path = folder / f"shard-{number:05d}.hdf5"
            stop = min(len(part), start + args.rows_per_shard)
            count = shards.write(path, (rows.as_shard(part, piece) for piece in _pieces(start, stop)))
            say(None, f"{path}: {count:,} rows")
    text.write_vocab(args.hdf5_dir / "vocab.txt")


def _pieces(start: int, stop: int, size: int = 1024):
    for begin in range(start, stop, size):
        yield range(begin, min(stop, begin + size))


if __name__ == "__main__":
    main()
