"""A BERT of a few thousand weights with a vocabulary of its own, and labelled data that it can learn, for tests."""

import json
import random
from pathlib import Path

NAMES = ["anna", "ben", "clara", "david", "eva"]
PLACES = ["berlin", "paris", "rome", "new york", "rio de janeiro"]
WORDS = ["the", "old", "man", "went", "to", "see", "a", "film", "in", "and", "then", "came", "home", "late", "."]


def save_model(folder: Path) -> Path:
    """A BERT of 2 layers and width 32 that `from_pretrained` loads, with random weights."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [word for phrase in (*NAMES, *PLACES, *WORDS) for word in phrase.split()]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = list(dict.fromkeys([*special, *words, *letters, *(f"##{letter}" for letter in letters), "##s"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int) -> list[list[tuple[str, str]]]:
    """Sentences of 1 to 20 (word, tag) pairs."""
    draw = random.Random(seed)
    result = []
    for _ in range(count):
        pairs = []
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.15:
                pairs.append((draw.choice(NAMES), "B-person"))
            elif kind < 0.3:
                first, *rest = draw.choice(PLACES).split()
                pairs += [(first, "B-place"), *((word, "I-place") for word in rest)]
            else:
                pairs.append((draw.choice(WORDS), "O"))
        result.append(pairs)
    return result


def save_conll(path: Path, count: int, seed: int) -> Path:
    text = "\n\n".join("\n".join("\t".join(pair) for pair in pairs) for pairs in sentences(count, seed))
    path.write_text(text + "\n")
    return path


def save_ner(folder: Path, train: int = 75, dev: int = 21, test: int = 11) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (role, count) in enumerate((("train", train), ("dev", dev), ("test", test))):
        save_conll(folder / f"{role}.conll", count, seed)
    return folder


def save_classes(folder: Path, train: int = 75, dev: int = 21) -> Path:
    """Texts with the class of whether a place is named in them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (role, count) in enumerate((("train", train), ("dev", dev))):
        lines = []
        for pairs in sentences(count, seed):
            label = "place" if any(tag == "B-place" for _, tag in pairs) else "none"
            lines.append(json.dumps({"text": " ".join(word for word, _ in pairs), "label": label}))
        (folder / f"{role}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
