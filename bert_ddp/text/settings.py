"""All settings that the token rows depend on, checked. The name of a cache folder is a digest of them."""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from bert_ddp.text import sources
from bert_ddp.text.flags import CorpusOptions
from common.errors import UserError
from common.files import reading
from common.uneven.seeding import derive_seed

FORMAT = 6  # raise it when the same settings give other rows, so that old caches are not used
SHORTEST = 8  # tokens in a row
FLAGS = {"corpus": "--corpus", "held_out_corpus": "--held-out-corpus"}
Stamp = tuple[str, int, int]  # a file's path, size in bytes, and time of change in nanoseconds


@dataclass(frozen=True)
class Settings:
    """All that the rows depend on, as JSON types."""

    format: int
    corpus: list[str]
    held_out_corpus: list[str] | None
    files: dict[str, list[Stamp]]  # by the names in FLAGS
    data_set_files: list[Stamp]
    shards: bool  # HDF5 shards instead of text
    held_out: float | None  # part of the documents; None where other text is held out
    vocab: str | None
    vocab_stamp: list[Stamp]
    vocab_size: int | None  # of a vocabulary that is trained
    lowercase: bool
    sequence_length: int | None  # tokens; None: that of the shards
    objective: str
    masking: str

    @property
    def key(self) -> str:
        """Twelve hex digits that identify these settings."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=6).hexdigest()

    def is_held_out(self, number: int) -> bool:
        """True if document (or row) `number` is held out. Does not depend on seeds and layouts."""
        assert self.held_out is not None
        return derive_seed(0, "held out", number) < self.held_out * 2**63


def settings_of(options: CorpusOptions, init_from: str | None) -> Settings:
    """The settings that the flags describe. `init_from` is a model whose vocabulary is the default for --vocab.

    Raises UserError for a combination that cannot work, and where a flag names no file.
    """
    names = {"corpus": options.corpus, "held_out_corpus": options.held_out_corpus or []}
    files = {name: sources.find_files(given, FLAGS[name]) for name, given in names.items()}
    shards = _are_shards(names, files)
    vocab = options.vocab or init_from
    if shards and not vocab:
        raise UserError(f"--corpus {files['corpus'][0]} holds token ids: give the --vocab that they were made with")
    if options.masking == "stored" and not shards:
        raise UserError("--masking stored takes its masks from HDF5 shards, but --corpus names text: use dynamic")
    if options.sequence_length and options.sequence_length < SHORTEST:
        raise UserError(f"--sequence-length is {options.sequence_length}: give {SHORTEST} or more")
    return Settings(
        format=FORMAT,
        corpus=options.corpus,
        held_out_corpus=options.held_out_corpus,
        files={name: [_stamp(file) for file in found] for name, found in files.items()},
        data_set_files=[_stamp(file) for given in names.values() for file in sources.data_set_files(given)],
        shards=shards,
        held_out=None if options.held_out_corpus else options.held_out,
        vocab=vocab,
        vocab_stamp=[_stamp(file) for file in _vocabulary_files(vocab)],
        vocab_size=None if vocab else options.vocab_size,
        lowercase=not options.cased,
        sequence_length=options.sequence_length or (None if shards else 128),
        objective=options.objective,
        masking=options.masking,
    )


def _are_shards(names: dict[str, list[str]], files: dict[str, list[Path]]) -> bool:
    """True if the flags name HDF5 shards. Raises UserError if they name both shards and text."""
    found = files["corpus"] + files["held_out_corpus"]
    shards = sources.is_hdf5(found)
    for name, flag in FLAGS.items():
        for given in names[name]:
            if shards and sources.is_no_file(given):
                raise UserError(f"{flag} is {given}, which is text, but {found[0]} is an HDF5 shard: give one kind")
    return shards


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def _vocabulary_files(vocab: str | None) -> list[Path]:
    if vocab is None:
        return []
    path = Path(vocab)
    with reading(path, f"--vocab {vocab}"):
        return [path] if path.is_file() else sorted(file for file in path.glob("*[vt]o*") if file.is_file())
