"""Token rows, masked a batch at a time.

Shapes: B rows, L tokens in a row, P masked tokens in a row at most.

Which tokens are masked depends on (seed, epoch, row), and not on the layout. *How many* depends on the row alone
(`MaskedRows.counts`), so every rank knows the count of every optimizer step without asking the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.uneven.loading import BatchedDataset
from common.uneven.seeding import derive_seed

if TYPE_CHECKING:  # every process of a loader imports this module, and need not import what makes a corpus
    from bert_ddp.text.corpus import Corpus

IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out
SHARE_MASKED, SHARE_RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stay as they are. Devlin et al. 2019, 3.1


class Batch(NamedTuple):
    """Rows after masking, and the words that were masked."""

    input_ids: torch.Tensor  # (B, L)
    token_type_ids: torch.Tensor  # (B, L) 0 in the first segment, 1 in the second
    attention_mask: torch.Tensor | None  # (B, L) True where there is a token; None where no row has padding
    positions: torch.Tensor  # (B, P) of the masked tokens, then 0
    labels: torch.Tensor  # (B, P) the words that were there, then IGNORED
    next_labels: torch.Tensor  # (B,) 1 where the second segment is from elsewhere

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        """What the model takes."""
        names = ("input_ids", "token_type_ids", "attention_mask", "positions")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen. With `seed` None each row has one fixed choice, for evaluation."""

    probability: float
    whole_words: bool
    seed: int | None


