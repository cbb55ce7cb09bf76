"""Batches balanced by tokens: which rank computes which rows of a global batch, and in how many passes.

Which rows make a global batch depends on (seed, epoch) alone. (Batches of similar lengths would need even less
padding, but cost F1: docs/finetune-and-predict.md has the numbers.) Which rank computes a row does not change the sum
of the gradients. So the rows of a global batch are sorted by length and cut into one contiguous part a rank, and the
ranks' tokens, with padding, follow their shares. One rank gets a few long rows, another many short ones, and there is
little padding:

    lengths 30 28 12 11 10 10 9 9, two equal shares     | 30 28 | 12 11 10 10 9 9 |

A part is one batch, padded to its longest row; or a rank cuts it into passes (micro-batches) where a cut saves more
padding than a pass costs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from common.uneven.evaluation import BATCHES_A_RANK
from common.uneven.plan import BatchPlan
from common.uneven.sampling import UnevenDistributedSampler

# What one more forward and backward costs besides its tokens, in tokens. On a CPU that is mostly the gradient of the
# embedding, which is as large as the vocabulary; on a GPU it is the launches of kernels that have little work each.
PASS_TOKENS = {"cpu": 96, "cuda": 8192}


def cut_passes(lengths: np.ndarray, most_rows: int | None, pass_tokens: int) -> list[int]:
    """Where to cut rows of falling `lengths` (rows,) into passes: [0, ..., rows], at least one pass.

    Among the cuts with at most `most_rows` rows a pass, this is the one with the fewest tokens, where padding and
    `pass_tokens` for each pass count as tokens. Dynamic programming over the position of the last cut.
    """
    rows = len(lengths)
    if rows == 0:
        return [0, 0]
    best = np.zeros(rows + 1)
    last = np.zeros(rows + 1, dtype=np.int64)
    positions = np.arange(rows)
    for end in range(1, rows + 1):
        first = max(0, end - most_rows) if most_rows else 0
        costs = best[first:end] + (end - positions[first:end]) * lengths[first:end]
        last[end] = first + int(costs.argmin())
        best[end] = costs[last[end] - first] + pass_tokens
    cuts = [rows]
    while cuts[-1] > 0:
        cuts.append(int(last[cuts[-1]]))
    return cuts[::-1]


def cut_parts(lengths: np.ndarray, shares: Sequence[float], pass_tokens: int) -> list[int]:
    """Where to cut rows of falling `lengths` (rows,) into the ranks' parts: [0, ..., rows], one more than `shares`.

    A row costs what it takes in its pass: the length of the longest row there. What a part costs differs from its
    share by less than the cost of one row. Every rank must find the same cuts, so the micro-batch of a rank, which may
    be its own, does not count.
    """
    cuts = cut_passes(lengths, None, pass_tokens)
    sizes = np.diff(cuts)
    longest = lengths[np.asarray(cuts[:-1], dtype=np.int64)] if len(lengths) else lengths
    ends = np.concatenate([[0], np.cumsum(np.repeat(longest, sizes))])
    due = np.cumsum(np.asarray(shares, dtype=np.float64)) / sum(shares) * ends[-1]
    # Each border moves to the nearest end of a row: search among the midpoints between two ends.
    borders = np.searchsorted((ends[1:] + ends[:-1]) / 2, due)
    borders[-1] = len(lengths)
    return [0, *(int(border) for border in borders)]


def cut_padded_parts(lengths: np.ndarray, shares: Sequence[float]) -> list[int]:
    """As `cut_parts`, where each part is padded to its longest row as a whole: no other cut has a smaller largest part,
    in tokens with padding, beside the shares."""

    def cuts(tokens: float) -> list[int]:
        """Each rank takes rows until it has its share of so many tokens."""
        found = [0]
        for share in shares:
            begin = found[-1]
            rows = int(share * tokens / max(1, lengths[begin])) if begin < len(lengths) else 0
            found.append(min(len(lengths), begin + rows))
        return found

    low, high = 0.0, 2.0
    while cuts(high)[-1] < len(lengths):
        high *= 2.0
    while (high - low) * max(shares) > 0.5:  # of a token: bisection
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle)[-1] == len(lengths) else (middle, high)
    return cuts(high)


class TokenBalancedSampler(UnevenDistributedSampler):
    """For each optimizer step of an epoch, the rows of this rank's part, longest first; possibly none.

    The global batches are those of UnevenDistributedSampler; only the ranks' parts of them differ. For any data set
    whose lengths are known: `lengths` (samples,) in tokens. `pass_tokens` is what one more forward costs, in tokens,
    where parts are cut into passes; None where each is padded as a whole.
    """

    def __init__(
        self,
        plan: BatchPlan,
        rank: int,
        seed: int,
        lengths: Sequence[int] | np.ndarray,
        pass_tokens: int | None = None,
    ):
        super().__init__(plan, rank, seed)
        self.lengths, self.is_padded = np.asarray(lengths), pass_tokens is None
        self.cut = cut_padded_parts if pass_tokens is None else partial(cut_parts, pass_tokens=pass_tokens)
        assert len(self.lengths) == plan.samples, (len(self.lengths), plan.samples)
        plan.balances_tokens = True

    def part(self, step: int, rank: int) -> np.ndarray:
        """Rank `rank`'s rows of step `step`, longest first. The step must be in the epoch of `set_epoch`."""
        begin = self.plan.begin(step)
        rows = self.order().numpy()[begin : begin + self.plan.global_count(step)]
        rows = rows[np.lexsort((rows, -self.lengths[rows]))]
        borders = self.cut(self.lengths[rows], self.plan.weights_at(step))
        return rows[borders[rank] : borders[rank + 1]]

    def work(self, part: Any) -> float:
        """The tokens of a part, with padding where it is padded as a whole."""
        lengths = self.lengths[part]
        return int(len(part) * lengths.max(initial=0) if self.is_padded else lengths.sum())

    def rows(self, step: int) -> list[int]:
        """This rank's samples of step `step`, longest first."""
        return self.part(step, self.rank).tolist()


class SortedShard(Sampler[list[int]]):
    """This rank's rows of an evaluation set in batches of similar length, each row on exactly one rank.

    Each rank gets the same number of tokens, not of rows. With `numbers`, as in EvaluationSampler, the ranks take
    batches in turn, the longest rows first. Ranks may run different numbers of batches, so nothing in the loop may be
    a collective.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        rank: int,
        world_size: int,
        most_rows: int,
        numbers: Callable[[], Iterator[int]] | None = None,
    ):
        self.rows, self.most_rows, self.numbers = np.argsort(-lengths, kind="stable"), most_rows, numbers
        if not numbers:
            borders = cut_parts_of_many(lengths[self.rows], world_size)
            self.rows = self.rows[borders[rank] : borders[rank + 1]]
        else:
            self.most_rows = max(1, min(most_rows, len(lengths) // (world_size * BATCHES_A_RANK)))

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.numbers() if self.numbers else itertools.count():
            rows = self.rows[number * self.most_rows : (number + 1) * self.most_rows]
            if not len(rows):
                return
            yield rows.tolist()


def cut_parts_of_many(lengths: np.ndarray, parts: int) -> list[int]:
    """As `cut_parts`, into equal shares and for very many rows: neighbours have nearly the same length, so padding does
    not count."""
    ends = np.cumsum(lengths)
    due = np.arange(1, parts) * (ends[-1] / parts) if len(ends) else np.zeros(parts - 1)
    return [0, *(int(border) for border in np.searchsorted(ends, due)), len(lengths)]
