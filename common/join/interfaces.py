"""The network interface: one that somebody has named, by --interface or a variable of gloo or NCCL, or one found."""

import os
from collections.abc import Mapping

from common.console import say
from common.errors import UserError
from common.join import network
from common.launch.addresses import WILDCARDS, host_and_port, is_loopback
from common.launch.layout import Layout, Worker
from common.launch.options import JoinOptions

VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_set_here: dict[str, str] = {}  # the variables that this process has set


def check(options: JoinOptions, backend: str, layout: Layout) -> None:
    """Raise UserError unless the interface that is named here exists, and reaches the other nodes. A launcher that has
    started each rank by itself ends the others with the first one: so each of them prints it."""
    if wrong := wrong_here(options, backend, layout):
        raise UserError(": ".join(wrong), same_on_every_rank=layout.spawn)


def wrong_here(options: JoinOptions, backend: str, layout: Layout) -> tuple[str, str] | None:
    """As `wrong`, about this machine and its environment."""
    return wrong(options.interface, os.environ, network.local_addresses(), backend, _leaves(options, layout))


def wrong(
    flag: str | None, environ: Mapping[str, str], addresses: Mapping[str, list[str]], backend: str, leaves: bool
) -> tuple[str, str] | None:
    """What is wrong with the interface that the flag names, or else the variable of this backend, and how to fix it;
    None where all is well.

    `addresses` is interface -> its addresses, for interfaces that are up. `leaves`: other nodes are on other machines.
    """
    variable = VARIABLES.get(backend, "")
    source, value = ("--interface", flag) if flag else (variable, environ.get(variable))
    if not value:
        return None
    usable = [name for name in addresses if addresses[name] and not (leaves and only_loopback(addresses[name]))]
    fix = f"name one of {', '.join(usable) or 'none: this node has no network'}, or leave it out"
    if source == "GLOO_SOCKET_IFNAME" and value[0] in "^=":
        return f"{source} is {value}, but gloo takes whole names only: ^ and = are NCCL's", fix
    named = _named(source, value, [name for name in addresses if addresses[name]])
    if not named:
        return f"{source} is {value}, but this node has no such interface", fix
    if leaves and all(only_loopback(addresses[name]) for name in named):
        return f"{source} is {value}, which reaches this machine only", fix
    return None


def _named(source: str, value: str, names: list[str]) -> list[str]:
    """The interfaces that are meant; none where one is missing that is needed."""
    if source == "--interface":
        return [name for name in names if name == value]
    wanted = [part for part in value.lstrip("^=").split(",") if part]
    if source == "GLOO_SOCKET_IFNAME":  # gloo uses each of them
        return wanted if set(wanted) <= set(names) else []
    exact = "=" in value[:2]
    found = [name for name in names if any(name == one if exact else name.startswith(one) for one in wanted)]
    return [name for name in names if name not in found] if value[0] == "^" else found


def only_loopback(addresses: list[str]) -> bool:
    """True for an interface without an address that other machines reach."""
    return not any(address for address in addresses if address != "::1" and not address.startswith(("127.", "fe80")))


def _leaves(options: JoinOptions, layout: Layout) -> bool:
    """Are the nodes that this layout names on several machines?"""
    if layout.nodes < 2 or not layout.init_method.startswith("tcp://"):
        return False
    host = host_and_port(layout.init_method)[0]
    return not is_loopback(network.own_address(options.interface) if host in WILDCARDS else host)


def name_interface(worker: Worker, options: JoinOptions, own_address: str) -> None:
    """Tell gloo and NCCL the interface of --interface, or else the one that reaches the other ranks, unless a variable
    names another.

    gloo would resolve this machine's host name instead, which is often 127.0.1.1 or nothing at all.
    """
    interface = options.interface or network.interface_of(own_address)
    for variable in VARIABLES.values():
        named = os.environ.get(variable)
        if named == _set_here.get(variable):  # by this process, for ranks that may be reached in another way by now
            named = None
        if named and options.interface and named != interface and not worker.membership and worker.local_rank == 0:
            say(f"--interface {interface} counts, and not {variable}={named}", worker.rank)
        if interface and (options.interface or not named):
            os.environ[variable] = _set_here[variable] = interface
