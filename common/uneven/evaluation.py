"""Which samples of a held-out set this rank evaluates: each sample on one rank, without padding."""

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from common.uneven.sampling import Indices

BATCHES_A_RANK = 8  # at least, where ranks take batches in turn: the last ones then end at about the same time


class EvaluationSampler(Sampler[list[int]]):
    """Batches of an evaluation set: every sample on exactly one rank, and nothing is repeated.

    Each rank has a contiguous shard; shards differ by at most one sample. With `numbers`, the ranks instead take the
    next batch whenever they have done one, so that fast ranks do more of them. Either way ranks may have different
    numbers of batches, so the loop must contain no collective: evaluate the model itself, not its DDP wrapper.
    """

    def __init__(
        self,
        samples: int,
        rank: int,
        world_size: int,
        batch: int,
        numbers: Callable[[], Iterator[int]] | None = None,  # 0, 1, 2, ..., each for one rank (Group.shared_counter)
    ):
        self.shard = range(samples * rank // world_size, samples * (rank + 1) // world_size)
        self.samples, self.world_size, self.numbers = samples, world_size, numbers
        self.set_batch(batch)

    def set_batch(self, batch: int) -> None:
        """From the next iteration on, at most `batch` samples in a batch."""
        self.batch = batch
        if self.numbers:
            self.batch = max(1, min(batch, self.samples // (self.world_size * BATCHES_A_RANK)))

    def __iter__(self) -> Iterator[list[int]]:
        if not self.numbers:
            for start in range(0, len(self.shard), self.batch):
                yield Indices(self.shard[start : start + self.batch])
            return
        for number in self.numbers():
            start = number * self.batch
            if start >= self.samples:
                return
            yield Indices(range(start, min(start + self.batch, self.samples)))

    def __len__(self) -> int:
        if self.numbers:
            raise TypeError("how many batches this rank will take is not known")
        return -(-len(self.shard) // self.batch)
