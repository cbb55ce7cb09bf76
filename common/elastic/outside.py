"""From outside of a run: a machine that wants to join it (--join), and whoever asks it to end (--stop)."""

import math
import os
import shlex
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import say
from common.elastic.membership import Membership, address_of
from common.elastic.standby import ALIVE, DEAD, Visit, posted_run, reach, reach_unless_dead, states
from common.errors import RunError, UserError
from common.join import network
from common.join.connections import cut_off
from common.join.ended import CURRENT
from common.join.handshake import leader_in
from common.join.store import HOST, SAY_EVERY_SECONDS, program, split
from common.join.waiting import Every, limit, poll
from common.launch.addresses import host_and_port, tcp_address
from common.launch.values import is_folder

ADDRESSES = "members.txt"  # in the folder of a run
LISTEN_SECONDS = 2.0  # for a machine to accept a connection
BUSY_SECONDS = 10.0  # for a run whose cores are all busy to answer
ANNOUNCE_SECONDS = 5.0  # after its ranks have joined, for a run with --elastic to say where its members are
SEE = "the log of the run shows the address, at its line `members`"
FIND_SECONDS = 15.0  # a run that is to end
SILENT_SECONDS = 30.0  # without an answer from any member, where some have ended
STOP_SECONDS = 600.0  # for a run to save and end


def say_how_to_join(members: Membership, folder: Path) -> None:
    """Say where others join this run, where that is new. Write the addresses of its members into its folder, for --join
    and --stop with that folder. Call it once the folder is this run's."""
    with suppress(OSError):  # a full disk is said where more depends on it
        aside = folder / f".{ADDRESSES}-{os.getpid()}"
        aside.write_text("".join(f"{address_of(view)}\n" for view in members.views))
        aside.replace(folder / ADDRESSES)
    if not members.has_led:
        members.has_led = True
        address = tcp_address(*split(members.address)).removeprefix("tcp://")
        secret = " --secret-file FILE" * bool(members.options.secret)
        say(f"members  another machine joins by: {shlex.join(program())} --join {address}{secret}", rank=0)


