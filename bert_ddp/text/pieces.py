"""Words as WordPiece ids, and sentences of words as windows that fit into a row."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

KNOWN_WORDS = 200_000  # whose pieces are kept in memory


class Pieces:
    """Words as lists of WordPiece ids. A word that was tokenized before is looked up.

    At most `most` words are kept in memory, at about 0.6 kB each, because a large file never runs out of new words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int = KNOWN_WORDS):
        self.tokenizer, self.most = tokenizer, most
        self.known: dict[str, list[int]] = {}

    def of(self, words: Sequence[str]) -> list[list[int]]:
        """The pieces of each word, at least one."""
        if len(self.known) > self.most:
            self.known.clear()  # common words are soon looked up again
        new = [word for word in dict.fromkeys(words) if word not in self.known]
        if new:
            found = self.tokenizer(new, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            # a word such as a lone joiner between emoji has no piece, but it still has a label
            self.known.update(
                (word, ids or [self.tokenizer.unk_token_id]) for word, ids in zip(new, found, strict=True)
            )
        return [self.known[word] for word in words]


def windows(pieces: Sequence[Sequence[int]], room: int) -> Iterator[tuple[int, int]]:
    """Ranges of words whose pieces fit into `room` tokens. A word longer than that is a range of its own, and the
    caller cuts it."""
    begin, used = 0, 0
    for index, word in enumerate(pieces):
        if index > begin and used + len(word) > room:
            yield begin, index
            begin, used = index, 0
        used += len(word)
    if pieces:
        yield begin, len(pieces)
