"""Read the data of fine-tuning: from the flags to tokenized training and held-out rows."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from bert_ddp.finetune import whole
from bert_ddp.finetune.encoding import LabelledRows, encode_sentences, encode_texts
from bert_ddp.finetune.examples import Sentence, Text, check_labels, label_names
from bert_ddp.finetune.rows import Rows
from bert_ddp.finetune.sources import (
    DataOptions,
    find_sources,
    has_unlabelled_test,
    odd_columns,
    odd_files,
    read_sentences,
    read_texts,
)
from common.errors import UserError

SHOWN_NAMES = 8  # of files, in an error
MANY_UNKNOWN = 0.3  # part of a set's tokens


@dataclass(frozen=True)
class TaskData:
    """Tokenized training rows, held-out sets by role, and the names of the labels."""

    train: Rows
    held_out: dict[str, LabelledRows]  # dev, and test where there is one
    names: list[str]
    fingerprint: str
    facts: str  # for the header
    notes: list[str]  # what is left out or cut


def _names_in(data: str) -> str:
    """What a folder holds, for an error."""
    names = sorted(path.name for path in Path(data).iterdir()) if Path(data).is_dir() else []
    return ", ".join(names[:SHOWN_NAMES] + ["..."] * (len(names) > SHOWN_NAMES)) or "nothing that can be read"


def load(options: DataOptions, tokenizer: PreTrainedTokenizerBase, length: int) -> TaskData:
    """Read and tokenize the data of a task, in rows of at most `length` tokens.

    Raises UserError that names file and line, RunError where the hub does not answer.
    """
    sources, notes = find_sources(options), []
    if missing := [role for role in ("train", "dev") if role not in sources]:
        where = f" in --data {options.data}, which holds {_names_in(options.data)}" if options.data else ""
        raise UserError(
            f"there is no {missing[0]} data{where}: name a file or hf:NAME with --{missing[0]}, or all with --data"
        )
    if has_unlabelled_test(options, sources):
        notes.append(f"{sources.pop('test')}: its test split has no labels and is left out: --test names another")
    if options.task == "ner":
        names, sets = _load_sentences(sources, tokenizer, length, notes)
    else:
        names, sets = _load_texts(sources, options, tokenizer, length, notes)
    notes += [*odd_files(options, sources), *odd_columns(options, sources)]
    notes += _odd_words(sets, sources, tokenizer)
    if cut := [f"{some.cut:,} of {len(some.gold):,} {role}" for role, some in sets.items() if some.cut]:
        notes.append(f"texts cut to {length} tokens: {', '.join(cut)}: a larger --max-length reads more of them")
    counts = " + ".join(f"{len(some.gold):,} {role}" for role, some in sets.items())
    train = sets.pop("train").rows
    facts = f"{counts} examples, {len(names)} labels, {train.lengths.mean():.1f} tokens a row"
    return TaskData(train, sets, names, _fingerprint(train, names, sets), facts, notes)


def _odd_words(
    sets: Mapping[str, LabelledRows], sources: Mapping[str, str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """A line for each set of which the model's vocabulary lacks many words. Raises UserError where it has none."""
    for role, some in sets.items():
        words = int((~np.isin(some.rows.tokens, (tokenizer.cls_token_id, tokenizer.sep_token_id))).sum())
        unknown = int((some.rows.tokens == tokenizer.unk_token_id).sum())
        if role == "train" and unknown == words:
            raise UserError(
                f"{sources[role]}: the vocabulary of --model has no word of it: give a model of its language"
            )
        if unknown > MANY_UNKNOWN * words:
            yield f"{sources[role]}: {unknown / words:.0%} of its tokens are not in the vocabulary of --model"


def _load_sentences(
    sources: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, length: int, notes: list[str]
) -> tuple[list[str], dict[str, LabelledRows]]:
    examples: dict[str, list[Sentence]] = {role: read_sentences(source, role) for role, source in sources.items()}
    names = label_names(examples["train"])
    for some in examples.values():
        check_labels(some, names)
    notes += whole.odd(examples, sources)
    return names, {role: encode_sentences(some, names, tokenizer, length) for role, some in examples.items()}


def _load_texts(
    sources: Mapping[str, str],
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    notes: list[str],
) -> tuple[list[str], dict[str, LabelledRows]]:
    columns = options.text_columns, options.label_column
    examples: dict[str, list[Text]] = {role: read_texts(source, role, *columns) for role, source in sources.items()}
    names = label_names(examples["train"])
    for some in examples.values():
        check_labels(some, names)
    notes += whole.odd(examples, sources)
    return names, {role: encode_texts(some, names, tokenizer, length) for role, some in examples.items()}


def _fingerprint(train: Rows, names: Sequence[str], held_out: Mapping[str, LabelledRows]) -> str:
    """Sixteen hex digits of all rows and the names of the labels."""
    digest = hashlib.blake2b(" ".join([train.fingerprint(), *names]).encode(), digest_size=8)
    for some in held_out.values():
        digest.update(some.rows.fingerprint().encode())
    return digest.hexdigest()
