"""Plain TCP between two nodes: does it connect, how long is the way, how much does it carry, do the clocks agree?

Each node listens at the address that gloo and NCCL will use, on a port that the system chooses, as they do. So
this finds in two seconds what a process group finds in minutes: a wrong interface, a firewall, a slow link.
The protocol of one connection, numbers as 8 bytes:

    server   its identity, 32 bytes
    client   "p"                   server   its clock, in seconds
    client   "b", n, n bytes       server   "k"
"""

import contextlib
import secrets
import socket
import struct
import threading
import time

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 6.0
PINGS = 20
FIRST_BYTES = 256 * 1024  # fills the path before the measurement, so that the slow start does not count
MOST_BYTES = 256 * 1024 * 1024
CHUNK = bytes(1024 * 1024)
NUMBER = struct.Struct("!Q")
CLOCK = struct.Struct("!d")
IDENTITY_BYTES = 32


class Listener:
    """Answers `measure` of other nodes at `address`, on a free port, until it is closed. Raises OSError."""

    def __init__(self, address: str):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.identity = secrets.token_hex(IDENTITY_BYTES // 2)
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.socket.listen(64)
        self.address, self.port = self.socket.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self.identity.encode())
            while command := connection.recv(1):
                if command == b"p":
                    connection.sendall(CLOCK.pack(time.time()))
                else:
                    _swallow(connection, NUMBER.unpack(_receive(connection, NUMBER.size))[0])
                    connection.sendall(b"k")

    def close(self) -> None:
        self.socket.close()


def measure(address: str, port: int, identity: str, seconds: float) -> dict:
    """Latency in ms (one way, half the best round trip), rate in Mbit/s, clock difference in ms (theirs - ours).

    Takes about `seconds`. Where there is no way, {"error": why}; it never raises OSError.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = _receive(connection, IDENTITY_BYTES).decode(errors="replace")
            if found != identity:
                return {"error": "another program answers there"}
            round_trip, difference = min(_ping(connection) for _ in range(PINGS))
            return {
                "latency_ms": round(round_trip / 2 * 1e3, 4),
                "mbit_per_second": round(_rate(connection, seconds, round_trip) / 1e6, 1),
                "clock_ms": round(difference * 1e3, 2),
            }
    except EOFError:
        return {"error": "the connection was closed"}
    except OSError as error:
        return {"error": "no answer (timed out)" if isinstance(error, TimeoutError) else error.strerror or str(error)}


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and how many seconds the other clock is ahead of ours (as NTP finds it)."""
    sent, began = time.time(), time.perf_counter()
    connection.sendall(b"p")
    theirs = CLOCK.unpack(_receive(connection, CLOCK.size))[0]
    round_trip = time.perf_counter() - began
    return round_trip, theirs - (sent + round_trip / 2)


def _rate(connection: socket.socket, seconds: float, round_trip: float) -> float:
    """Bits per second, sent from here. A first burst says how much to send in the time that there is."""
    first = _send(connection, FIRST_BYTES)
    size = int(min(MOST_BYTES, max(FIRST_BYTES, FIRST_BYTES * seconds / first)))
    took = _send(connection, size) - round_trip
    return 8 * size / max(took, 1e-6)


def _send(connection: socket.socket, size: int) -> float:
    began = time.perf_counter()
    connection.sendall(b"b" + NUMBER.pack(size))
    for offset in range(0, size, len(CHUNK)):
        connection.sendall(memoryview(CHUNK)[: size - offset])
    _receive(connection, 1)
    return time.perf_counter() - began


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _swallow(connection: socket.socket, size: int) -> None:
    buffer = bytearray(len(CHUNK))
    while size:
        received = connection.recv_into(buffer, min(size, len(buffer)))
        if not received:
            raise EOFError
        size -= received


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which no node is in two pairs (the circle method of tournaments)."""
    places = list(range(nodes + nodes % 2))  # with an odd number, the one paired with the extra place rests
    result = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        result.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
        places = [places[0], places[-1], *places[1:-1]]
    return result
