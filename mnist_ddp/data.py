"""Images in memory, read a batch at a time.

MNIST is 47 MB: decoding, normalising and collating it image by image, as a stock DataLoader does, takes longer
than training on it. Here a batch is one indexing operation.
"""

import functools
import importlib.util
import math
import os
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np
import torch

from common.errors import RunError, UserError
from common.files import reading
from common.uneven.guards.fingerprint import fingerprint
from common.uneven.loading import BatchedDataset

CPU = torch.device("cpu")
FILES = {  # of MNIST and the data sets of its kind: name -> shape
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
MOST_NAMED = 4  # files of other names
MOST_ALIKE = 0.9  # part of a set's labels
ENDS = 20  # images of one grey level, as where a download has stopped
LOOKED_AT = 1000  # images of a set
FEW_ALIKE = 8  # of these, on average
FEW_IMAGES = 200  # which say nothing about their labels
NEAR_CHANCE = 0.3  # part of right labels: of ten classes, a guess has 0.1, and the sets of this kind have 0.6 and more


class Batch(NamedTuple):
    """Images (batch, 1, side, side), normalised, and labels (batch,) of class numbers."""

    images: torch.Tensor
    labels: torch.Tensor


class ImageDataset(BatchedDataset):
    """A data set in the memory of a device: on a GPU, a batch is cut there, and a step copies no images."""

    odd = ""  # what is odd about it as a whole

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, device: torch.device):
        """`images` uint8 (samples, side, side); `normal` (256,) holds the normalised value of each grey level."""
        values = torch.from_numpy(normal.numpy()[images.numpy()])  # several times as fast as torch's indexing
        self.images = values.unsqueeze(1).to(device)
        self.labels = labels.long().to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def get_batch(self, indices: list[int]) -> Batch:
        """These images and their labels; none at all for an empty part."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        return Batch(self.images[chosen], self.labels[chosen])

    @property
    def side(self) -> int:
        return self.images.shape[-1]


@functools.lru_cache(maxsize=1)  # a trainer is called again when members of the run have changed (--elastic)
def load(
    name: str, folder: Path, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[ImageDataset, ImageDataset, str]:
    """(training set, test set, fingerprint of both), in the memory of `device`.

    Downloads what is not in `folder`, one process at a time. Raises UserError for damaged files, RunError
    where the download fails.
    """
    parts = _digits() if name == "digits" else _from_torchvision(name, folder)
    (train_images, train_labels), (test_images, test_labels) = parts
    _require_variety(train_images, train_labels, "training", folder)
    _require_variety(test_images, test_labels, "test", folder)
    chosen = test_images[:: max(1, len(test_images) // 20)]
    if sum(_contains(train_images, image) for image in chosen) > len(chosen) / 2:
        raise UserError(
            f"--data-dir {folder}: the test images are among the training images: copy the t10k files again"
        )
    if unknown := set(test_labels.tolist()) - set(train_labels.tolist()):
        raise UserError(f"--data-dir {folder}: no training image has the label {min(unknown)}, which a test image has")
    normal = _normalisation(train_images).to(dtype)
    train = ImageDataset(train_images, train_labels, normal, device)
    test = ImageDataset(test_images, test_labels, normal, device)
    train.odd = _odd_labels(parts)
    return train, test, fingerprint(train_images, train_labels, test_images, test_labels)


def _require_variety(images: torch.Tensor, labels: torch.Tensor, what: str, folder: Path) -> None:
    """Raise UserError where the set `what` from `folder` says nothing as a whole: nearly all labels or most images are
    the same, or many images are of one grey level, as at the end of a file that was not copied whole."""
    usual = labels.long().bincount()
    if usual.max() > MOST_ALIKE * len(labels) > 1:
        alike = f"{usual.max():,} of {len(labels):,} labels of the {what} set are {usual.argmax()}"
        raise UserError(f"--data-dir {folder}: {alike}: copy the files again")
    chosen = images[:: max(1, len(images) // LOOKED_AT)].flatten(1).numpy()
    if len(different := {image.tobytes() for image in chosen}) < len(chosen) / FEW_ALIKE:
        alike = f"{len(chosen):,} images from all over the {what} set are {len(different):,} different ones"
        raise UserError(f"--data-dir {folder}: {alike}: copy the files again")
    first, middle = images[:, 0, 0], images[:, images.shape[1] // 2]  # the row that tells most images apart
    maybe = (middle == first[:, None]).all(dim=1).nonzero().flatten()
    empty = maybe[(images[maybe] == first[maybe, None, None]).flatten(1).all(dim=1)]
    ends = bool((images[-ENDS:] == images[-1, 0, 0]).all()) and len(images) > LOOKED_AT
    if len(empty) > len(images) / 10 or ends:
        raise UserError(
            f"--data-dir {folder}: {len(empty):,} of {len(images):,} images of the {what} set are of one grey level, "
            f"the first of them image {int(empty[0]) + 1:,}: copy the files again"
        )


def _odd_labels(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """What is odd about labels that may be those of other images, for the header: to name the class whose mean image is
    nearest is right more often than by chance."""
    chance = torch.Generator().manual_seed(0)
    chosen = (torch.randperm(len(labels), generator=chance)[:LOOKED_AT] for _, labels in parts)
    looked = [(images[those], labels[those]) for (images, labels), those in zip(parts, chosen, strict=True)]
    (images, labels), (more, answers) = looked
    classes = labels[::2].unique()
    means = torch.stack([images[::2][labels[::2] == label].flatten(1).float().mean(0) for label in classes])
    for what, some, known in (("training", images[1::2], labels[1::2]), ("test", more, answers)):
        right = (classes[torch.cdist(some.flatten(1).float(), means).argmin(dim=1)] == known).float().mean()
        if len(some) >= FEW_IMAGES and right < NEAR_CHANCE:
            return (
                f"; note: do the {what} labels belong to these images? The nearest mean image has {right:.0%} of them"
            )
    return ""


def _contains(images: torch.Tensor, image: torch.Tensor) -> bool:
    middle = len(image) // 2  # the row that tells most images apart
    maybe = images[(images[:, middle] == image[middle]).all(dim=1)]
    return bool((maybe == image).flatten(1).all(dim=1).any())


def _normalisation(images: torch.Tensor) -> torch.Tensor:
    """For each grey level, its value once the images have mean 0 and standard deviation 1: float64 (256,)."""
    levels = torch.arange(256, dtype=torch.float64)
    frequency = torch.bincount(images.flatten(), minlength=256) / images.numel()
    mean = (levels * frequency).sum()
    return (levels - mean) / ((levels - mean) ** 2 * frequency).sum().sqrt()


@functools.cache
def _digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, every fifth one held out. Needs no download.

    The file is read directly, because importing scikit-learn takes longer than training on it.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("--dataset digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))  # (samples, 64 pixels and the label)
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return [(images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])]


def _from_torchvision(name: str, folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The files in `folder`, downloaded by torchvision where they are missing."""
    kind = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}[name]
    lock = folder / f".{name}.lock"
    try:
        return _read(folder / kind / "raw")
    except UserError:
        with reading(folder, f"--data-dir {folder}"):
            if not lock.exists():  # else another process may be unpacking these files at this moment
                raise
    except FileNotFoundError:
        pass
    _download(name, kind, folder, lock)
    return _read(folder / kind / "raw")


