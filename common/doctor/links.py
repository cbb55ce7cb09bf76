"""A test of plain TCP between two nodes: whether it connects, its latency and rate, and how far the clocks differ.

Each node listens at the address that gloo and NCCL will use, on a port that the system chooses, as they do. So this
finds in two seconds what a process group finds in minutes: a wrong interface, a firewall, a slow link.

    server   its identity, 32 bytes
    client   a number n (8 bytes), then n bytes     server   its clock in seconds (8 bytes)     any number of times
"""

import contextlib
import secrets
import socket
import socketserver
import struct
import threading
import time

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 6.0
PINGS = 20
FIRST_BYTES = 256 * 1024  # fills the path before the measurement, so that TCP's slow start does not count
ATTEMPTS = 3
MOST_BYTES = 256 * 1024 * 1024
CHUNK = bytes(1024 * 1024)
NUMBER = struct.Struct("!Q")
CLOCK = struct.Struct("!d")
IDENTITY_BYTES = 32


class Server(socketserver.ThreadingTCPServer):
    """Answers the `Connection`s of other nodes at `address`, on a free port, until it is closed. Raises OSError."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.identity = secrets.token_hex(IDENTITY_BYTES // 2)
        super().__init__((address, 0), _Handler)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        assert isinstance(self.server, Server)
        buffer = memoryview(bytearray(len(CHUNK)))
        with contextlib.suppress(OSError, struct.error):  # the other side has left, perhaps in the middle of a number
            self.wfile.write(self.server.identity.encode())
            while header := self.rfile.read(NUMBER.size):
                (size,) = NUMBER.unpack(header)
                while size:
                    if not (received := self.rfile.readinto(buffer[:size])):
                        return
                    size -= received
                self.wfile.write(CLOCK.pack(time.time()))


class Connection:
    """A connection to another node's `Server`. Everything raises OSError where the link does not work; see `reason`."""

    def __init__(self, address: str, port: int, identity: str):
        self.socket = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        self.socket.settimeout(ANSWER_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replies = self.socket.makefile("rb")
        self.round_trip_seconds = 0.0
        if self._read(IDENTITY_BYTES) != identity.encode():
            self.close()
            raise ConnectionError("another program answers there")

    def latency(self) -> tuple[float, float]:
        """(half of the best round trip, how far the other clock is ahead of ours, as NTP computes it), in seconds."""
        pings = []
        for _ in range(PINGS):
            sent = time.time()
            round_trip, clock = self._send(0)
            pings.append((round_trip, clock - (sent + round_trip / 2)))
        self.round_trip_seconds, ahead = min(pings)
        return self.round_trip_seconds / 2, ahead

    def rate(self, seconds: float) -> float:
        """Bits per second, sent from here in about `seconds`. Call `latency` before.

        The best of several attempts: where other programs use the cores, one may wait for a core and not for the link.
        """
        fastest = FIRST_BYTES / self._send(FIRST_BYTES)[0]  # bytes a second: tells how much can be sent in the time
        best, until = 0.0, time.perf_counter() + seconds
        for attempt in range(ATTEMPTS):
            size = int(min(MOST_BYTES, max(FIRST_BYTES, fastest * seconds / ATTEMPTS)))
            took = self._send(size)[0] - self.round_trip_seconds
            best = max(best, size / max(took, 1e-6))
            fastest = max(fastest, best)
            if attempt and time.perf_counter() > until:
                break
        return 8 * best

    def close(self) -> None:
        self.replies.close()
        self.socket.close()

    def _send(self, size: int) -> tuple[float, float]:
        """Send `size` bytes. Returns the seconds until the answer, and the other side's clock."""
        began = time.perf_counter()
        self.socket.sendall(NUMBER.pack(size))
        for offset in range(0, size, len(CHUNK)):
            self.socket.sendall(memoryview(CHUNK)[: size - offset])
        clock = CLOCK.unpack(self._read(CLOCK.size))[0]
        return time.perf_counter() - began, clock

    def _read(self, size: int) -> bytes:
        data = self.replies.read(size)
        if len(data) < size:
            raise ConnectionError("the connection was closed")
        return data


def reason(error: OSError) -> str:
    """Why a link does not work, for messages."""
    return "no answer (timed out)" if isinstance(error, TimeoutError) else error.strerror or str(error)
