"""The vocabulary: from a `vocab.txt`, a tokenizer's folder or name, or trained on the corpus."""

import codecs
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers.trainers import WordPieceTrainer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bert_ddp.model.words import require_words
from common.errors import UserError
from common.files import reading

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json")  # with which a folder is a tokenizer
ALPHABET = 1000  # the most frequent characters; words with others become [UNK]


def load(name: str, lowercase: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer that `--vocab NAME` means: a `vocab.txt`, a folder, or a name on the hub.

    Raises UserError where there is none, or where it lacks a special token that BERT needs.
    """
    path = Path(name)
    with reading(path, f"--vocab {name}"):
        if path.is_dir() and {file.name for file in path.iterdir()}.isdisjoint(SETTINGS):  # vocab.txt alone
            path = path / "vocab.txt"
        if path.is_file() and path.suffix == ".json":
            raise UserError(f"--vocab {name} is one file of a tokenizer: give its folder, or a vocab.txt")
        if path.is_file():
            return from_words(_read_words(path), lowercase)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the network, the hub and its client raise many kinds
        for file in Path(name).glob("*"):
            with reading(file, f"--vocab {file}"):
                pass
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--vocab {name} is not a file, a tokenizer's folder or a name on the hub ({reason}): "
            "give a vocab.txt, or leave it out to train one on the corpus"
        ) from None
    if tokenizer.cls_token is None and tokenizer.get_vocab().keys() >= set(SPECIAL):  # without tokenizer_config.json
        named: Any = {f"{word[1:-1].lower()}_token": word for word in SPECIAL}
        tokenizer.add_special_tokens(named)
    require_words(tokenizer, name, "--vocab")
    # A tokenizer.json may contain settings for truncation and padding, but rows need the whole text.
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _read_words(path: Path) -> list[str]:
    """The words of a vocab.txt. The number of a word's line is its id, so no advice here moves a line."""
    words: list[str] = []
    seen: dict[str, int] = {}
    with reading(path, f"--vocab {path}"):
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip()  # blank lines at the end are no words
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            word = line.strip().decode()  # of ASCII's spaces: others may be words
        except UnicodeDecodeError:
            raise UserError(f"--vocab {path}, line {number} is not UTF-8 text: give one word a line") from None
        if word in seen:
            raise UserError(
                f"--vocab {path}, line {number}: {word!r} is on line {seen[word]} already: write another word there, "
                f"such as [unused{number}]: without the line, all later words would have other numbers"
            )
        seen[word] = number
        words.append(word)
    spaced = [number for number, word in enumerate(words, start=1) if len(word.split()) > 1]
    if len(spaced) > len(words) / 2:
        raise UserError(f"--vocab {path}, line {spaced[0]} has several columns or words: give one word a line")
    for token in SPECIAL:
        if token not in seen:
            raise UserError(
                f"--vocab {path} has no {token} on any of its {len(words)} lines: give a vocabulary that was made for "
                "BERT; a new line anywhere but at the end would give other words other numbers"
            )
    return words


def from_words(words: list[str], lowercase: bool) -> PreTrainedTokenizerFast:
    """BERT's tokenizer over these words, numbered in their order."""
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)}, do_lower_case=lowercase)


def train(texts: Callable[[], Iterable[str]], size: int, lowercase: bool) -> PreTrainedTokenizerFast:
    """BERT's tokenizer with at most `size` WordPiece words, learnt from `texts()`, which is called twice.

    The same texts give the same words. The library alone does not guarantee that: it numbers the characters in the
    order of a hash table, and the numbers decide between equally frequent pairs. So the characters are given to it
    first, in a fixed order.
    """
    backend = from_words(SPECIAL, lowercase).backend_tokenizer
    characters: Counter[str] = Counter()
    for text in texts():
        characters.update(backend.normalizer.normalize_str(text))
    frequent = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = sorted(character for character in frequent[:ALPHABET] if not character.isspace())
    first = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    trainer = WordPieceTrainer(
        vocab_size=max(size, len(first)), special_tokens=first, limit_alphabet=ALPHABET, show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    words = backend.get_vocab()
    return from_words(sorted(words, key=lambda word: words[word]), lowercase)


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The words in the order of their ids; an id without a word gives an empty string."""
    vocabulary = tokenizer.get_vocab()
    words = [""] * (max(vocabulary.values()) + 1)
    for word, number in vocabulary.items():
        words[number] = word
    return words