class MaskedRows(BatchedDataset):
    """Rows of a table, masked as they are read.

    Masks are those of the epoch that the indices carry (`common.uneven.sampling.Indices`), or else of epoch 0. `counts`
    (rows,) says how many tokens of each row are masked.
    """

    def __init__(
        self, table: Any, meta: dict[str, Any], masking: Masking, padded: bool, continues: np.ndarray | None = None
    ):
        """`table` returns columns as arrays for a list of row numbers, like a `datasets.Dataset` in numpy format.

        `meta` is the corpus' meta.json; `padded` says whether any row has padding; `continues` (words,) is True for a
        word that continues another, such as ##ing, and is needed for whole words only.
        """
        self.table, self.meta, self.masking, self.padded, self.continues = table, meta, masking, padded, continues
        special = [meta["special"][name] for name in ("cls", "sep", "pad", "mask")]
        self.is_special = np.zeros(meta["vocab_size"], dtype=bool)
        self.is_special[special] = True
        maskable = np.asarray(table["maskable"][:]).astype(np.int64)
        chosen = np.floor(maskable * masking.probability + 0.5).astype(np.int64)
        counts = maskable if meta["stored_masks"] else np.minimum(maskable, np.maximum(1, chosen))
        self.counts = torch.from_numpy(counts)  # (rows,)
        self.most = max(1, int(self.counts.max()))  # P

    def __len__(self) -> int:
        return len(self.counts)

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """These rows, masked as in the epoch of `indices`; no rows for an empty part."""
        length = self.meta["sequence_length"]
        if not len(indices):  # zero rows of the right shape
            rows = {"input_ids": np.zeros((0, length), np.int64)}
            rows |= {name: np.zeros(0, np.int64) for name in ("length", "second", "next_label")}
            rows |= {name: np.zeros((0, self.most), np.int64) for name in ("masked_positions", "masked_labels")}
        else:
            rows = {name: np.asarray(values).astype(np.int64) for name, values in self.table[list(indices)].items()}
        places = np.arange(length)
        second = (places >= rows["second"][:, None]) & (places < rows["length"][:, None])
        ids, positions, labels = self._masked(rows, indices)
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(second.astype(np.int64)),
            torch.from_numpy(places < rows["length"][:, None]) if self.padded else None,
            torch.from_numpy(positions),
            torch.from_numpy(labels),
            torch.from_numpy(rows["next_label"]),
        )

    def _masked(self, rows: dict[str, np.ndarray], indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(words after masking (B, L), positions (B, P), the words that were there (B, P))."""
        ids = rows["input_ids"]
        if self.meta["stored_masks"]:
            positions = rows["masked_positions"]
            return ids, positions, np.where(positions == 0, IGNORED, rows["masked_labels"])
        length, most = ids.shape[1], self.most
        random = self._random(indices, length + 2 * most)
        positions = self._choose(ids, rows["length"], self.counts[list(indices)].numpy(), random[:, :length])
        listed = positions > 0
        labels = np.take_along_axis(ids, positions, axis=1)
        covered = self._cover(labels, random[:, length : length + most], random[:, length + most :])
        ids = ids.copy()
        ids[np.nonzero(listed)[0], positions[listed]] = covered[listed]
        return ids, positions, np.where(listed, labels, IGNORED)

    def _random(self, indices: Sequence[int], count: int) -> np.ndarray:
        if self.masking.seed is None:
            return random_numbers(derive_seed(0, "held-out masks"), indices, count)
        return random_numbers(derive_seed(self.masking.seed, "masks", getattr(indices, "epoch", 0)), indices, count)

    def _choose(self, ids: np.ndarray, length: np.ndarray, counts: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Positions (B, P) of the tokens to mask, `counts` (B,) in each row, in order; then 0, where [CLS] is.

        Those with the smallest `random` numbers (B, L) are chosen. With whole words, the tokens of a word share a
        number, and only the last word may be cut, so that exactly `counts` are chosen.
        """
        places = np.arange(ids.shape[1])
        maskable = (places > 0) & (places < length[:, None]) & ~self.is_special[ids]
        if self.masking.whole_words:
            assert self.continues is not None
            begins = maskable & ~self.continues[ids]
            random = np.take_along_axis(random, begins.cumsum(axis=1), axis=1)
        order = np.argsort(np.where(maskable, random, 2.0), axis=1, kind="stable")[:, : self.most]
        beyond = ids.shape[1]
        chosen = np.sort(np.where(np.arange(order.shape[1]) < counts[:, None], order, beyond), axis=1)
        return np.where(chosen == beyond, 0, chosen)

    def _cover(self, words: np.ndarray, draw: np.ndarray, which: np.ndarray) -> np.ndarray:
        """What replaces `words` (B, P): mostly [MASK], or else a random word or the word itself."""
        others = (which * self.meta["vocab_size"]).astype(np.int64)
        covered = np.where(draw < SHARE_MASKED + SHARE_RANDOM, others, words)
        return np.where(draw < SHARE_MASKED, self.meta["special"]["mask"], covered)


def random_numbers(key: int, rows: Sequence[int], count: int) -> np.ndarray:
    """Numbers from 0 to 1, (rows, count), each a hash of (key, its row, its place), so that they do not depend on the
    layout.

    SplitMix64 (Steele, Lea, Flood 2014): a counter times the golden ratio, mixed. A generator object for each row
    would take longer than all the rest of making a batch.
    """
    counter = (np.asarray(rows, dtype=np.uint64) << np.uint64(20))[:, None] + np.arange(count, dtype=np.uint64)
    mixed: np.ndarray = np.uint64(key) + counter * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) * 2.0**-53


def of_corpus(corpus: "Corpus", probability: float, whole_words: bool, seed: int) -> tuple[MaskedRows, MaskedRows]:
    """Training rows, whose masks are new in every epoch, and held-out rows, whose masks are fixed."""
    continues = corpus.continues

    def masked(name: str, table: Any, seed: int | None) -> MaskedRows:
        masking = Masking(probability, whole_words, seed)
        return MaskedRows(table.with_format("numpy"), corpus.meta, masking, corpus.meta["padded"][name], continues)

    return masked("train", corpus.train, seed), masked("held_out", corpus.held_out, None)


def as_shard(part: MaskedRows, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """Rows as the six arrays of a shard of NVIDIA's pipeline (see shards.py), masked as in epoch 0."""
    batch = part.get_batch(list(numbers))
    full = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    tensors = {
        "input_ids": batch.input_ids,
        "input_mask": full.long(),
        "segment_ids": batch.token_type_ids,
        "masked_lm_positions": batch.positions,
        "masked_lm_ids": batch.labels.clamp(min=0),
        "next_sentence_labels": batch.next_labels,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items()}
