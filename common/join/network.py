"""Which network interface and address of this machine reach the others."""

import socket

import psutil

VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "tun", "tap")


def local_addresses() -> dict[str, list[str]]:
    """Interface name -> its IPv4 and IPv6 addresses, for interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def interface_of(address: str) -> str | None:
    """The interface that has this address, or None where it is not an address of this machine."""
    if address.startswith("127."):
        address = "127.0.0.1"
    for name, addresses in local_addresses().items():
        if address in addresses:
            return name
    return None


def resolve(host: str) -> list[str]:
    """The addresses of a host name, or of an address itself; empty where the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def is_local(host: str) -> bool:
    """Does `host` name this machine: a wildcard, a loopback address or the address of one of its interfaces?"""
    addresses = resolve(host)
    return any(address in ("0.0.0.0", "::") or interface_of(address) for address in addresses)


def own_address(interface: str | None = None) -> str:
    """The address under which other nodes most likely reach this one.

    The address of `interface` where one is named and has one; else the one that the default route uses; else that of
    a physical interface; else loopback.
    """
    addresses = local_addresses()
    if interface and addresses.get(interface):
        return addresses[interface][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); UDP: nothing is sent
            return probe.getsockname()[0]
        except OSError:
            pass  # no default route, as on an isolated cluster network
    real = [name for name in addresses if not name.startswith(("lo", *VIRTUAL))]
    others = [name for name in addresses if name not in real and not name.startswith("lo")]
    for name in real + others:
        for address in addresses[name]:
            if not address.startswith(("169.254.", "fe80")):
                return address
    return "127.0.0.1"


def listens(host: str, port: int, timeout_seconds: float) -> bool | None:
    """Does anything listen at host:port? None where the machine does not answer, or where this is no address."""
    try:
        source_address(host, port, timeout_seconds)
    except ConnectionRefusedError:
        return False
    except (OSError, OverflowError):
        return None
    return True


def source_address(host: str, port: int, timeout_seconds: float) -> tuple[str, str]:
    """Connect to host:port once. Returns (our address, theirs) of that connection. Raises OSError."""
    with socket.create_connection((host, port), timeout=timeout_seconds) as connection:
        return connection.getsockname()[0], connection.getpeername()[0]
