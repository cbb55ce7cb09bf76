"""From labelled examples to rows of tokens, and from predictions by row back to examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bert_ddp.finetune.examples import Sentence, Text
from bert_ddp.finetune.rows import IGNORE, Rows
from bert_ddp.text.pieces import Pieces, windows

ENCODE_AT_ONCE = 2000  # texts; bounds the memory of the tokenizer's intermediate objects


@dataclass(frozen=True)
class LabelledRows:
    """Rows, and the correct answers to compare predictions with."""

    rows: Rows
    gold: list[Any]  # ner: the tags of each sentence; classify: the class of each text
    sentence_of: np.ndarray | None  # ner: (rows,) a row's sentence; None for classify
    cut: int = 0  # classify: texts that are longer than a row

    def answers(self, predicted: Mapping[int, list[int]], names: Mapping[int, str]) -> list[Any]:
        """Predictions by row (numbers of labels) as names, in the form of `gold`."""
        if self.sentence_of is None:
            return [names[predicted[row][0]] for row in range(len(self.rows))]
        tags: list[list[str]] = [[] for _ in self.gold]
        for row, sentence in enumerate(self.sentence_of):
            tags[sentence] += [names[label] for label in predicted[row]]
        return tags


def encode_sentences(
    sentences: Sequence[Sentence], names: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> LabelledRows:
    """Rows of at most `length` tokens with the label on each word's first piece.

    A sentence too long for one row becomes several, so that every word is labelled, and scored, once.
    """
    number = {name: index for index, name in enumerate(names)}
    pieces = Pieces(tokenizer)
    begin, end, room = tokenizer.cls_token_id, tokenizer.sep_token_id, length - 2
    rows, labels, sentence_of = [], [], []
    for index, sentence in enumerate(sentences):
        words = pieces.of(sentence.words)
        for first, last in windows(words, room):
            row, marks = [begin], [IGNORE]
            for word, tag in zip(words[first:last], sentence.tags[first:last], strict=True):
                row += word[:room]
                marks += [number[tag]] + [IGNORE] * (min(len(word), room) - 1)
            rows.append(np.asarray([*row, end], dtype=np.int32))
            labels.append(np.asarray([*marks, IGNORE], dtype=np.int32))
            sentence_of.append(index)
    encoded = Rows(rows, labels, None, tokenizer.pad_token_id, [begin, end])
    return LabelledRows(encoded, [sentence.tags for sentence in sentences], np.asarray(sentence_of))


def encode_texts(
    texts: Sequence[Text], names: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> LabelledRows:
    """One row for each text or pair, cut to `length` tokens; of a pair the longer text is cut first."""
    number = {name: index for index, name in enumerate(names)}
    rows: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    cut = 0
    for start in range(0, len(texts), ENCODE_AT_ONCE):
        some = texts[start : start + ENCODE_AT_ONCE]
        pairs = [text.pair for text in some] if some[0].pair is not None else None
        found = tokenizer([text.text for text in some], pairs, truncation=True, max_length=length)
        rows += [np.asarray(row, dtype=np.int32) for row in found["input_ids"]]
        cut += sum(bool(encoding.overflowing) for encoding in found.encodings or ())
        segments += [np.asarray(row, dtype=np.int32) for row in found["token_type_ids"]] if pairs else []
    labels = [number[text.label] for text in texts]
    empty = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    encoded = Rows(rows, labels, segments or None, tokenizer.pad_token_id, empty)
    return LabelledRows(encoded, [text.label for text in texts], None, cut)
