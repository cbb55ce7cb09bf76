"""The flags that describe the corpus. Imports nothing heavy, so that --help answers at once."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from dataclasses import dataclass, fields
from pathlib import Path

from bert_ddp.text.sources import PYTHON_DOCS
from common.launch import values

OBJECTIVES = ("mlm", "mlm+nsp")
# The rows have a fingerprint, so two groups of flags need no comparison of their own:
PATHS = ("corpus", "held_out_corpus", "vocab", "cache_dir")  # may differ between nodes
SETTINGS = ("held_out", "vocab_size", "cased", "sequence_length", "objective", "masking")


@dataclass(frozen=True)
class CorpusOptions:
    """Which text becomes which token rows, as typed; None for a flag that was left out."""

    corpus: list[str]
    held_out_corpus: list[str] | None
    held_out: float  # part of the documents, above 0 and below 1
    vocab: str | None
    vocab_size: int  # of a vocabulary that is trained
    cased: bool
    sequence_length: int | None  # tokens
    objective: str  # one of OBJECTIVES
    masking: str  # dynamic or stored
    cache_dir: Path


def corpus_options(args: Namespace) -> CorpusOptions:
    """What the flags of `add_corpus_flags` say."""
    return CorpusOptions(**{field.name: getattr(args, field.name) for field in fields(CorpusOptions)})


def add_corpus_flags(parser: ArgumentParser) -> _ArgumentGroup:
    """Add the flags that `corpus_options` reads, in a group of --help. Returns the group."""
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--corpus",
        nargs="+",
        default=[PYTHON_DOCS],
        metavar="NAME",
        help="text or HDF5 files, folders, globs, or hf:NAME,CONFIG; the default comes with Python",
    )
    group.add_argument("--held-out-corpus", nargs="+", metavar="NAME", help="evaluate on these instead of --held-out")
    group.add_argument("--held-out", type=_fraction, default=0.05, metavar="P", help="part of the documents held out")
    group.add_argument("--vocab", metavar="NAME", help="vocab.txt, tokenizer folder or hub name; trained if left out")
    group.add_argument(
        "--vocab-size", type=values.positive_int, default=8192, metavar="V", help="of a trained vocabulary"
    )
    group.add_argument("--cased", action="store_true", help="distinguish upper and lower case")
    group.add_argument(
        "--sequence-length", type=values.positive_int, metavar="L", help="tokens in a row (128; that of the shards)"
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
    value = values.probability(text)
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is not allowed: give a number above 0 and below 1")
    return value