def find(
    flag: str, address: str, secret: bytes, seconds: float, members: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Where the rank that leads the run at `address`, HOST:PORT or the folder of a run, can be reached, and what
    `Membership.run` says of it. Waits at most `seconds` for a run that has not begun. `members` are standbys at which
    it may be found too.

    Raises UserError where there is no run that others may join, and RunError where it does not begin.
    """
    folder, is_time, ranks_joined = Path(address), Every(SAY_EVERY_SECONDS), math.inf
    if not (is_folder(address) or members):
        _require_run(flag, address)

    def look() -> tuple[str, dict[str, Any]] | None:
        nonlocal ranks_joined
        known = _read_addresses(folder) if is_folder(address) else [_spaced(address)]
        for store in filter(None, map(reach, dict.fromkeys([*known, *members]))):
            with suppress(RuntimeError), _answering(store):  # it has ended meanwhile
                leader = leader_in(store)
                if leader and (there := reach(leader)):
                    with _answering(there):
                        run = posted_run(there, secret)
                    if run:
                        return leader, run
                if not leader and store.check([CURRENT]):
                    ranks_joined = min(ranks_joined, time.monotonic())
        if time.monotonic() - ranks_joined > ANNOUNCE_SECONDS:
            raise UserError(
                f"{flag} {address}: the run there was started without --elastic, so its ranks stay: "
                "end it with Ctrl-C, and go on with --elastic 1 --resume"
            )
        return None

    def meanwhile(elapsed_seconds: float) -> None:
        if is_time():
            why = "no member of it answers: has it begun, has it ended?"
            if is_folder(address) and not (folder / ADDRESSES).is_file():
                why = "no run with --elastic has begun there" if folder.is_dir() else "there is no such folder yet"
            say(f"waiting for the run at {address} ({why}); giving up in {seconds - elapsed_seconds:.0f} s")

    if found := poll(look, seconds, meanwhile):
        return found
    raise RunError(f"{flag} {address}: no member of a run there has answered for {seconds:.0f} s (--join-timeout)")


def _read_addresses(folder: Path) -> list[str]:
    file = folder / ADDRESSES
    return file.read_text().splitlines() if file.is_file() else []


def _spaced(address: str) -> str:
    host, port = host_and_port(address)
    return f"{host} {port}"


def _require_run(flag: str, address: str) -> None:
    """Raise UserError unless the store of a run of this code is served at HOST:PORT."""
    host, port = host_and_port(address)
    if not network.resolve(host):
        raise UserError(f"{flag} {address}: {socket.gethostname()} cannot resolve {host}: give a name or an address")
    store = reach_unless_dead(f"{host} {port}", time.monotonic() + BUSY_SECONDS)
    if store is None:
        raise UserError(f"{flag} {address}: {_nothing(host, port)}")
    try:
        with _answering(store):
            is_ours = store.check([HOST]) or leader_in(store)
    except RuntimeError:
        raise UserError(f"{flag} {address}: {_nothing(host, port)}") from None
    if not is_ours:
        raise UserError(f"{flag} {address}: what answers there is no run of this code; {SEE}")


def _nothing(host: str, port: int) -> str:
    answers = network.listens(host, port, LISTEN_SECONDS)
    if answers is None:
        return f"{host} does not answer: is it on, and the firewall right?"
    if answers:
        return f"another program answers there, or a run that is frozen; {SEE}"
    return f"nothing listens there: has the run ended? {SEE[0].upper()}{SEE[1:]}"


def stop(flag: str, address: str, secret: bytes, seconds: float) -> str:
    """Ask the run at `address` to save and end, and wait for that. Returns what it has said at its end."""
    seconds = min(seconds, FIND_SECONDS)
    leader, run = find(flag, address, secret, seconds)
    heard = time.monotonic()
    until = heard + STOP_SECONDS
    while time.monotonic() < until:
        store = reach_unless_dead(leader, time.monotonic() + BUSY_SECONDS)
        known = states(run["members"]) if store is None else [ALIVE]
        if set(known) == {DEAD}:
            return "the run has ended"
        if ALIVE in known or DEAD not in known:  # some may only be busy
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENT_SECONDS:
            raise RunError(f"{flag} {address}: some members have ended, and no other answers: see the log of the run")
        if store is None:
            left = until - time.monotonic()
            say(f"the rank that leads the run does not answer: asking again, for at most {left:.0f} s")
        else:
            with suppress(RuntimeError):  # the rank that led has ended: another one may lead
                return _ask(store, secret, until - time.monotonic())["ended"]
        with suppress(UserError, RunError):  # the others may still be meeting
            leader, run = find(flag, address, secret, seconds, run["members"])
            heard = time.monotonic()
    raise RunError(f"{flag} {address}: the run has not ended within {STOP_SECONDS:.0f} s: see its log")


def _ask(store: dist.Store, secret: bytes, seconds: float) -> dict[str, Any]:
    me = {"host": socket.gethostname(), "standby": " 0", "predecessor": "", "launch": "", "gpu": "", "stop": True}
    with _answering(store):
        visit = Visit(store, me | {"original": -1, "node_rank": -1, "local_rank": 0}, secret)
    say("asked the run to save and end")

    def verdict() -> dict | None:
        with _answering(store):
            return visit.verdict()

    found = poll(verdict, seconds, longest_pause_seconds=0.1)
    with suppress(RuntimeError), _answering(store):  # the rank that leads waits for this, for some seconds
        store.add("dismissed", 1)
    return found or {"ended": "the run has not ended yet: see its log"}


def _answering(store: dist.Store) -> AbstractContextManager[None]:
    """The body raises RuntimeError where this store does not answer any more, as on a machine that is cut off."""
    return limit(BUSY_SECONDS, None, "a request to the run", instead=lambda: cut_off(store))
