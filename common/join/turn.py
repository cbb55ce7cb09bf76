"""A piece of work that some ranks do while the others wait on the store, and not in a collective, which would time out.

turn/WHAT/NUMBER/heartbeat/RANK     counted up each second by every rank that is inside
                /done/NAME          NAME has done its part
                /failed             the first failure, as JSON
                /heard/RANK         this rank knows of it

What a turn has written is deleted once all ranks have left it, so that a store does not grow with a long run.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

from common.console import say
from common.errors import ExplainedError, RankLost, RunError, UserError, before_exit
from common.join.connections import Connections, cut_off
from common.join.ended import all_have, post, posted, running
from common.join.lost import MEET, echoes, ended_in_words, is_contact_lost, runs_here, see_log, store_request
from common.join.view import place, places
from common.join.waiting import Every, limit, poll
from common.launch.layout import Worker

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 3.0  # without a heartbeat, after which it is looked whether a rank has ended
LINGER_SECONDS = 20.0  # more than rank 0, whose process may hold the store, stays after a failure (launch/worker.py)
SAY_EVERY_SECONDS = 40.0
SOON_SECONDS = 0.2  # in which the last rank comes, where all do the same: waited for without polling


class Written:
    """Keys of a store that this rank deletes once all ranks have done with them."""

    def __init__(self, store: dist.Store, *keys: str):
        self.store, self.keys = store, set(keys)

    def writes(self, key: str) -> str:
        """Note the key, and return it."""
        self.keys.add(key)
        return key

    def forget(self) -> None:
        """Delete the keys."""
        with contextlib.suppress(RuntimeError):  # without a store: what follows finds out
            for key in self.keys:
                self.store.delete_key(key)


def in_time(worker: Worker, work_timeout_seconds: float, what: str) -> contextlib.AbstractContextManager[None]:
    """End this rank if the body takes so long that others which came in time have given up: a disk that hangs?"""
    seconds = work_timeout_seconds + LINGER_SECONDS if worker.world_size > 1 else math.inf
    return limit(seconds, worker.rank, f"{what} (--work-timeout)")


class Turn:
    """One such piece of work, seen from one rank. Every rank makes a Turn of the same name."""

    def __init__(
        self,
        name: str,
        store: dist.Store,
        worker: Worker,
        views: list[dict],
        timeout_seconds: float,  # after which a rank without a heartbeat counts as dead
        work_timeout_seconds: float,  # for the work itself
        others_go_on: bool = False,  # without a rank that is lost (--elastic)
        since_all_met: list[Written] | None = None,  # by this rank, since all ranks have waited for each other
        connections: Connections | None = None,  # to the other ranks
    ):
        self.worker, self.views, self.others_go_on = worker, views, others_go_on
        self.store, self.store_of_all = dist.PrefixStore(f"turn/{name}", store), store
        self.timeout_seconds, self.work_timeout_seconds = timeout_seconds, work_timeout_seconds
        self.say_every_seconds, self.speaks = SAY_EVERY_SECONDS, worker.local_rank == 0
        self.connections = connections or Connections()
        self.written = Written(self.store)  # where nothing has failed
        self.since_all_met = [] if since_all_met is None else since_all_met
        self.since_all_met.append(self.written)
        self.failure: dict | None = None  # this rank's, or another's that it has read
        self.has_failed = False  # it is this rank's
        self.lock = threading.Lock()  # the heartbeat thread polls for failures too

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Run a heartbeat thread beside the body, because a store does not notice a dead rank as a collective does.

        It also polls for failures: rank 0, which may serve the store, exits once every rank has heard of one, perhaps
        while this rank's body is still at work, or between two requests. What the body raises then is that failure.
        Where the body does not end within --work-timeout after that, this rank ends, unless the others go on without it
        (--elastic): alone on its node, it would stay.
        """
        stop = threading.Event()
        most = self.timeout_seconds, self.worker.rank, store_request(self.worker, self.views)
        instead = (lambda: cut_off(self.store)) if self.others_go_on else None

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: the body will find out
                has_failed = False
                while not (has_failed or stop.wait(HEARTBEAT_SECONDS)):
                    with contextlib.suppress(MemoryError), limit(*most, instead=instead):
                        self.store.add(self.written.writes(f"heartbeat/{self.worker.rank}"), 1)
                        has_failed = self.known_failure() is not None and not self.others_go_on
            if not self.others_go_on:  # else they go on without this one
                what = "this rank's own work, since another one has failed or gone (--work-timeout),"
                with limit(self.work_timeout_seconds, self.worker.rank, what, before_exit=self._say_failure):
                    stop.wait()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        with limit(self.timeout_seconds, self.worker.rank, "the start of a thread (is memory short?)"):
            thread.start()
        try:
            yield
        except RuntimeError as error:
            if self.failure and not self.has_failed and is_contact_lost(error):
                raise self._heard(self.failure) from None
            raise
        finally:
            stop.set()
            thread.join()

    @contextlib.contextmanager
    def announcing(self, name: str) -> Iterator[None]:
        """Tell the other ranks when the body is done, or what went wrong in it."""
        try:
            yield
            self.store.set(self.written.writes(f"done/{name}"), "")
        except BaseException as error:
            before_exit(error, self._linger)
            with self.lock:
                if self.failure:  # another rank was first, and has announced it
                    raise
                self.has_failed = True
                self.failure = {
                    "message": str(error) or type(error).__name__,
                    "mistake": isinstance(error, UserError),
                    "lost": isinstance(error, RankLost) or is_contact_lost(error),
                }
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                self.store.set("failed", json.dumps(self.failure))
                self.store.set(f"heard/{self.worker.rank}", "")
            raise

    def wait_for(self, name: str, what: str, watched: Iterable[int]) -> None:
        """Wait until `name` is done, and print now and then that this rank waits for `what`.

        Raises the failure that another rank has announced, and RunError when one of the ranks `watched` has ended or
        has no heartbeat for --timeout, or the work takes longer than --work-timeout.
        """
        watch = _Watch(self, watched)
        is_time_to_speak = Every(self.say_every_seconds)

        def meanwhile(elapsed_seconds: float) -> None:
            self.raise_failure()
            watch.require_alive()
            if self.speaks and is_time_to_speak():
                say(f"waiting for {what} ({elapsed_seconds:.0f} s)", self.worker.rank)

        most = self.work_timeout_seconds
        with limit(most + LINGER_SECONDS, self.worker.rank, f"the wait for {what} (--work-timeout)"):
            if not poll(lambda: self.store.check([f"done/{name}"]), most, meanwhile):
                raise RunError(
                    f"gave up waiting for {what} after {most:.0f} s (--work-timeout): see the log of that rank or node"
                )

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank has called this. The last one sets a key, so that each rank polls one key only.

        Rank 0 watches all heartbeats and announces a failure; the other ranks watch rank 0's.
        """
        if self.store.add("through", 1) == self.worker.world_size:
            self.written.writes("through")
            self.store.set(self.written.writes("done/all"), "")
        with contextlib.suppress(RuntimeError):  # later than that, or without a store: what follows finds out
            self.store.wait(["done/all"], timedelta(seconds=SOON_SECONDS))
        self.wait_for("all", what, watched=range(self.worker.world_size) if self.worker.is_main else [0])
        while self.since_all_met and self.since_all_met[0] is not self.written:  # all ranks have left those before
            self.since_all_met.pop(0).forget()

    def known_failure(self) -> dict | None:
        """The failure that this rank knows of, its own or another's."""
        with self.lock:
            if not self.failure and self.store.check(["failed"]):
                self.failure = json.loads(self.store.get("failed"))
                self.store.set(f"heard/{self.worker.rank}", "")
            return self.failure

    def raise_failure(self) -> None:
        """Raise the failure that a rank has announced, if there is one. Raises RankLost where a rank has lost contact
        before it came here, and has gone to meet the others (--elastic)."""
        if failure := self.known_failure():
            raise self._heard(failure)
        if self.others_go_on and self.store_of_all.check([MEET]):
            raise RankLost("another rank has lost contact with a member")

    def _say_failure(self) -> None:
        if self.failure:
            say(f"error: {self.failure['message']}", self.worker.rank, error=True)

    def _heard(self, failure: dict) -> ExplainedError:
        """The failure that a rank has announced, as an error of this one."""
        kind: type[ExplainedError] = UserError if failure["mistake"] else RankLost if failure["lost"] else RunError
        error = kind(failure["message"], same_on_every_rank=True)
        before_exit(error, self._linger)
        return error

    def _linger(self) -> None:
        """Rank 0 waits until all ranks know of the failure or have ended: the store may end with its process."""
        if self.worker.is_main:
            poll(
                lambda: all_have("heard", self.store, running(self.store_of_all, self.worker, self.views)),
                LINGER_SECONDS,
            )