def _download(name: str, kind: str, folder: Path, lock: Path) -> None:
    from filelock import FileLock, Timeout
    from torchvision import datasets  # slow to import, and only needed here

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("not writable")
    except OSError as error:
        problem = f"{name} is not there, and that folder cannot be written: {error}"
        raise UserError(f"--data-dir {folder}: {problem}: {_found(folder, kind)}") from None
    try:
        # Another run, or another node on a shared disk, may be downloading the same files at this moment.
        with FileLock(lock, timeout=3600):
            getattr(datasets, kind)(folder, train=True, download=True)  # checks MD5 sums and shows a progress bar
    except Timeout:
        raise RunError(f"{lock}: another process has been downloading for an hour: end it") from None
    except Exception as error:  # the disk, the network, and what a broken connection leaves
        raise RunError(
            f"--data-dir {folder}: {name} is not there and could not be downloaded ({_reason(error)}): "
            f"{_found(folder, kind)}, or use --dataset digits, which needs no download"
        ) from None


def _found(folder: Path, kind: str) -> str:
    """Which files are missing, and where files with such names are."""
    raw = folder / kind / "raw"
    missing = [name for name in FILES if not (raw / name).is_file()]
    known = {raw / name for name in FILES}
    alike = sorted({path for depth in range(5) for path in folder.glob("*/" * depth + "*ubyte*")} - known)
    said = f"put {', '.join(missing)} in {raw}"
    return (
        f"{said}: there are {', '.join(map(str, alike[:MOST_NAMED]))}: move, rename or unpack them" if alike else said
    )


def _read(raw: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Training and test part from IDX files. FileNotFoundError where one is missing, UserError for damaged ones."""
    images, labels, test_images, test_labels = (_read_idx(raw / name, shape) for name, shape in FILES.items())
    return [(images, labels), (test_images, test_labels)]


def _read_idx(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of an IDX file: magic number, dimensions of four bytes, values. Source: yann.lecun.com/exdb/mnist"""
    with reading(path, str(path)):
        data = path.read_bytes() if path.exists() else None
    if data is None:
        raise FileNotFoundError(path)
    header = b"".join(number.to_bytes(4) for number in (0x800 + len(shape), *shape))
    expected = _size(shape)
    others = [
        name for name, other in FILES.items() if len(other) == len(shape) and _size(other) == len(data) != expected
    ]
    if others:
        raise UserError(f"{path} has {len(data):,} bytes, as {others[0]} should have: are their names exchanged?")
    if len(data) != expected:
        raise UserError(f"{path} is damaged: {len(data):,} bytes, not {expected:,}: delete it and start again")
    if not data.startswith(header):
        raise UserError(f"{path} is damaged: its header is not that of {shape} bytes: delete it and start again")
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=len(header)).view(shape)
    if len(shape) == 1 and values.max() > 9:
        raise UserError(f"{path} is damaged: it holds the label {values.max()}, not 0 to 9: delete it and start again")
    return values


def _size(shape: tuple[int, ...]) -> int:
    """Bytes of an IDX file."""
    return 4 + 4 * len(shape) + math.prod(shape)


def _reason(error: Exception) -> str:
    """In one line: torchvision names the file in its first line, and says why in its last."""
    return shorten(str(error) or type(error).__name__, 300)
