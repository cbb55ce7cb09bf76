"""The words that a tokenizer's files hold."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from common.errors import UserError


def require_words(tokenizer: PreTrainedTokenizerBase, source: str, flag: str) -> None:
    """Raise UserError unless this tokenizer has the special words of a BERT, by whatever names; and where it was opened
    from a folder, `source` of `flag`, unless its files hold them. transformers makes a tokenizer of no files too, and
    appends a special word that is missing, which with vocab.txt gives later words other numbers."""
    name, words = f"{flag} {source}", _words_in(Path(source), f"{flag} {source}")
    for kind in ("cls", "sep", "pad", "unk", "mask"):
        word = getattr(tokenizer, f"{kind}_token")
        if getattr(tokenizer, f"{kind}_token_id") is None or (words is not None and word not in words):
            shown = word or f"[{kind.upper()}]"
            raise UserError(f"{name}: its vocabulary has no {shown}: give one that was made for BERT")
    if not tokenizer.is_fast:
        raise UserError(f"{name} has no tokenizer.json or vocab.txt: give a tokenizer that has one")


def _words_in(folder: Path, name: str) -> set[str] | None:
    """The words in tokenizer.json, or else vocab.txt; None for a name on the hub, and for SentencePiece's files."""
    if not folder.is_dir() or any(folder.glob("*.model")):
        return None
    if (folder / "tokenizer.json").is_file():
        content = json.loads((folder / "tokenizer.json").read_bytes())  # transformers has read it, so it is whole
        vocab = content["model"]["vocab"]
        words = vocab if isinstance(vocab, dict) else [word for word, _ in vocab]
        return {*words, *(one["content"] for one in content.get("added_tokens") or ())}
    if (folder / "vocab.txt").is_file():
        words = (folder / "vocab.txt").read_text("utf-8").split("\n")  # splitlines() would split at some words
        if words[0].startswith("\ufeff"):
            raise UserError(f"{name}: vocab.txt begins with a byte order mark, which would be a part of its first word")
        return {word.rstrip("\r") for word in words}
    raise UserError(f"{name} has no tokenizer: copy tokenizer.json or vocab.txt into it, from where the model is")
