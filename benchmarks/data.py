"""The real data that benchmarks measure on: in data/ of this checkout, downloaded there where they are missing."""

import hashlib
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import torch

from common.errors import RunError, UserError
from mnist_ddp import data

FOLDER = Path(__file__).resolve().parents[1] / "data"
TIMEOUT_SECONDS = 60
# WNUT 2017, Derczynski et al., CC BY 4.0: our name -> (their name, SHA-256)
WNUT17_URL = "https://raw.githubusercontent.com/leondz/emerging_entities_17/master"
WNUT17 = {
    "train.conll": ("wnut17train.conll", "731820e13f71af324c6b55a1575ec2ce59fbaa2a0806f8f0400b98d56cd6a7a5"),
    "dev.conll": ("emerging.dev.conll", "e053b752b8155113ca66e7db08af5f2f5f43ab993694e4774f1ec5bad42312d8"),
    "test.conll": ("emerging.test.annotated", "2aa79b764e56ec9264a1b30fdd9b70195bd00ff400b62edd8f399d5f13c178f0"),
}


def require_mnist(folder: Path) -> None:
    """Download MNIST into `folder`, as the trainer does, unless it is there. Ends the program if that fails."""
    try:
        data.load("mnist", folder, torch.float32)
    except UserError as error:
        sys.exit(f"error: {error}")
    except RunError:
        sys.exit(_unavailable(folder, "MNIST", f"put the four files of {folder / 'MNIST' / 'raw'} there by hand"))


def require_wnut17(folder: Path) -> Path:
    """The folder `folder/wnut17`, downloaded unless it is there. Ends the program if that fails."""
    texts = folder / "wnut17"
    try:
        download(WNUT17_URL, WNUT17, texts)
    except OSError as error:
        by_hand = f"put {', '.join(WNUT17)} there by hand, or name other data with --data"
        sys.exit(_unavailable(texts, f"WNUT 17 ({error})", by_hand))
    return texts


def download(url: str, files: Mapping[str, tuple[str, str]], folder: Path) -> None:
    """Download the files, our name -> (their name, SHA-256), that `folder` lacks. Raises OSError."""
    for name, (theirs, checksum) in files.items():
        if (folder / name).exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(f"{url}/{theirs}", timeout=TIMEOUT_SECONDS) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != checksum:
            raise OSError(f"{url}/{theirs} is another file today")
        aside = folder / f".{name}"
        aside.write_bytes(content)
        aside.replace(folder / name)


def _unavailable(folder: Path, what: str, by_hand: str) -> str:
    return f"error: {folder} has no {what}, and it could not be downloaded: connect this machine, or {by_hand}"
