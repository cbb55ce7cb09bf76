"""Hosts on this machine, joined by a link with a rate and a delay, without root: for `play_nodes.py --link`.

Each host is a network namespace with one interface, link0. The other end of its cable lies in a namespace of ours,
where one process reads every packet and hands it to its receiver later. All of it belongs to this process and ends with
it. Linux only; needs the command `ip` (iproute2).
"""

import contextlib
import ctypes
import errno
import heapq
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
ETH_P_ALL = 0x0003  # linux/if_ether.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HEADER_BYTES = 10  # in front of each packet, with PACKET_VNET_HDR: the kernel may hand over 64 KB in one piece
LARGEST_PACKET = 65536 + 64
QUEUE_SECONDS, QUEUE_BYTES = 0.1, 512 * 1024  # what waits for the cable beyond both is dropped, as in a switch

libc = ctypes.CDLL(None, use_errno=True)


class Hosts:
    """Namespaces with the addresses 10.78.0.1, 10.78.0.2, ... Make them before any thread is started.

    Every host sends `bytes_per_second` at most; what it sends arrives `delay_seconds` later. Raises OSError where the
    kernel does not let this user make namespaces, or where `ip` is not there or fails.
    """

    def __init__(self, count: int, bytes_per_second: float, delay_seconds: float):
        if not hasattr(libc, "unshare"):
            raise OSError(errno.ENOSYS, "this system has no namespaces")
        uid, gid = os.getuid(), os.getgid()
        _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET))  # in it, this user may do what root may, to these networks
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        self.ours = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.namespaces = [self._host(number) for number in range(count)]
        self.switch = os.fork()
        if not self.switch:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the nodes, which still have to talk
            try:
                Switch(count, bytes_per_second, delay_seconds).run()
            finally:
                os._exit(1)

    def address(self, number: int) -> str:
        return f"10.78.0.{number + 1}"

    def enter(self, number: int) -> None:
        """Make this process, which has just been forked, one of host `number`."""
        _check(libc.setns(self.namespaces[number], CLONE_NEWNET))

    def close(self) -> None:
        """End the process that hands packets on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.switch, signal.SIGKILL)
            os.waitpid(self.switch, 0)

    def _host(self, number: int) -> int:
        """Make a host. Returns the descriptor of its namespace."""
        _check(libc.unshare(CLONE_NEWNET))
        namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        _ip("link", "set", "lo", "up")
        _check(libc.setns(self.ours, CLONE_NEWNET))
        there = ("netns", f"/proc/self/fd/{namespace}")
        _ip(*f"link add cable{number} type veth peer name link0".split(), *there, keep=namespace)
        _ip("link", "set", f"cable{number}", "address", _mac(number, 1), "addrgenmode", "none", "up")
        _check(libc.setns(namespace, CLONE_NEWNET))
        _ip("link", "set", "link0", "address", _mac(number), "addrgenmode", "none", "up")
        _ip("address", "add", f"{self.address(number)}/24", "dev", "link0")
        _check(libc.setns(self.ours, CLONE_NEWNET))
        return namespace


class Switch:
    """Reads what the hosts send, and hands it on when it would have arrived."""

    def __init__(self, count: int, bytes_per_second: float, delay_seconds: float):
        self.rate, self.delay = bytes_per_second, delay_seconds
        self.cables = [self._cable(number) for number in range(count)]
        self.port_of = {bytes.fromhex(_mac(number).replace(":", "")): number for number in range(count)}
        self.free_at = [0.0] * count  # when the last packet of each host is on its way
        self.on_its_way: list[tuple[float, int, int, bytes]] = []  # (due, order, to, packet)
        self.order = 0

    def _cable(self, number: int) -> socket.socket:
        cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        cable.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        cable.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        cable.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024 * 1024)
        cable.bind((f"cable{number}", ETH_P_ALL))
        cable.setblocking(False)
        return cable

    def run(self) -> None:
        """Until this process is ended."""
        poller = select.epoll()
        number_of = {cable.fileno(): number for number, cable in enumerate(self.cables)}
        for file in number_of:
            poller.register(file, select.EPOLLIN)
        while True:
            wait = max(0.0, self.on_its_way[0][0] - time.monotonic()) if self.on_its_way else -1
            for file, _ in poller.poll(wait):
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        self.take(number_of[file], self.cables[number_of[file]].recv(LARGEST_PACKET))
            self.hand_on()

    def take(self, sender: int, packet: bytes) -> None:
        """A packet that a host has sent, with its header in front."""
        now = time.monotonic()
        size, waits = len(packet) - HEADER_BYTES, max(0.0, self.free_at[sender] - now)
        if waits > QUEUE_SECONDS and waits * self.rate > QUEUE_BYTES:
            return
        self.free_at[sender] = now + waits + size / self.rate
        receiver = self.port_of.get(packet[HEADER_BYTES : HEADER_BYTES + 6])
        everyone = [number for number in range(len(self.cables)) if number != sender]  # "who has this address?"
        for number in everyone if receiver is None else [receiver]:
            self.order += 1
            heapq.heappush(self.on_its_way, (self.free_at[sender] + self.delay, self.order, number, packet))

    def hand_on(self) -> None:
        """Give each packet that is due to its receiver."""
        while self.on_its_way and self.on_its_way[0][0] <= time.monotonic():
            _, _, receiver, packet = heapq.heappop(self.on_its_way)
            with contextlib.suppress(OSError):  # lost, as on a real line
                self.cables[receiver].send(packet)


def _mac(host: int, end: int = 0) -> str:
    return ":".join(f"{byte:02x}" for byte in struct.pack("!BBI", 2, end, host))


def _ip(*words: str, keep: int | None = None) -> None:
    """Run a command of `ip`. Raises OSError with what it says."""
    kept = () if keep is None else (keep,)
    done = subprocess.run(["ip", *words], capture_output=True, text=True, pass_fds=kept)
    if done.returncode:
        raise OSError(0, f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _check(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit("played_link.py is a part of play_nodes.py --link")
