"""Why a rank has ended: posted by the rank itself, by its supervisor, or by a rank of its machine that misses it.

lost/ended      counts the posts
    /ended/N    a rank, the cause and its process, as JSON; of several posts for a rank the first one counts
    /mistake    there where a rank has ended by a mistake of the user's
left/RANK       this rank makes no more requests to the store
"""

import json
from collections.abc import Sequence

import torch.distributed as dist

from common.errors import ExplainedError, UserError
from common.join.store import connect, split
from common.join.view import process_name
from common.join.waiting import poll
from common.launch.addresses import host_and_port
from common.launch.layout import Worker

CURRENT = "current run"  # the key in the store that names the prefix of the run and generation
CONNECT_SECONDS = 1.0
MOST_CHARACTERS = 300  # of a cause


def post(store: dist.Store, rank: int, cause: str, process: str = "", is_mistake: bool = False) -> None:
    """Post why `rank` has ended, and whether by the user's mistake. `store` is that of the run. A supervisor, whose
    worker may not be the one that the others know as this rank, names the process that has ended (`process_name`)."""
    if is_mistake:
        store.set("lost/mistake", "")
    found = {"rank": rank, "cause": cause, "process": process}
    store.set(f"lost/ended/{store.add('lost/ended', 1)}", json.dumps(found))


def post_error(store: dist.Store, rank: int, error: BaseException) -> None:
    """Post that `rank` ends with this error."""
    post(store, rank, cause_of(error), is_mistake=isinstance(error, UserError))


def posted(store: dist.Store, views: Sequence[dict]) -> dict[int, str]:
    """The cause of each rank that has been posted, in the order of the posts. `views` are those of all ranks: the end
    of another process does not count, such as one of a node that was started twice, which its supervisor posts too."""
    causes: dict[int, str] = {}
    for number in range(1, store.add("lost/ended", 0) + 1):
        if store.check([f"lost/ended/{number}"]):
            found = json.loads(store.get(f"lost/ended/{number}"))
            processes = [view["process"] for view in views if view["rank"] == found["rank"]]
            if found["process"] in ("", *processes):
                causes[found["rank"]] = causes.get(found["rank"]) or found["cause"]
    return causes


def running(store: dist.Store, worker: Worker, views: Sequence[dict]) -> list[int]:
    """The ranks whose end nobody has posted; of this one, which is still here, that does not count."""
    gone = posted(store, views).keys() - {worker.rank}
    return [rank for rank in range(worker.world_size) if rank not in gone]


def all_have(name: str, store: dist.Store, ranks: Sequence[int]) -> bool:
    """Whether each of these ranks has set its key `name/RANK`."""
    return store.check([f"{name}/{rank}" for rank in ranks])


def leave(worker: Worker, views: Sequence[dict], store: dist.Store, seconds: float, lost: Sequence[int] = ()) -> None:
    """Note that this rank no longer needs the store. Rank 0, whose process may serve it, first waits for the others,
    except for those `lost`, to be done with it or to have ended: for at most `seconds`."""
    store.set(f"left/{worker.rank}", "")
    if worker.is_main:
        poll(
            lambda: all_have("left", store, [rank for rank in running(store, worker, views) if rank not in lost]),
            seconds,
        )


def cause_of(error: BaseException) -> str:
    """What to post for a rank that ends with this error."""
    first = (str(error).strip().splitlines() or [""])[0][:MOST_CHARACTERS]
    kind = "" if isinstance(error, ExplainedError) else type(error).__name__
    return f"failed: {': '.join(filter(None, (kind, first)))}"


def tell(worker: Worker, rank: int, cause: str, pid: int) -> None:
    """Post why a worker has ended that was `rank` and the process `pid`, from its supervisor, where the job's own store
    can be reached: that of the rank that leads, once members have changed, otherwise that of --master-addr."""
    layout = worker.layout
    if not (layout.hosts_store and layout.init_method.startswith("tcp://")):
        return
    host, port = host_and_port(layout.init_method)
    places = [("127.0.0.1" if host == "0.0.0.0" else host, port)]
    if worker.board.leader:
        places.insert(0, split(worker.board.leader))
    for host, port in places:
        store = connect(host, port, CONNECT_SECONDS, gives_up=True)
        if store is not None and store.check([CURRENT]):
            post(dist.PrefixStore(store.get(CURRENT).decode(), store), rank, cause, process_name(pid))
            return
