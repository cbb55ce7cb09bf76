"""The words of a vocabulary, as vocab.txt and tokenizer.json have them."""

import codecs
import json
from pathlib import Path

from common.errors import UserError
from common.files import reading

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def require_words(folder: Path, name: str) -> None:
    """Raise UserError unless this folder, which a flag has called `name`, holds a vocabulary with BERT's special words.
    transformers would make an empty one, or append a word that is missing, which gives later words other numbers."""
    if not folder.is_dir():
        return
    file = folder / "tokenizer.json"
    with reading(file, f"{name}/{file.name}"):
        is_there = file.is_file()
    if is_there:
        try:
            content = json.loads(file.read_bytes())
            vocab = content["model"]["vocab"]
            words = {*(vocab if isinstance(vocab, dict) else [word for word, _ in vocab])}
            words |= {one["content"] for one in content.get("added_tokens") or ()}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{name}/{file.name} is not a tokenizer: {type(error).__name__}: copy it again") from None
        if missing := [word for word in SPECIAL if word not in words]:
            raise UserError(f"{name}/{file.name} has no {missing[0]}: give a vocabulary that was made for BERT")
    elif (folder / "vocab.txt").is_file():
        read_words(folder / "vocab.txt", f"{name}/vocab.txt")
    elif not any(folder.glob("*.model")):  # of SentencePiece, which transformers converts
        raise UserError(f"{name} has no tokenizer: copy tokenizer.json or vocab.txt into it, from where the model is")


def read_words(path: Path, name: str) -> list[str]:
    """The words of a vocab.txt, which a flag has called `name`. The number of a word's line is its id, so no advice
    here moves a line."""
    words: list[str] = []
    seen: dict[str, int] = {}
    with reading(path, name):
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip()  # blank lines at the end are no words
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            word = line.decode().strip()
        except UnicodeDecodeError:
            raise UserError(f"{name}, line {number} is not UTF-8 text: give one word a line") from None
        if word in seen:
            raise UserError(
                f"{name}, line {number}: {word!r} is on line {seen[word]} already: write another word there, "
                f"such as [unused{number}]: without the line, all later words would have other numbers"
            )
        seen[word] = number
        words.append(word)
    spaced = [number for number, word in enumerate(words, start=1) if len(word.split()) > 1]
    if len(spaced) > len(words) / 2:
        raise UserError(f"{name}, line {spaced[0]} has several columns or words: give one word a line")
    for token in SPECIAL:
        if token not in seen:
            raise UserError(
                f"{name} has no {token} on any of its {len(words)} lines: give a vocabulary that was made for "
                "BERT; a new line anywhere but at the end would give other words other numbers"
            )
    return words
