"""What a BERT answers to lines of text: masked words, entities, classes or sentence embeddings, one dict a line.

Answers depend on the line's chunk alone and not on which rank computes it: rows are padded beside rows of their own
chunk, in an order that the lengths give.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bert_ddp.finetune.tasks import Pieces, windows
from common.uneven.precision import Precision

# A word as people write it: with @ or # before it and with dots, dashes and apostrophes inside; or any other sign.
WORD = re.compile(r"[@#]?\w+(?:[-'.&/]\w+)*|\S")


class Answerer:
    """One task on one model. `answer(lines)` gives one JSON-ready dict for each line, in order."""

    def __init__(
        self,
        task: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Precision,
        batch: int,
        length: int,
        top_k: int,
    ):
        self.model, self.tokenizer, self.precision = model.eval(), tokenizer, precision
        self.batch, self.length, self.top_k = batch, length, top_k
        self.pieces = Pieces(tokenizer)
        self.of = {"fill-mask": self._masks, "ner": self._entities, "classify": self._classes, "embed": self._embedding}
        self.answer = self.of[task]

    # --- the four tasks --------------------------------------------------------------------------------------------

    def _masks(self, lines: Sequence[str]) -> list[dict]:
        """The `top_k` likeliest words for each [MASK] of each line."""
        rows, _, cut = self._encode(lines)

        def run(inputs: dict[str, torch.Tensor]) -> Sequence[torch.Tensor]:
            where = inputs["input_ids"] == self.tokenizer.mask_token_id
            hidden = self.model.bert(**inputs).last_hidden_state[where]  # (masks, width): the vocabulary is large
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
        rows, firsts, of_line, spans = [], [], [], [list(WORD.finditer(line)) for line in lines]
        for index, found in enumerate(spans):
            words = self.pieces.of([match.group() for match in found])
            for begin, end in windows(words, room):
                cut = [word[:room] for word in words[begin:end]]
                starts = np.cumsum([1, *(len(word) for word in cut)])[:-1]
                rows.append(
                    [self.tokenizer.cls_token_id, *(p for word in cut for p in word), self.tokenizer.sep_token_id]
                )
                firsts.append(starts.tolist())
                of_line.append(index)
        tags = [[] for _ in lines]
        for index, output, starts in zip(of_line, self._outputs(rows, self._logits), firsts, strict=True):
            tags[index] += [names[number] for number in output[starts].argmax(dim=-1).tolist()]
        return [
            {"words": [match.group() for match in found], "tags": some, "entities": entities(line, found, some)}
            for line, found, some in zip(lines, spans, tags, strict=True)
        ]

    def _classes(self, lines: Sequence[str]) -> list[dict]:
        """The likeliest class and every class's probability. A tab in a line parts a pair of texts."""
        rows, segments, cut = self._encode(lines, pairs=True)
        answers = []
        for output in self._outputs(rows, self._logits, segments):
            parts = output.softmax(dim=-1).tolist()
            scores = {self.model.config.id2label[number]: _round(part) for number, part in enumerate(parts)}
            answers.append({"label": max(scores, key=scores.get), "scores": scores})
        return _mark(answers, cut)

    def _embedding(self, lines: Sequence[str]) -> list[dict]:
        """The mean over all tokens of a line, of length 1, as sentence-transformers has it for MiniLM."""
        rows, _, cut = self._encode(lines)

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            hidden = self.model(**inputs).last_hidden_state.float()  # (B, S, width)
            mask = inputs["attention_mask"].unsqueeze(-1)
            return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)

        vectors = self._outputs(rows, run)
        return _mark([{"embedding": [_round(value) for value in vector.tolist()]} for vector in vectors], cut)

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**inputs).logits.float()

    # --- rows and outputs ------------------------------------------------------------------------------------------

    def _encode(self, lines: Sequence[str], pairs: bool = False) -> tuple[list[list[int]], list | None, list[bool]]:
        """(token rows, segments of pairs or None, which lines were too long and are cut)."""
        texts, second = list(lines), None
        if pairs and any("\t" in line for line in lines):
            parted = [line.partition("\t") for line in lines]
            texts, second = [first for first, _, _ in parted], [rest for _, _, rest in parted]
        found = self.tokenizer(texts, second, truncation=True, max_length=self.length, return_overflowing_tokens=True)
        # a line that is too long gives several rows: the first is its answer's
        of_line = found["overflow_to_sample_mapping"]
        first = [index for index, line in enumerate(of_line) if index == 0 or of_line[index - 1] != line]
        cut = (
            [of_line.count(line) > 1 for line in range(len(lines))]
            if len(first) < len(of_line)
            else [False] * len(lines)
        )
        rows = [found["input_ids"][index] for index in first]
        return rows, [found["token_type_ids"][index] for index in first] if second else None, cut

    @torch.no_grad()
    def _outputs(
        self,
        rows: list[list[int]],
        run: Callable[[dict[str, torch.Tensor]], Sequence[torch.Tensor]],
        segments: list[list[int]] | None = None,
    ) -> list[torch.Tensor]:
        """What `run(inputs)` gives for each row, on the CPU; rows of like lengths go through it together."""
        results: list[torch.Tensor | None] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            longest = len(rows[chosen[0]])

            def padded(lists: list[list[int]], value: int, longest: int = longest) -> torch.Tensor:
                tensor = torch.tensor([some + [value] * (longest - len(some)) for some in lists])
                return tensor.to(self.precision.device)

            inputs = {
                "input_ids": padded([rows[index] for index in chosen], self.tokenizer.pad_token_id),
                "attention_mask": padded([[1] * len(rows[index]) for index in chosen], 0),
            }
            if segments:
                inputs["token_type_ids"] = padded([segments[index] for index in chosen], 0)
            with self.precision.autocast():
                outputs = run(inputs)
            for index, output in zip(chosen, outputs, strict=True):
                results[index] = output.cpu()
        return results


def entities(line: str, words: Sequence[re.Match], tags: Sequence[str]) -> list[dict]:
    """The entities that BIO (or BIOES) tags make, as conlleval reads them: another type or a B- begins a new one."""
    found: list[dict] = []
    before = "O"
    for match, tag in zip(words, tags, strict=True):
        if tag != "O":
            begins = tag[0] in "BS" or before == "O" or before[0] in "ES" or before[2:] != tag[2:]
            if begins:
                found.append({"type": tag[2:], "start": match.start()})
            found[-1]["end"] = match.end()
        before = tag
    return [{**entity, "text": line[entity["start"] : entity["end"]]} for entity in found]


def _mark(answers: list[dict], cut: Sequence[bool]) -> list[dict]:
    """Say so where a line was longer than the model reads."""
    return [answer | {"cut": True} if was_cut else answer for answer, was_cut in zip(answers, cut, strict=True)]


def _round(value: float) -> float:
    """Six digits: what float32 holds, so that files agree although the last bits of sums may not."""
    return float(f"{value:.6g}")
