"""The values of flags: each type says what is allowed."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.launch.options import SaveEvery

SECONDS = {"m": 60.0, "h": 3600.0}  # of the units of --save-every
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # of bits and bytes
LATENCIES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_RANKS = 100_000  # which 100000x1 gives in a few characters; more would only fill the memory


def _number(kind: Callable[[str], Any], text: str, allowed: str, condition: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not condition(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give {allowed}")
    return value


def positive_int(text: str) -> int:
    return _number(int, text, "a whole number of 1 or more", lambda value: value >= 1)


def natural_int(text: str) -> int:
    return _number(int, text, "a whole number of 0 or more", lambda value: value >= 0)


def port(text: str) -> int:
    return _number(int, text, "a port from 1 to 65535", lambda value: 1 <= value <= 65535)


def is_folder(text: str) -> bool:
    """Whether this value of --join is a folder, which may not be there yet."""
    return ("/" in text and "://" not in text) or Path(text).is_dir()


def host_and_port_or_folder(text: str) -> str:
    if is_folder(text):
        return text
    host, _, number = text.rpartition(":")
    is_address = bool(host) and not (":" in host and not (host[0] == "[" and host[-1] == "]"))
    if not (is_address and number.isdecimal() and 1 <= int(number) <= 65535):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give HOST:PORT (an IPv6 address in brackets), or the folder of a run"
        )
    return text


def positive_float(text: str) -> float:
    return _number(float, text, "a number above 0", lambda value: value > 0)


def non_negative_float(text: str) -> float:
    return _number(float, text, "a number of 0 or more", lambda value: value >= 0)


def probability(text: str) -> float:
    return _number(float, text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def percent(text: str) -> float:
    """A percentage as a fraction: 99 -> 0.99."""
    return _number(float, text, "a percentage above 0 and up to 100, such as 99", lambda value: 0 < value <= 100) / 100


def save_every(text: str) -> SaveEvery:
    """Steps, minutes or hours: 500, 10m, 1h."""
    unit = SECONDS.get(text[-1:])
    try:
        amount = float(text[:-1]) if unit else int(text)
    except ValueError:
        amount = 0
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give a number of steps, minutes or hours above 0, such as 500, 10m or 1h"
        )
    return SaveEvery(text, seconds=amount * unit) if unit else SaveEvery(text, steps=int(amount))


def steps_or_percent(text: str) -> int | float:
    """A number of steps as an int, or a part of all steps as a float: 500 -> 500, 10% -> 0.1. See `steps_of`."""
    if text.isdecimal():
        return int(text)
    allowed = "steps, such as 500, or a part of all, such as 10%"
    is_part = text.endswith("%")
    return _number(lambda part: float(part.removesuffix("%")) / 100, text, allowed, lambda x: is_part and 0 <= x <= 1)


def gpus_per_node(text: str) -> tuple[int, ...]:
    try:
        gpus = tuple(int(part) for part in text.split(","))
    except ValueError:
        gpus = ()
    if not gpus or min(gpus) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: name the GPUs of each node, 1 or more, such as 8,2")
    return gpus


def shares(text: str) -> tuple[float, ...]:
    """A weight for each rank: 4,4,1, or 8x1,2x0.5 for eight ranks and two."""
    weights = _by_rank(text, float)
    if not weights or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: name a weight of 0 or more for each rank, one of them above 0, such as 4,4,1 or "
            f"8x1,2x0.5, for at most {MOST_RANKS} ranks"
        )
    return weights


def slow_ranks(text: str) -> dict[int, float]:
    """The speed of some ranks, as a part of their own: 3=0.25, or 1=0.5,3=0.25."""
    words = [re.fullmatch(r"(\d{1,6})=(0?\.\d+)", one) for one in text.split(",")]
    found = {int(word[1]): float(word[2]) for word in words if word}
    if len(found) < len(words) or not all(found.values()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give RANK=SPEED, with 0 < SPEED < 1, such as 3=0.25 or 1=0.5,3=0.25"
        )
    return found


def link(text: str) -> tuple[float, float]:
    """A rate each way, in bytes a second, and the latency one way, in seconds: 1Gbit,0.2ms."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(bit|B),(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give the rate each way and the latency one way, such as 1Gbit,0.2ms or 12GB,5us"
        )
    rate = float(found[1]) * UNITS[found[2]] / (8 if found[3] == "bit" else 1)
    return rate, float(found[4]) * LATENCIES[found[5]]


def micro_batch(text: str) -> int | tuple[int, ...] | str:
    """One number for all ranks, or one for each: 32, or 8x32,2x16 for eight ranks and two; or auto."""
    if text == "auto":
        return text
    sizes = _by_rank(text, int)
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give a whole number of 1 or more, such as 32, or one for each rank, such as "
            f"32,32,16 or 8x32,2x16, for at most {MOST_RANKS} ranks, or auto"
        )
    return sizes if "," in text or "x" in text else sizes[0]


def _by_rank(text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """8x1.0,2x0.5 as ten numbers; nothing where the text is something else, or names more than MOST_RANKS."""
    numbers: list[Any] = []
    try:
        for part in text.split(","):
            times, by, number = part.rpartition("x")
            count = int(times) if by else 1
            if not 1 <= count <= MOST_RANKS - len(numbers):
                return ()
            numbers += [kind(number)] * count
    except ValueError:
        return ()
    return tuple(numbers)
