"""Where the processes meet: tcp://HOST:PORT or file:///PATH, from flags and environment."""

import ipaddress
import socket
from collections.abc import Mapping

from common.errors import UserError
from common.launch.options import LayoutFlags
from common.launch.reading import number, refuse_half_set, typed

DEFAULT_MASTER_PORT = 29500
WILDCARDS = ("0.0.0.0", "::")  # all interfaces of a machine
_held: list[socket.socket] = []  # bound to the ports that free_port has given, until this process ends


def tcp_address(host: str, port: int) -> str:
    """tcp://host:port, with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(init_method: str) -> tuple[str, int]:
    """(host, port) of tcp://host:port, without brackets."""
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Does `host` mean each machine itself, wherever it is written?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host.partition(".")[0] in ("localhost", "ip6-localhost")


def free_port() -> int:
    """A TCP port that nothing listens on, on no interface, and that no other program is given while this process lives:
    between this answer and the moment when somebody listens, seconds may pass.

    The port stays bound, without being listened on. That hinders nobody who binds it with SO_REUSEADDR, as torch and
    Python's servers do, and keeps the system from giving it to others.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return holder.getsockname()[1]


def meeting(flags: LayoutFlags, environ: Mapping[str, str], host: str, port: int) -> str:
    """The address where the processes meet. Flags take precedence over the environment, and the environment over the
    launcher's `host` and `port`. Port 0 means any free port. Raises UserError for an invalid URL."""
    url = flags.distributed_init_method
    if url:
        if address := typed(flags, {"master_addr": "--master-addr", "master_port": "--master-port"}):
            raise UserError(
                f"--distributed-init-method {url} and {address[0]} both say where to meet: give one of them"
            )
        return _meeting_of_url(url, environ)
    host = flags.master_addr or environ.get("MASTER_ADDR") or host
    port = flags.master_port or number(environ, "MASTER_PORT", default=port)
    return tcp_address(host, port or free_port())


def _meeting_of_url(url: str, environ: Mapping[str, str]) -> str:
    """tcp://HOST:PORT or file:///PATH, checked; env:// stands for MASTER_ADDR and MASTER_PORT."""
    scheme, _, rest = url.partition("://")
    if scheme == "env" and not rest:
        refuse_half_set(environ, ("MASTER_ADDR", "MASTER_PORT"), "a launcher", "--distributed-init-method env://")
        return tcp_address(environ["MASTER_ADDR"], number(environ, "MASTER_PORT", minimum=1))
    if scheme == "file":
        if not rest.startswith("/") or rest.endswith("/"):
            raise UserError(
                f"--distributed-init-method is {url}: give the absolute path of a file that all nodes "
                "share, after three slashes: file:///SHARED/FILE"
            )
        return url
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 1 <= int(port) <= 65535 or "/" in host:
        raise UserError(
            f"--distributed-init-method is {url}: give tcp://HOST:PORT (an IPv6 address in brackets), file:///PATH or env://"
        )
    if ":" in host.strip("[]") and not (host.startswith("[") and host.endswith("]")):
        raise UserError(f"--distributed-init-method is {url}: an IPv6 address needs brackets, tcp://[{host}]:{port}")
    return url


def job_port(job: int, step: int = 0) -> int:
    """A port from 15000 to 31380, below the ephemeral ports. 1,000 consecutive jobs, and the first 16 steps of
    each, get different ports."""
    return 15000 + (job * 16 + step) % 16381
