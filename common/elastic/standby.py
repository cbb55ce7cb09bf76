"""The *standby*: a small store that each process of a run with --elastic serves, where the others come to it.

At the standby of the rank that leads, each value after the seal with the job's secret (secret.py):

    run               what somebody outside of the run must know, as JSON
    present           counts the processes that have come here
    /present/N        one of them, as JSON: its standby, and where it runs; a member also says that it is one
    /verdict/N        the leader's answer to it: the members of the next generation

A generation meets at the standby of its leader too. The process that a value is meant for deletes it after reading,
because a run may last for weeks.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from common.console import say
from common.errors import UserError
from common.join import network
from common.join.handshake import OTHER_SECRET
from common.join.lost import MEET
from common.join.secret import is_sealed, seal
from common.join.store import connect, serve_at, split

ANSWER_SECONDS = 1.0  # for a store to answer
REACH_SECONDS = 0.5  # for a machine to accept a connection
PAUSE_SECONDS = 0.05  # between two attempts
OF_GENERATION = re.compile(r"(?:join|run/[^/]+)/(\d+)/")  # a key of the handshake, or of what follows it
ALIVE, DEAD, SILENT = "alive", "dead", "silent"


class Standby:
    """The standby that this process serves, and who waits there."""

    def __init__(self, host: str, secret: bytes = b""):
        self.store, port = serve_at(host)
        self.address = f"{host} {port}"  # which also tells one process from another
        self.secret = secret
        self.silent: set[str] = set()  # the standbys of those that could not be reached once
        self.looks = threading.Lock()
        self.counted, self.coming = 0, set[int]()  # of those that have come, and who has said nothing yet
        self.waiting: dict[int, dict] = {}  # those that have had no verdict yet, by number

    def look(self) -> None:
        """Note who has come, and who has left."""
        with self.looks:  # a thread looks while the ranks train, and may end late
            self._look()

    def _look(self) -> None:
        before, self.counted = self.counted, self.store.add("present", 0)
        self.coming |= set(range(before + 1, self.counted + 1))
        for number in sorted(self.coming):
            if self.store.check([f"present/{number}"]):
                self.coming.remove(number)
                self._admit(number, self.store.get(f"present/{number}").decode(errors="replace"))
                self.store.delete_key(f"present/{number}")
        for number in list(self.waiting):
            if self.store.check([f"present/{number}/left"]):
                self.store.delete_key(f"present/{number}/left")
                del self.waiting[number]

    def _admit(self, number: int, posted: str) -> None:
        code, _, content = posted.partition(" ")
        if (one := _read(content)) is None:
            say("something that is not a rank of this code has written into the store: ignored", rank=0)
        elif is_sealed(self.secret, code, "present", str(number), content):
            self.waiting[number] = one
        else:
            say(f"{one['host']} has another secret than this rank (--secret-file): not let in", rank=0)
            self._post(number, {"refused": "secret"})  # it cannot open this, and says why

    def post_run(self, run: dict) -> None:
        content = json.dumps(run)
        self.store.set("run", f"{seal(self.secret, 'run', content)} {content}")

    def answer(self, number: int, verdict: dict) -> None:
        """Tell one that waits."""
        self._post(number, verdict)
        del self.waiting[number]

    def _post(self, number: int, verdict: dict) -> None:
        content = json.dumps(verdict)
        self.store.set(f"verdict/{number}", f"{seal(self.secret, 'verdict', str(number), content)} {content}")

    def forget_generations(self, before: int) -> None:
        """Delete what the members of these generations have left here, which nobody reads any more, but for the note
        that they are to meet: a rank that was frozen may ask for it."""
        for key in self.store.list_keys():
            if (found := OF_GENERATION.match(key)) and int(found[1]) < before and not key.endswith(MEET):
                self.store.delete_key(key)


def posted_run(store: dist.Store, secret: bytes) -> dict | None:
    """What `Standby.post_run` has posted; None where this is no standby of a member. Raises UserError for a run with
    another secret."""
    if not store.check(["run"]):
        return None
    code, _, content = store.get("run").decode(errors="replace").partition(" ")
    if not is_sealed(secret, code, "run", content):
        raise UserError("--secret-file, or UNEVEN_DDP_SECRET, is not what the run has: give the same, or none as there")
    try:
        run = json.loads(content)
        kinds = isinstance(run["flags"], dict), type(run["size"]) is int, run["meets"].startswith("tcp://")
        has_members = run["members"] != [] and all(split(address)[0] for address in run["members"])
        return run if all(kinds) and run["size"] > 0 and has_members else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # anyone may have written it
        return None


class Visit:
    """A process's wait at the standby of another one. Raises RuntimeError when that one has ended."""

    def __init__(self, store: dist.Store, me: dict, secret: bytes):
        self.store, self.secret = store, secret
        self.number = store.add("present", 1)
        content = json.dumps(me)
        store.set(f"present/{self.number}", f"{seal(secret, 'present', str(self.number), content)} {content}")

    def verdict(self) -> dict | None:
        """The leader's answer; None while there is none. Raises UserError if the leader has another secret."""
        if not self.store.check([f"verdict/{self.number}"]):
            return None
        posted = self.store.get(f"verdict/{self.number}").decode(errors="replace")
        with contextlib.suppress(RuntimeError):  # its process may have ended by now
            self.store.delete_key(f"verdict/{self.number}")
        code, _, content = posted.partition(" ")
        if not is_sealed(self.secret, code, "verdict", str(self.number), content):
            raise UserError(f"{OTHER_SECRET} than the run that is under way: give the same on every node")
        return json.loads(content)

    def leave(self) -> None:
        self.store.set(f"present/{self.number}/left", "")


def _read(content: str) -> dict | None:
    """What a process has written about itself, or None for what is none: anyone who reaches the store can write."""
    try:
        one = json.loads(content)
        texts = [one["host"], one["predecessor"], one["launch"], one["gpu"], split(one["standby"])[0]]
        numbers = [one["original"], one["node_rank"], one["local_rank"]]
        is_late, stop = one.get("late", False), one.get("stop", False)
        sections = list(one.get("claim", {}).values())
        texts += [text for section in sections for text in section.values()]
        is_right = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        return one if is_right and isinstance(is_late, bool) and isinstance(stop, bool) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def reach(address: str) -> dist.Store | None:
    """The store at this address, or None where nothing answers, or where this is no address."""
    try:
        host, port = split(address)
    except ValueError:
        return None
    return connect(host, port, ANSWER_SECONDS, gives_up=True) if network.listens(host, port, REACH_SECONDS) else None


def reach_unless_dead(address: str, until: float) -> dist.Store | None:
    """The store at this address, or None where its machine refuses the connection. One that does not answer is tried
    again until `time.monotonic()` is `until`: where all cores are busy, it may take longer than `reach` waits."""
    while (store := reach(address)) is None:
        if time.monotonic() > until or states([address]) == [DEAD]:
            return None
        time.sleep(PAUSE_SECONDS)
    return store


def states(addresses: Sequence[str]) -> list[str]:
    """Whether the processes with these standbys are alive: one whose machine refuses the connection is dead, one that
    does not answer may be frozen or cut off."""
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(_state, addresses))


def _state(address: str) -> str:
    host, port = split(address)
    if (answers := network.listens(host, port, REACH_SECONDS)) is False:
        return DEAD
    return ALIVE if answers and connect(host, port, ANSWER_SECONDS, gives_up=True) is not None else SILENT