class _Watch:
    """The ranks that a turn waits for."""

    def __init__(self, turn: Turn, ranks: Iterable[int]):
        self.turn, self.views = turn, turn.views
        self.space = self.views[turn.worker.rank]["pid_space"]
        self.beats = {rank: (0, time.monotonic()) for rank in ranks}  # the last count of each, and since when
        self.is_time = Every(HEARTBEAT_SECONDS)

    def require_alive(self) -> None:
        """Raise RankLost when one of these ranks has ended, as somebody has posted; or has had no heartbeat for some
        seconds, and has ended, as this rank sees; or has had none for --timeout. Where it has ended because of another
        one, that one is named; itself only where nothing is known of the other."""
        if not self.is_time():
            return
        ended = posted(self.turn.store_of_all, self.views)
        known = echoes(self.turn.store_of_all)
        first = {rank: cause for rank, cause in ended.items() if rank not in known}
        if first and self.beats.keys() & ended.keys():
            self.turn.raise_failure()
            raise RankLost(ended_in_words(self.views, first))
        now = time.monotonic()
        for rank, (count, since) in self.beats.items():
            # A store makes each key that it is asked for.
            key = self.turn.written.writes(f"heartbeat/{rank}")
            if (beats := self.turn.store.add(key, 0)) != count:
                self.beats[rank] = beats, now
            elif now - since > self.turn.timeout_seconds:
                silence = f"has had no heartbeat for {self.turn.timeout_seconds:.0f} s (--timeout)"
                raise RankLost(f"{place(self.views[rank])} {silence}: see its log")
        silent = {rank for rank, (_, since) in self.beats.items() if now - since > SILENT_SECONDS}
        if silent and (missing := self._missing()) and silent & set(missing):
            self.turn.raise_failure()
            raise RankLost(self._post_lost([rank for rank in missing if rank not in known] or missing))
        if silent & ended.keys():
            raise RankLost(ended_in_words(self.views, ended))

    def _missing(self) -> list[int]:
        """The ranks that have ended, as this one sees. On another machine, it may be any rank to which a connection was
        closed: by gloo, because NCCL closes some that it no longer needs."""
        hosts = self.turn.connections.closed_to() if dist.get_backend() == dist.Backend.GLOO else set()
        return [
            rank
            for rank, view in enumerate(self.views)
            if (not runs_here(view, self.space) if self._is_here(rank) else view["addresses"]["own"] in hosts)
        ]

    def _is_here(self, rank: int) -> bool:
        return self.views[rank]["pid_space"] == self.space

    def _post_lost(self, missing: list[int]) -> str:
        """Say which these are. Post those that have ended for certain, so that nobody waits for them."""
        certain = list(filter(self._is_here, missing)) or (missing if len(missing) == 1 else [])
        for rank in certain:
            post(self.turn.store_of_all, rank, "")  # its supervisor may post the cause yet
        if certain:
            cause = "" if self._is_here(certain[0]) else "has closed its connections"
            return ended_in_words(self.views, dict.fromkeys(certain, cause))
        who = places((self.views[rank] for rank in missing), "or")
        return f"lost {who}: a connection was closed; {see_log(self.views, missing)}"
