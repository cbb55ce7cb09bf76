#!/usr/bin/env python3
"""Make the token rows of a corpus ahead of time, and HDF5 shards of them on request.

    prepare-corpus.py --corpus 'books/*.txt'                  # fills the cache that bert-distributed.py looks into
    prepare-corpus.py --corpus 'books/*.txt' --hdf5-dir out   # also NVIDIA's and HetSeq's shards, masks included

Train from the shards with
    bert-distributed.py --corpus out/train --held-out-corpus out/held_out --vocab out/tokenizer
Other programs may want out/vocab.txt: the same words in the same order, but it does not say whether case counts.
"""

import sys
from pathlib import Path

if not __package__:  # started by its path: runs from any folder, without being installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_ddp.text.flags import add_corpus_flags, corpus_options
from common.errors import ExplainedError
from common.launch import values
from common.launch.parser import Parser


def flags() -> Parser:
    parser = Parser(__doc__)
    add_corpus_flags(parser)
    group = parser.add_argument_group("HDF5 shards")
    group.add_argument("--hdf5-dir", type=Path, metavar="DIR", help="write shards and their vocabulary here")
    group.add_argument(
        "--rows-per-shard",
        type=values.positive_int,
        default=100_000,
        metavar="N",
        help="at most; a shard is built in memory",
    )
    group.add_argument(
        "--mask-probability", type=values.probability, default=0.15, metavar="P", help="part of the tokens to mask"
    )
    group.add_argument("--whole-words", action="store_true", help="mask all tokens of a word together")
    group.add_argument("--seed", type=values.natural_int, default=0, help="of the masks")
    return parser


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    from bert_ddp.pretrain.prepare import ShardOptions, prepare  # only now: --help must not wait for torch

    masks = (args.mask_probability, args.whole_words, args.seed)
    wanted = ShardOptions(args.hdf5_dir, args.rows_per_shard, *masks) if args.hdf5_dir else None
    try:
        prepare(corpus_options(args), wanted)
    except ExplainedError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
