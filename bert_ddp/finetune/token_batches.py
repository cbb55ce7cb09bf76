"""Batches balanced by tokens: who computes which rows of a global batch, and in how many passes.

Which rows make a global batch depends on (seed, epoch) alone: batches of like lengths would pad less still, but cost
F1 (docs/finetune-and-predict.md has the numbers). Who computes them does not matter to the sum, so its
rows are sorted by length and cut into as many runs as there are ranks, so that tokens, padding counted, go by the
ranks' shares. One rank gets the few long rows and another the many short ones, and little is padded:

    lengths 30 28 12 11 10 10 9 9, two equal shares     | 30 28 | 12 11 10 10 9 9 |

A rank in turn cuts its run into passes (micro-batches) where a cut saves more padding than a pass costs.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from common.uneven.batching import BatchPlan
from common.uneven.sampling import UnevenDistributedSampler

# What one more forward and backward costs besides its tokens, in tokens. On a CPU that is mostly the embedding's
# gradient, which is as large as the vocabulary; on a GPU the launches of kernels, which idle on little work.
PASS_TOKENS = {"cpu": 96, "cuda": 8192}


def cut_passes(lengths: np.ndarray, most_rows: int | None, pass_tokens: int) -> list[int]:
    """Where to cut rows of falling `lengths` into passes: [0, ..., rows], at least one pass.

    The cut with the fewest tokens, padding and `pass_tokens` for each pass counted, among those with at most
    `most_rows` rows a pass. Dynamic programming over the position of the last cut.
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


def cut_parts(lengths: np.ndarray, shares: Sequence[float], most_rows: int | None, pass_tokens: int) -> list[int]:
    """Where to cut rows of falling `lengths` into the ranks' runs: [0, ..., rows], one more than there are shares.

    A row weighs what it takes in a pass: the length of the longest beside it. The runs' weights differ from the
    shares by less than one row's.
    """
    cuts = cut_passes(lengths, most_rows, pass_tokens)
    sizes = np.diff(cuts)
    longest = lengths[np.asarray(cuts[:-1], dtype=np.int64)] if len(lengths) else lengths
    ends = np.concatenate([[0], np.cumsum(np.repeat(longest, sizes))])
    due = np.cumsum(np.asarray(shares, dtype=np.float64)) / sum(shares) * ends[-1]
    # each border goes to the nearest row's end; searchsorted of the middles between ends
    borders = np.searchsorted((ends[1:] + ends[:-1]) / 2, due)
    borders[-1] = len(lengths)
    return [0, *(int(border) for border in borders)]


class TokenBalancedSampler(UnevenDistributedSampler):
    """For each optimizer step of an epoch, the rows of this rank's part, longest first; possibly none.

    The global batches are those of UnevenDistributedSampler; only who computes which row differs.
    `lengths` and `counts` are tokens and labels by row.
    """

    def __init__(
        self,
        plan: BatchPlan,
        rank: int,
        seed: int,
        lengths: np.ndarray,
        counts: np.ndarray,
        most_rows: int | None,
        pass_tokens: int,
    ):
        super().__init__(plan, rank, seed)
        self.lengths, self.counts = lengths, counts
        self.most_rows, self.pass_tokens = most_rows, pass_tokens
        self.current: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def _rows(self, step: int) -> np.ndarray:
        """The rows of the whole global batch of step `step` of this epoch, in the epoch's order."""
        if self.current[0] != self.epoch:
            self.current = (self.epoch, self.order().numpy())
        begin = step % self.plan.steps_per_epoch * self.plan.global_batch
        return self.current[1][begin : begin + self.plan.global_count(step)]

    def global_count(self, step: int) -> int:
        """Labels of optimizer step `step` over all ranks; `step` counts from the start of training.

        Every rank knows it without asking: the rows, and with them their labels, are known everywhere.
        """
        return int(self.counts[self._rows(step)].sum())

    def part(self, step: int, rank: int) -> np.ndarray:
        """Rank `rank`'s rows of step `step` of this epoch, longest first."""
        rows = self._rows(step)
        rows = rows[np.lexsort((rows, -self.lengths[rows]))]
        borders = cut_parts(self.lengths[rows], self.plan.shares, self.most_rows, self.pass_tokens)
        return rows[borders[rank] : borders[rank + 1]]

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.skip_steps, self.plan.steps_per_epoch):
            yield self.part(step, self.rank).tolist()


class SortedShard(Sampler):
    """This rank's rows of an evaluation set in batches of like length, each row on exactly one rank.

    Tokens, not rows, are divided evenly. Ranks may run different numbers of batches, so nothing in the loop may be
    a collective.
    """

    def __init__(self, lengths: np.ndarray, rank: int, world_size: int, most_rows: int):
        order = np.argsort(-lengths, kind="stable")
        borders = cut_parts_of_many(lengths[order], world_size)
        self.rows, self.most_rows = order[borders[rank] : borders[rank + 1]], most_rows

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.rows), self.most_rows):
            yield self.rows[start : start + self.most_rows].tolist()

    def __len__(self) -> int:
        return -(-len(self.rows) // self.most_rows)


def cut_parts_of_many(lengths: np.ndarray, parts: int) -> list[int]:
    """`cut_parts` into equal shares for very many rows: like lengths lie side by side, so padding is not counted."""
    ends = np.cumsum(lengths)
    due = np.arange(1, parts) * (ends[-1] / parts) if len(ends) else np.zeros(parts - 1)
    return [0, *(int(border) for border in np.searchsorted(ends, due)), len(lengths)]
