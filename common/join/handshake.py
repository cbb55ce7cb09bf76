"""The handshake: every rank posts its view in the store, rank 0 compares them, all get the same verdict.

The verdict is "go on", or one message that names the node, the field and both values. The store may still hold the
keys of a run that died (torchrun's restarts), so only processes that answer a fresh token count:

    every rank   entry = add(entries);  set(entry/view)
    rank 0       set(entry/challenge, token)                    the token is new in each run
    every rank   answer = add(token/answers);  set(token/answer, entry and a seal of token, entry and view)
    rank 0       all ranks have answered once, all views agree:  set(token/verdict, with a seal)

Seals are made with the job's secret, where it has one (secret.py): rank 0 ignores an answer without it, and the others
a verdict without it.

On a store that rank 0 serves, only rank 0 and the first rank of each node poll. The others make a fixed number of
requests, so the total grows linearly with the number of ranks. `generation` counts the joins of one job: its members
may join again later, on the same store.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from common.console import say
from common.errors import RankLost, UserError
from common.join import meeting_file
from common.join.ended import CURRENT
from common.join.leader import LINGER_SECONDS, Leader
from common.join.secret import is_sealed, seal
from common.join.store import SAY_EVERY_SECONDS, elsewhere
from common.join.view import claimed_twice, place
from common.join.waiting import Every, poll
from common.launch.layout import Worker

LEADER = "members"  # the key that says where the rank that leads the members of a run is (--elastic)
LOOK_SECONDS = 0.5  # between two looks of the leader for ranks that have ended (--elastic)
DOUBT_SECONDS = 1.0  # between two checks, without a challenge, whether this store's run is complete
Ended = Callable[[Sequence[int]], list[int]]  # which of these ranks have ended
OTHER_SECRET = "this rank has another secret (--secret-file, UNEVEN_DDP_SECRET)"


class RunUnderWay(Exception):
    """The members of a run that is under way may let this process in (--elastic)."""

    def __init__(self, leader: str):
        super().__init__(leader)
        self.leader = leader  # where the rank that leads them is


def leader_in(store: dist.Store) -> str:
    """Where the rank that leads the members of a run is, by a store; empty where it does not say."""
    return store.get(LEADER).decode() if store.check([LEADER]) else ""


@dataclass(frozen=True)
class Verdict:
    """What all ranks have agreed on."""

    store: dist.Store  # of this run and generation alone, whatever else the underlying store holds
    views: list[dict]  # by rank
    master_address: str  # of the master, as the other nodes reach it; empty where there are none


class Handshake:
    """One rank's side of the handshake. Every rank must make one, and `run` it.

    With `elastic`, a run that has begun already may let this process in. `ended`, which rank 0 calls about the ranks
    that are missing, says which of these have ended.
    """

    def __init__(
        self,
        worker: Worker,
        store: dist.Store,
        view: dict,
        join_timeout_seconds: float,
        leads: bool,
        secret: bytes = b"",
        generation: int = 0,
        elastic: bool = False,
        ended: Ended | None = None,
    ):
        self.whole_store, self.generation = store, generation
        self.store = store = dist.PrefixStore(f"join/{generation}", store)
        # says where a run that has begun already is led; None where none lets us in
        self.under_way = under_way = self.whole_store if elastic and not generation else None
        self.ended = ended
        self.worker, self.view, self.secret = worker, view, secret
        layout = worker.layout
        self.store_may_outlive_run = not layout.hosts_store
        # A rank that is neither the leader nor the first of its node can wait for the next key in one request.
        self.can_block = worker.local_rank > 0 and not (leads or self.store_may_outlive_run or under_way)
        self.on_local_disk = meeting_file.advice_for_local_disk(layout)
        self.patience_seconds = meeting_file.patience_seconds(layout, join_timeout_seconds)
        self.is_time_to_speak, self.is_time_to_doubt = Every(SAY_EVERY_SECONDS), Every(DOUBT_SECONDS)
        self.is_time_to_look = Every(LOOK_SECONDS)
        self.leader = Leader(worker, store, view, secret) if leads else None
        self.entry, self.token, self.posted = 0, "", ""

    def run(self) -> Verdict:
        """Agree with all other ranks.

        Raises UserError on every rank when the views differ, RankLost when a rank is missing at --join-timeout, or as
        soon as one of them has `ended`, and RunUnderWay where a run has begun already.
        """
        self._refuse_complete_run()
        self.entry = self.store.add("entries", 1)
        self.view["entry"] = self.entry
        self.posted = json.dumps(self.view)
        self.store.set(f"{self.entry}/view", self.posted)
        # The leader decides at the timeout. The others wait a little longer, to read its verdict.
        spare = 0 if self.leader or self.on_local_disk else LINGER_SECONDS
        verdict = poll(self._advance, self.patience_seconds + spare, self._meanwhile)
        if verdict is None and self.leader:
            self.leader.decide(self._too_late(self.leader.missing()), missing=True)
            verdict = poll(self._advance, LINGER_SECONDS)
        if verdict is None:
            raise RankLost(self._too_late("rank 0"), same_on_every_rank=True)
        self.store.add(f"{self.token}/heard", 1)
        if self.leader:
            self.leader.linger(verdict)
        if problem := verdict.get("problem"):
            raise (RankLost if verdict.get("missing") else UserError)(problem, same_on_every_rank=True)
        holder = verdict["views"][self.worker.rank]
        if holder["nonce"] != self.view["nonce"] and holder["entry"] == self.entry:
            raise UserError(f"{self.worker.layout.init_method} has given the verdict of another run: is it ours?")
        if holder["entry"] != self.entry:  # this process joined while the others were reading the verdict
            raise UserError(claimed_twice(holder, self.view))
        prefix = f"run/{self.token}/{self.generation}"
        if self.leader:
            self.whole_store.set(CURRENT, prefix)
        return Verdict(dist.PrefixStore(prefix, self.whole_store), verdict["views"], verdict["master"])

    def _advance(self) -> dict | None:
        """Answer a new challenge; return the verdict once it is posted. On rank 0, let the leader advance too."""
        if self.under_way and (leader := leader_in(self.under_way)):
            raise RunUnderWay(leader)
        if self.leader:
            self.leader.advance()
        if self.token and (verdict := self._await(f"{self.token}/verdict")):
            return self._open(verdict)
        if self.token and self._read(f"{self.entry}/refused"):
            raise UserError(f"{OTHER_SECRET} than rank 0, or one of them has none: give the same on every node")
        # In a store that outlives its runs the first challenge may be from a run that died: look for a newer one.
        if not self.token or self.store_may_outlive_run:
            challenge = self._await(f"{self.entry}/challenge")
            if challenge and challenge != self.token:
                self.token = challenge
                answer = self.store.add(f"{challenge}/answers", 1)
                code = seal(self.secret, challenge, str(self.entry), self.posted)
                self.store.set(f"{challenge}/answer/{answer}", f"{self.entry} {code}")
        return None

    def _open(self, verdict: str) -> dict:
        """The verdict, if rank 0 knows the secret. Raises UserError."""
        code, _, content = verdict.partition(" ")
        if not is_sealed(self.secret, code, self.token, content):
            raise UserError(
                f"{OTHER_SECRET} than the process that serves {self.worker.layout.init_method}: is it ours?"
            )
        return json.loads(content)

    def _await(self, key: str) -> str:
        """The value of a key that the leader sets; for a rank that polls, empty while it is not set."""
        if self.can_block:
            with contextlib.suppress(RuntimeError):  # at the timeout
                self.store.wait([key], timedelta(seconds=self.patience_seconds + LINGER_SECONDS))
        return self._read(key)

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _meanwhile(self, elapsed_seconds: float) -> None:
        if self.is_time_to_doubt():
            self._refuse_complete_run()
        if self.leader and self.ended and self.is_time_to_look():
            self.leader.give_up(self.ended(self.leader.absent()))
        if self.worker.local_rank == 0 and self.is_time_to_speak():
            missing = self.leader.missing() if self.leader else self._read("missing") or "rank 0"
            left = max(0.0, self.patience_seconds - elapsed_seconds)
            say(f"waiting for {missing}; giving up in {left:.0f} s", self.worker.rank)

    def _too_late(self, missing: str) -> str:
        fix = self.on_local_disk or f"start it, or look at its log.{elsewhere(self.worker)}".rstrip(".")
        return f"{missing} did not join within {self.patience_seconds:.0f} s (--join-timeout): {fix}"

    def _refuse_complete_run(self) -> None:
        """Raise UserError if the run on this store, which rank 0 of that run serves, has all its ranks already."""
        if self.token or self.leader or self.store_may_outlive_run or self.under_way:
            return
        if taken := self._read("closed"):
            places = json.loads(taken)
            holder = places.get(str(self.worker.rank))
            raise UserError(
                f"rank {self.worker.rank} of {place(self.view)} tried to join a run that is complete: "
                + (f"the rank is held by {holder}" if holder else f"it has ranks 0 to {len(places) - 1}")
                + f". Another run of ours holds {self.worker.layout.init_method}: "
                f"choose another {'file' if self.worker.layout.meets_at_file else '--master-port'} on every node",
                same_on_every_rank=True,
            )
