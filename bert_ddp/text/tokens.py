"""From documents to token rows, in bounded memory but for 8 bytes of each document, and some more of those held out."""

from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerFast

from bert_ddp.text import sources
from bert_ddp.text.packed import packed
from bert_ddp.text.pairs import pairs
from bert_ddp.text.progress import bar
from bert_ddp.text.settings import Settings
from bert_ddp.text.table import Rows

TOGETHER = 512  # documents tokenised at once
TOGETHER_CHARACTERS = 1 << 22  # in them; beyond that no further document is added, because encodings need much memory


class Repeated:
    """How much of the held-out text is trained on too, by a number for each document."""

    def __init__(self) -> None:
        self.trained, self.held_out, self.characters = array("q"), array("q"), array("q")

    def note(self, part: str, text: str) -> None:
        """Note a document of a part; first all that are trained on."""
        (self.trained if part == "train" else self.held_out).append(hash(text))
        if part == "held_out":
            self.characters.append(len(text))

    @property
    def share(self) -> float:
        """The part of the held-out characters."""
        trained = set(self.held_out).intersection(self.trained)
        again = [number in trained for number in self.held_out]
        return float(np.asarray(self.characters)[again].sum() / max(1, sum(self.characters)))


def rows_of_text(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, special: dict[str, int], repeated: Repeated
) -> Iterator[tuple[str, Rows]]:
    """(part, rows) in pieces of bounded size; part is train or held_out. `repeated` notes the documents. Raises
    UserError for what is not text."""
    make_rows = pairs if settings.objective == "mlm+nsp" else packed
    assert settings.sequence_length is not None
    files = [*settings.files["corpus"], *settings.files["held_out_corpus"]]
    with bar("token rows", files, passes=1 if settings.held_out_corpus else 2) as progress:
        for part in ("train", "held_out"):
            tokens = _tokens(part, settings, tokenizer, repeated, progress.update)
            for rows in make_rows(tokens, settings.sequence_length, special):
                yield part, rows


def _tokens(
    part: str,
    settings: Settings,
    tokenizer: PreTrainedTokenizerFast,
    repeated: Repeated,
    advance: Callable[[int], object],
) -> Iterator[np.ndarray]:
    """The documents of one part as int32 arrays of word numbers."""
    names = settings.corpus if part == "train" else settings.held_out_corpus or settings.corpus
    chosen = (
        text
        for number, text in enumerate(sources.documents(names, advance))
        if settings.held_out is None or settings.is_held_out(number) == (part == "held_out")
    )
    backend = tokenizer.backend_tokenizer
    for together in batches(chosen):
        for text in together:
            repeated.note(part, text)
        for encoding in backend.encode_batch_fast(together, add_special_tokens=False):
            if encoding.ids:
                yield np.array(encoding.ids, dtype=np.int32)


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of at most TOGETHER texts, and of about TOGETHER_CHARACTERS at most, whatever the texts' lengths."""
    together: list[str] = []
    size = 0
    for text in texts:
        together.append(text)
        size += len(text)
        if len(together) == TOGETHER or size >= TOGETHER_CHARACTERS:
            yield together
            together, size = [], 0
    if together:
        yield together
