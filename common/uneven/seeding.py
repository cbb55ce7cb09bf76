"""Seeds derived from what they are used for, so that the order of samples does not depend on the layout.

derive_seed(seed, "order", epoch)            the order of samples
derive_seed(seed, "dropout", step, rank)     dropout: the same layout gives the same bits, resumed or not
"""

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed of 63 bits for one purpose. Different purposes give unrelated numbers; `seed + epoch` would be the same
    for (seed 0, epoch 1) and (seed 1, epoch 0)."""
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_noise(device: torch.device, seed: int) -> None:
    """Seed the generators from which a step draws its noise, such as dropout: torch's of the CPU and of `device`, and
    those of `random` and `numpy.random`, of which a forward may choose a size or a mask.

    `torch.manual_seed` gives the same bits, but where no GPU is used it takes a millisecond, for a traceback that it
    keeps until a GPU is used.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
