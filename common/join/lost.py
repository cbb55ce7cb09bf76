"""Which rank was lost. When a rank dies, torch tells the others only that a connection has closed.

That does not show which rank has died: a survivor that ends closes its connections too. So each survivor posts that it
is there, looks up the processes of its own machine, and reads what others have posted (ended.py):

lost/survivor         counts the survivors that have posted
    /survivor/N       one of them: its rank, and what its error says, as JSON
    /meet             there once a rank has gone to meet the others (--elastic), who may be waiting on the store
"""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch.distributed as dist

from common.errors import ExplainedError, RankLost, RunError, UserError, before_exit
from common.join import ended
from common.join.connections import Connections
from common.join.view import node_of, places
from common.join.waiting import poll
from common.launch.addresses import host_and_port
from common.launch.layout import Worker
from common.launch.within import within

MEET = "lost/meet"
READ_SECONDS = 5.0  # for a supervisor to read the exit code of a process that has ended here, on a busy machine
CAUSE_SECONDS = 1.0  # after that, for it to post the cause
SEARCH_SECONDS = 3.0  # in which the ranks that wait in a collective all notice that contact was lost
SEARCH_LATE_SECONDS = 1.0  # the same, where a rank has waited for --timeout already
ANSWER_SECONDS = 1.0  # for the store, after that
LINGER_SECONDS = 8.0  # rank 0, whose process may serve the store, stays for the others: as long as worker.py lets it

# parts of the errors that gloo, NCCL and the store raise on the surviving ranks
TIMEOUTS = (
    "Timed out waiting",
    "timed out after",
    "wait timeout after",  # the store's, for the address of a rank that has ended before it posted it
    "Connect timeout",
    "Application timeout caused pair closure",
)
LOST_CONTACT = (
    *TIMEOUTS,
    "closed by peer",
    "Connection was likely closed",
    "recvValue failed",
    "remote process exited",
    "ncclRemoteError",
    "communicator was aborted",
    "reset by peer",
    "Broken pipe",
    "connectFullMesh",
    "Socket closed",
    "failed to recv, got 0 bytes",
)


@contextlib.contextmanager
def naming_lost_store(worker: Worker) -> Iterator[None]:
    """Use before the views of the other ranks are known. Raises RunError where the store ends during the body."""
    try:
        yield
    except RuntimeError as error:
        if not is_contact_lost(error):
            raise
        layout = worker.layout
        where = "" if layout.meets_at_file else f" on {host_and_port(layout.init_method)[0]}"
        lost = (
            f"lost rank 0{where}, which served the store: its process has ended; see its log"
            if layout.hosts_store
            else _lost_store(worker)
        )
        raise RunError(lost, same_on_every_rank=True) from None


