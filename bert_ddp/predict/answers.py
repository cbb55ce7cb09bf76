"""A BERT's answers to lines of text: masked words, entities, classes or sentence embeddings, one dict a line.

An answer depends on the chunk that the line is in, and not on the rank that computes it: rows are batched and padded
with rows of their own chunk, in the order of their lengths.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bert_ddp.text.pieces import Pieces, windows
from common.errors import RunError
from common.run.precision import Precision

# A word, maybe with @ or # before it and with dots, dashes or apostrophes inside; or any other character.
WORD = re.compile(r"[@#]?\w+(?:[-'.&/]\w+)*|\S")


class Answerer:
    """One task on one model. `answer(lines)` returns one dict for each line, in order, ready for JSON."""

    def __init__(
        self,
        task: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Precision,
        batch: int,  # rows in one forward
        length: int,  # most tokens in a row
        top_k: int,  # words for each [MASK]
    ):
        self.model, self.tokenizer, self.precision = model.eval(), tokenizer, precision
        self.batch, self.length, self.top_k = batch, length, top_k
        self.pieces = Pieces(tokenizer)
        tasks = {"fill-mask": self._masks, "ner": self._entities, "classify": self._classes, "embed": self._embedding}
        self.answer: Callable[[Sequence[str]], list[dict]] = tasks[task]

    # --- the four tasks --------------------------------------------------------------------------------------------

    def _masks(self, lines: Sequence[str]) -> list[dict]:
        """The `top_k` likeliest words for each [MASK] of each line."""
        rows, _, cut = self._encode(lines)

        def run(inputs: dict[str, torch.Tensor]) -> Sequence[torch.Tensor]:
            where = inputs["input_ids"] == self.tokenizer.mask_token_id
            # the vocabulary is large, so only these positions are projected to it
            hidden = self.model.bert(**inputs).last_hidden_state[where]  # (masks, width)
            best = self.model.cls(hidden).float().softmax(dim=-1).topk(min(self.top_k, self.model.config.vocab_size))
            both = torch.stack([best.indices.double(), best.values.double()], dim=-1)  # (masks, top_k, 2)
            return both.split(where.sum(dim=1).tolist())

        answers = []
        for output in self._outputs(rows, run):
            masks = []
            for pairs in output.tolist():
                words = self.tokenizer.convert_ids_to_tokens([int(number) for number, _ in pairs])
                masks.append([{"token": w, "score": _round(s)} for w, (_, s) in zip(words, pairs, strict=True)])
            answers.append({"masks": masks})
        return _mark(answers, cut)

    def _entities(self, lines: Sequence[str]) -> list[dict]:
        """Words, a tag for each, and the entities that the tags make, with their places in the line."""
        names, room = self.model.config.id2label, self.length - 2
        begins, ends = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        spans = [list(WORD.finditer(line)) for line in lines]
        rows, firsts, of_line = [], [], []  # tokens; where each word's first piece is; the row's line
        for index, found in enumerate(spans):
            words = self.pieces.of([match.group() for match in found])
            for first, last in windows(words, room):
                cut = [word[:room] for word in words[first:last]]
                rows.append([begins, *(piece for word in cut for piece in word), ends])
                firsts.append(np.cumsum([1, *(len(word) for word in cut)])[:-1].tolist())
                of_line.append(index)
        tags: list[list[str]] = [[] for _ in lines]
        for index, output, starts in zip(of_line, self._outputs(rows, self._logits), firsts, strict=True):
            tags[index] += [names[number] for number in output[starts].argmax(dim=-1).tolist()]
        return [
            {"words": [match.group() for match in found], "tags": some, "entities": entities(line, found, some)}
            for line, found, some in zip(lines, spans, tags, strict=True)
        ]

    def _classes(self, lines: Sequence[str]) -> list[dict]:
        """The likeliest class and every class's probability. A tab in a line separates the texts of a pair."""
        rows, segments, cut = self._encode(lines, pairs=True)
        answers = []
        for output in self._outputs(rows, self._logits, segments):
            probabilities = output.softmax(dim=-1).tolist()
            scores = {self.model.config.id2label[number]: _round(value) for number, value in enumerate(probabilities)}
            answers.append({"label": max(scores, key=lambda name: scores[name]), "scores": scores})
        return _mark(answers, cut)

    def _embedding(self, lines: Sequence[str]) -> list[dict]:
        """The mean over a line's tokens, scaled to length 1, as sentence-transformers does for MiniLM."""
        rows, _, cut = self._encode(lines)

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            hidden = self.model(**inputs).last_hidden_state.float()  # (batch, tokens, width)
            mask = inputs["attention_mask"].unsqueeze(-1)
            return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)

        vectors = self._outputs(rows, run)
        return _mark([{"embedding": [_round(value) for value in vector.tolist()]} for vector in vectors], cut)

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**inputs).logits.float()

    # --- rows and outputs ------------------------------------------------------------------------------------------

    def _encode(
        self, lines: Sequence[str], pairs: bool = False
    ) -> tuple[list[list[int]], list[list[int]] | None, list[bool]]:
        """(tokens of each line, their segments where there are pairs or else None, which lines are cut)."""
        texts, second = list(lines), None
        if pairs and any("\t" in line for line in lines):
            both = [line.partition("\t") for line in lines]
            texts, second = [first for first, _, _ in both], [rest for _, _, rest in both]
        found = self.tokenizer(texts, second, truncation=True, max_length=self.length, return_overflowing_tokens=True)
        # A line that is too long gives several rows, one after the other; the first of them is kept.
        of_line = np.asarray(found["overflow_to_sample_mapping"])
        _, first, rows_of = np.unique(of_line, return_index=True, return_counts=True)
        rows = [found["input_ids"][index] for index in first]
        segments = [found["token_type_ids"][index] for index in first] if second else None
        return rows, segments, (rows_of > 1).tolist()

    @torch.no_grad()
    def _outputs(
        self,
        rows: list[list[int]],
        run: Callable[[dict[str, torch.Tensor]], Iterable[torch.Tensor]],
        segments: list[list[int]] | None = None,
    ) -> list[torch.Tensor]:
        """The result of `run(inputs)` for each row, on the CPU. Rows of similar length go through it together."""
        results: dict[int, torch.Tensor] = {}
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            unpadded: dict[str, Any] = {"input_ids": [rows[index] for index in chosen]}
            if segments:
                unpadded["token_type_ids"] = [segments[index] for index in chosen]
            inputs = self.tokenizer.pad(unpadded, return_tensors="pt").to(self.precision.device)
            with self.precision.autocast():
                outputs = [output.cpu() for output in run(dict(inputs))]
            if not all(output.isfinite().all() for output in outputs):
                raise RunError(
                    f"the model's answers are NaN or infinity in {self.precision.name}: are its weights damaged, or "
                    "too large for that --precision?"
                )
            results.update(zip(chosen, outputs, strict=True))
        return [results[index] for index in range(len(rows))]


def entities(line: str, words: Sequence[re.Match], tags: Sequence[str]) -> list[dict]:
    """The entities that BIO (or BIOES) tags make, as conlleval reads them: another type, or B-, begins a new one. A tag
    without such a letter, such as NOUN, is a type by itself."""
    found: list[dict] = []
    before = "O", ""
    for match, tag in zip(words, tags, strict=True):
        letter, kind = (tag[0], tag[2:]) if tag[1:2] == "-" else ("O", "") if tag == "O" else ("I", tag)
        if letter != "O":
            if letter in "BS" or before[0] in "OES" or before[1] != kind:
                found.append({"type": kind, "start": match.start()})
            found[-1]["end"] = match.end()
        before = letter, kind
    return [{**entity, "text": line[entity["start"] : entity["end"]]} for entity in found]


def _mark(answers: list[dict], cut: Sequence[bool]) -> list[dict]:
    """`answers` with a note where the line was longer than the model reads."""
    return [answer | {"cut": True} if was_cut else answer for answer, was_cut in zip(answers, cut, strict=True)]


def _round(value: float) -> float:
    """Six digits, which float32 holds: files agree even where sums differ in their last bits."""
    return float(f"{value:.6g}")
