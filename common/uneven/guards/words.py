"""Names of parameters, buffers and layers, as the guards' messages show them."""

from collections.abc import Collection

SHOWN = 3  # names in a message


def is_named(name: str, allowed: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