@contextlib.contextmanager
def naming_lost_rank(worker: Worker, views: list[dict], store: dist.Store, connections: Connections) -> Iterator[None]:
    """Raise RunError, which names the rank that was lost, in place of an error that torch raises because of it; raise
    UserError where that rank has met one. Where this rank fails by itself, post the cause for the others.

    This takes a few seconds at most. `views` are those of all ranks, by rank; `connections` those between them, which
    are closed then, so that all survivors search at the same time.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not is_contact_lost(error):
            _let_know(worker, views, store, connections, error)
            raise
        connections.close()
        search = _Search(worker, views, store, str(error))
        explained = search.run()
        before_exit(explained, search.linger)
        raise explained from None


def _let_know(
    worker: Worker, views: list[dict], store: dist.Store, connections: Connections, error: BaseException
) -> None:
    """This rank ends with an error of its own: the others are to learn of it, and rank 0 stays until they have."""
    is_known = getattr(error, "same_on_every_rank", False)  # each rank raises it by itself

    def tell() -> None:
        if isinstance(error, RankLost):  # of which a turn has told this rank: it ends because of another one
            _post_survivor(store, worker.rank)
        else:
            ended.post_error(store, worker.rank, error)

    if worker.world_size > 1 and not is_known:
        within(ANSWER_SECONDS, tell)

    def linger() -> None:
        if not is_known:
            connections.close()  # the ranks that wait in a collective notice it now
        ended.leave(worker, views, store, LINGER_SECONDS)

    if isinstance(error, Exception) and not hasattr(error, "before_exit"):  # a turn waits until all know of its failure
        before_exit(error, linger)


def _post_survivor(store: dist.Store, rank: int, peer: str = "", late: bool = False) -> None:
    """Post that this rank is there, and ends because of another one; and what its error says."""
    number = store.add("lost/survivor", 1)
    store.set(f"lost/survivor/{number}", json.dumps({"rank": rank, "peer": peer, "late": late}))


def others_have_lost_contact(store: dist.Store) -> bool:
    """Whether a rank is searching for a lost one, or has, and has ended with the store."""
    try:
        return store.add("lost/survivor", 0) > 0
    except RuntimeError as error:
        if not is_contact_lost(error):
            raise
        return True


def echoes(store: dist.Store) -> set[int]:
    """The ranks that have searched for a lost one, and end because of it."""
    numbers = range(1, store.add("lost/survivor", 0) + 1)
    keys = [key for key in map("lost/survivor/{}".format, numbers) if store.check([key])]
    return {json.loads(store.get(key))["rank"] for key in keys}


def is_contact_lost(error: BaseException) -> bool:
    """True for an error that torch raises because another rank, or the store, does not answer."""
    text = str(error)
    is_loader = text.startswith("DataLoader")  # which has a timeout of its own
    return isinstance(error, RuntimeError) and not is_loader and any(sign in text for sign in LOST_CONTACT)


def _lost_store(worker: Worker) -> str:
    return f"lost the store of {worker.layout.source} at {worker.layout.init_method}: has {worker.layout.source} ended?"


def store_request(worker: Worker, views: list[dict]) -> str:
    """What does not end where the store does not answer, in words: for `limit`."""
    where = f"on {places(views[:1])}" if worker.layout.hosts_store else f"of {worker.layout.source}"
    return f"a request (--timeout) to the store {where}"


class _Search:
    """One survivor's search for the lost rank."""

    def __init__(self, worker: Worker, views: list[dict], store: dist.Store, reason: str):
        self.worker, self.views = worker, views
        self.store = store
        peers = re.findall(r"\[([0-9a-fA-F.:]+)\]:\d+", reason)  # gloo names the other end of the connection
        self.known: dict[str, Any] = {
            "peer": peers[-1] if peers else "",
            "late": any(sign in reason for sign in TIMEOUTS),
        }
        self.lost: list[int] = []
        self.survivors: dict[int, dict] = {}  # what each has posted, by rank
        self.unread: set[int] = set()  # numbers of posts that have been begun
        self.counted = 0
        self.store_answers, self.is_mistake = True, False
        self.began = time.monotonic()
        self.read_at = self.began  # until then, nobody had read the exit code of a process that has ended here
        self.waits_for_cause = False  # of its end
        self.most_seconds = max(SEARCH_SECONDS, READ_SECONDS + CAUSE_SECONDS)

    def run(self) -> ExplainedError:
        """What this rank can say about the lost one. A thread makes the requests to the store, because the store of a
        frozen rank 0 never answers."""
        found = within(self.most_seconds + ANSWER_SECONDS, self._search)
        self.store_answers = bool(found)
        kind = UserError if self.is_mistake else RankLost
        return kind(found or self._without_store(is_gone=False))

    def linger(self) -> None:
        """Rank 0 waits until the other survivors no longer need the store."""
        if not self.store_answers:
            return  # this request would not be answered either, and hold this rank for --timeout
        ended.leave(self.worker, self.views, self.store, LINGER_SECONDS, self.lost)

    def _search(self) -> str:
        try:
            _post_survivor(self.store, self.worker.rank, **self.known)
            poll(lambda: self._find_ended() or self._has_waited, self.most_seconds)
            if causes := self._find_ended():
                self.lost, self.is_mistake = sorted(causes), self.store.check(["lost/mistake"])
                return ended_in_words(self.views, causes)
            return self._describe_silent()
        except RuntimeError:
            return self._without_store(is_gone=True)

    @property
    def _has_waited(self) -> bool:
        """Have all had their time to post: a second, where a survivor has waited for --timeout before?"""
        is_late = any(one["late"] for one in self._read_survivors().values())
        seconds = SEARCH_LATE_SECONDS if is_late else SEARCH_SECONDS
        return not self.waits_for_cause and time.monotonic() - self.began > seconds

    def _read_survivors(self) -> dict[int, dict]:
        """What each survivor's error says, by rank. Each is read once: a request takes long on a slow link."""
        count = self.store.add("lost/survivor", 0)
        self.unread |= set(range(self.counted + 1, count + 1))
        self.counted = count
        for number in sorted(self.unread):
            if self.store.check([f"lost/survivor/{number}"]):
                one = json.loads(self.store.get(f"lost/survivor/{number}"))
                self.survivors[one["rank"]] = one
                self.unread.discard(number)
        return self.survivors

    def _find_ended(self) -> dict[int, str]:
        """The ranks that have ended, though they had not lost contact themselves, and why."""
        space = self.views[self.worker.rank]["pid_space"]
        here = [view["rank"] for view in self.views if view["pid_space"] == space]
        gone = [rank for rank in here if not runs_here(self.views[rank], space)]
        causes, survivors = ended.posted(self.store, self.views), self._read_survivors()
        unexplained = [rank for rank in gone if rank not in survivors and rank not in causes]
        now = time.monotonic()
        if any(_status(self.views[rank]["pid"]) == psutil.STATUS_ZOMBIE for rank in unexplained):
            self.read_at = min(now, self.began + READ_SECONDS)
        self.waits_for_cause = bool(unexplained) and now - self.read_at < CAUSE_SECONDS
        if unexplained:
            if self.waits_for_cause:
                return {}
            for rank in unexplained:
                ended.post(self.store, rank, "")
        return {
            rank: cause
            for rank, cause in ended.posted(self.store, self.views).items()
            if rank not in self._read_survivors()
        }

    def _describe_silent(self) -> str:
        """No process is known to have ended. Of the ranks that have posted nothing one is lost; others may be busy."""
        posted = self._read_survivors()
        peers, late = {one["peer"] for one in posted.values()}, any(one["late"] for one in posted.values())
        silent = [rank for rank in range(self.worker.world_size) if rank not in posted]
        if not late:  # a connection was closed, which a process that runs does not do: it has not noticed yet
            space = self.views[self.worker.rank]["pid_space"]
            silent = [rank for rank in silent if not runs_here(self.views[rank], space)]
        self.lost = [rank for rank in silent if self.views[rank]["addresses"]["own"] in peers] or silent
        who = f"{'one of ' * (len(self.lost) > 1)}{self._places(self.lost, 'or')}"
        if late and self.lost:
            return f"{who} did not answer within --timeout: frozen, busy or cut off? {self._see_log().capitalize()}"
        if late:
            return "a collective did not end within --timeout, but all ranks are running: do all of them reach it?"
        if self.lost:
            answer = "does not answer" if len(self.lost) == 1 else "do not answer"
            return f"lost contact with {who}, which {answer}: {self._see_log()}"
        return "lost a connection, but all ranks are running: is the network at fault? Ask python -m common.doctor"

    def _without_store(self, is_gone: bool) -> str:
        if not self.worker.layout.hosts_store:
            return _lost_store(self.worker)
        if is_gone:
            return f"lost {self._places([0])}, which served the store: its process has ended; {self._see_log()}"
        answer = "which serves the store, does not answer: frozen or cut off?"
        return f"lost contact: {self._places([0])}, {answer} {self._see_log().capitalize()}"

    def _see_log(self) -> str:
        return see_log(self.views, self.lost or [0])

    def _places(self, ranks: list[int], joint: str = "and") -> str:
        return places((self.views[rank] for rank in ranks), joint)


def ended_in_words(views: list[dict], causes: dict[int, str]) -> str:
    """Which ranks have ended, why, and where to read more."""
    ranks = sorted(causes)
    return f"lost {places(views[rank] for rank in ranks)}: {in_words(causes)}; {see_log(views, ranks)}"


def see_log(views: list[dict], ranks: Iterable[int]) -> str:
    nodes = {node_of(views[rank]) for rank in ranks}
    return "see the log of that node" if len(nodes) == 1 else "see the logs of those nodes"


def in_words(causes: dict[int, str]) -> str:
    """Why these ranks have ended: one cause for all, or one for each."""
    if len(set(causes.values())) == 1:
        cause = next(iter(causes.values()))
        return cause or ("its process has ended" if len(causes) == 1 else "their processes have ended")
    return "; ".join(f"rank {rank} {cause or 'has ended'}" for rank, cause in sorted(causes.items()))


def runs_here(view: dict, pid_space: str) -> bool:
    """True if a process in this space of pids can see that the rank's process runs."""
    return view["pid_space"] == pid_space and _is_running(view["pid"])


def _is_running(pid: int) -> bool:
    """False also for a process that has ended, but whose parent has not read its exit code yet."""
    return _status(pid) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
