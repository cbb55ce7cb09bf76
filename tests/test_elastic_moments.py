"""--elastic, when a process freezes, fails or is signalled at a bad moment: the others go on, and nothing is lost."""

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from common.elastic.change import LEADS, attend
from common.elastic.members import may_lead
from common.elastic.membership import ADDRESSES, Membership
from common.elastic.outside import stop
from common.elastic.standby import Standby
from common.join.connections import cut_off
from common.join.handshake import LEADER
from common.join.lost import is_contact_lost
from common.join.store import serve_at
from common.join.waiting import limit
from common.launch.layout import Layout
from common.launch.options import JoinOptions
from common.record import lock as locking
from common.record.lock import lock
from tests.harness import TIMEOUT_SECONDS, freeze, kill, nodes_of, play, playing, rows_so_far, wait_until
from tests.test_elastic import (  # noqa: F401
    DIE,
    ELASTIC,
    FLAGS,
    IMPORTS,
    RETURN,
    WAITS_FOR_CAUSES,
    Run,
    causes,
    dies,
    does,
    require_same,
    undisturbed,
)
from tests.trainers import Patient, altered, until_all_are_there

FREEZES = """import os
import torch
import common.record.checkpoint as checkpoint
save = checkpoint.save


def freeze_once(folder, step, *rest, **more):
    frozen = folder.parent / "frozen"
    if step == 46 and not frozen.exists():
        frozen.touch()
        os.kill(os.getppid(), 19)  # the supervisor too, as on a frozen machine
        os.kill(os.getpid(), 19)
    save(folder, step, *rest, **more)


checkpoint.save = freeze_once
"""


@pytest.mark.long
def test_a_node_that_freezes_while_it_saves_and_the_others_wait_is_left_behind(undisturbed, tmp_path):  # noqa: F811
    freezing = altered(tmp_path / "other_ddp", {IMPORTS: FREEZES})
    nodes = nodes_of((1, 1, 1), tmp_path / "run", *FLAGS, "--elastic", 1, "--timeout", 15)
    apart = [playing(freezing, [node], tmp_path) for node in nodes]
    results = [one.results()[0] for one in apart[1:]]
    kill(apart[0].processes[0].pid)
    assert [result.code for result in results] == [0, 0], results
    require_same(tmp_path / "run", undisturbed)
    assert "lost rank 0, node 0" in causes(tmp_path / "run")[0], causes(tmp_path / "run")


def _serve(ready) -> None:
    _, port = serve_at("127.0.0.1")
    ready.put(port)
    time.sleep(600)


def test_a_request_to_a_frozen_store_fails_once_it_is_cut_off():
    context = multiprocessing.get_context("spawn")
    ready = context.SimpleQueue()
    server = context.Process(target=_serve, args=(ready,))
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", ready.get(), is_master=False)
        freeze(server.pid)
        began = time.monotonic()
        with (
            pytest.raises(RuntimeError) as caught,
            limit(1, 0, "a request", instead=lambda: cut_off(dist.PrefixStore("a", store))),
        ):
            store.add("key", 1)
        assert is_contact_lost(caught.value) and time.monotonic() - began >= 1
    finally:
        server.kill()
        server.join()


def test_a_signal_while_a_replaced_worker_still_loads_saves_all_the_same(tmp_path):
    begin = "    with Run(worker, args,"
    slow = "    if worker.predecessor:\n        print('loading', flush=True)\n        __import__('time').sleep(600)\n"
    when = "run.step == 30 and worker.rank == 1 and not worker.membership"
    patient = Patient(tmp_path, {**does("backward", when, DIE), begin: slow + begin})
    run = playing(patient.script, nodes_of((2,), tmp_path / "run", *Patient.FLAGS, *ELASTIC), tmp_path)
    wait_until(lambda: rows_so_far(tmp_path / "run", "members"), run)
    run.wait_for("loading")
    os.kill(run.processes[0].pid, signal.SIGTERM)
    (result,) = run.results()
    assert result.code == 75, result.output
    assert "interrupted: SIGTERM on rank 0: ended after step" in result.output, result.output
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.mark.long
def test_a_rank_that_fails_with_an_explained_error_leaves_its_neighbour_at_work(undisturbed, tmp_path):  # noqa: F811
    fails = "from common.errors import UserError; raise UserError('a damaged sample')"
    when = "run.step == 30 and worker.rank == 1 and not worker.membership"
    failing = altered(tmp_path / "other_ddp", does("backward", when, fails))
    results = playing(failing, nodes_of((2, 1), tmp_path / "run", *FLAGS, *ELASTIC), tmp_path).results()
    assert [result.code for result in results] == [2, 0], results
    assert "error: a damaged sample" in results[0].output and "starting another" not in results[0].output
    require_same(tmp_path / "run", undisturbed)


LEAVES = """import common.elastic.group as joining
disconnect = joining.disconnect


def die_before_others_are_let_in(worker, *rest, **more):
    if worker.membership and worker.membership.generation == 1 and worker.membership.original.rank == 0:
        __import__("os").kill(__import__("os").getpid(), 9)
    disconnect(worker, *rest, **more)


joining.disconnect = die_before_others_are_let_in
"""


@pytest.mark.long
def test_a_rank_that_dies_while_others_are_let_in_changes_nothing(undisturbed, tmp_path):  # noqa: F811
    dying = altered(tmp_path / "dying_ddp", dies(2, imports=LEAVES))
    play(dying, (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    require_same(tmp_path / "run", undisturbed)
    assert any("lost rank 0, node 0" in cause for cause in causes(tmp_path / "run")), causes(tmp_path / "run")


class Interrupting(dist.TCPStore):
    """A store in which something else happens after the `number`th request of this process."""

    def __init__(self, port: int, number: int, what):
        super().__init__("127.0.0.1", port, is_master=False)
        self.left, self.what = number, what

    def check(self, keys):
        found = super().check(keys)
        self.left -= 1
        if not self.left:
            self.what()
        return found


@pytest.mark.parametrize("number", range(1, 7))
def test_a_verdict_is_read_whenever_it_comes(number):
    """Between any two requests of a rank whose patience has ended."""
    leading = Standby("127.0.0.1")
    port = int(leading.address.split()[1])
    leading.store.set(LEADS, "")
    worker = Layout("-g 2", world_size=2, first_rank=0, local_world_size=2, init_method="tcp://x:1").workers()[1]
    members = Membership(worker, JoinOptions(timeout_seconds=100), Standby("127.0.0.1"))
    leading.store.set(ADDRESSES, json.dumps([leading.address, members.address]))

    def lead() -> None:
        leading.look()
        leading.answer(1, {"generation": 1})
        leading.store.delete_key(LEADS)

    assert attend(members, Interrupting(port, number, lead), seconds=100, patience=0) == {"generation": 1}


def _lead(standby: Standby, *others: str) -> None:
    """Be the rank that leads a run, as far as somebody outside sees."""
    standby.store.set(LEADER, standby.address)
    members = [standby.address, *others]
    standby.post_run({"flags": {}, "size": 2, "meets": "tcp://127.0.0.1:1", "members": members})


def _lead_until_killed(other: str, ready) -> None:
    leading = Standby("127.0.0.1")
    _lead(leading, other)
    ready.put(leading.address)
    wait_until(lambda: leading.look() or leading.waiting)
    ready.put("is asked")
    time.sleep(600)


def test_whoever_asks_for_the_end_of_a_run_asks_the_next_leader_where_the_first_is_killed(capsys, monkeypatch):
    monkeypatch.setattr("common.elastic.outside.FIND_SECONDS", 1.0)
    monkeypatch.setattr("common.elastic.outside.STOP_SECONDS", TIMEOUT_SECONDS)
    left = Standby("127.0.0.1")
    spawned = multiprocessing.get_context("spawn")
    ready = spawned.Queue()
    first = spawned.Process(target=_lead_until_killed, args=(left.address, ready), daemon=True)
    first.start()
    address = ready.get(timeout=TIMEOUT_SECONDS).replace(" ", ":")
    with ThreadPoolExecutor() as pool:
        told = pool.submit(stop, "--stop", address, b"", 60.0)
        assert ready.get(timeout=TIMEOUT_SECONDS) == "is asked"
        first.kill()
        wait_until(lambda: "asking again" in capsys.readouterr().out)  # nobody leads yet
        _lead(left)
        wait_until(lambda: left.look() or left.waiting)
        left.answer(next(iter(left.waiting)), {"ended": "it has saved, and ended", "code": 0})
        assert told.result() == "it has saved, and ended"
    first.join()


@pytest.mark.long
def test_a_supervisor_names_the_cause_of_a_later_death_too(undisturbed, tmp_path):  # noqa: F811
    under_way = Run(tmp_path / "run", changes={IMPORTS: IMPORTS + WAITS_FOR_CAUSES})
    for count in (1, 2):
        kill(under_way.worker_of_node(1).pid)
        under_way.wait_for_change("lost rank 2, node 1", count)
        under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())
    found = causes(tmp_path / "run")
    assert ["SIGKILL" in cause for cause in found if "lost rank 2" in cause] == [True, True], found


def _hold(folder, ready) -> None:
    held = lock(folder)
    ready.put(True)
    time.sleep(600)
    held.close()


@pytest.mark.long
def test_a_run_that_goes_on_takes_the_lock_of_a_member_that_is_frozen_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "SECONDS", 0.1)  # the holder does not let go, however long one waits
    context = multiprocessing.get_context("spawn")
    ready = context.SimpleQueue()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    try:
        ready.get()
        mine = lock(tmp_path, takes_over=True)
        with pytest.raises(Exception, match="another run is writing there"):
            lock(tmp_path)
        mine.close()
        lock(tmp_path).close()
    finally:
        holder.kill()
        holder.join()


@pytest.mark.parametrize("text, lost", [
    ("DataLoader timed out after 30 seconds", False),
    ("Socket closed", True),
    ("[enforce fail] Timed out waiting 5000ms for recv operation to complete", True),
])  # fmt: skip
def test_the_timeout_of_a_loader_is_not_taken_for_a_lost_rank(text, lost):
    assert is_contact_lost(RuntimeError(text)) == lost


LOSES = """import time
import torch
import torch.distributed as dist
from common.run.checkpointer import Checkpointer
compare = Checkpointer.compare


def compare_and_lose(self, step, *rest):
    compare(self, step, *rest)
    if step == 46 and not self.members.generation:  # next, all but rank 0 wait on the store
        if self.group.worker.rank == 0:
            dist.recv(torch.zeros(1), src=3)
        if self.group.worker.rank == 3:
            time.sleep(600)


Checkpointer.compare = compare_and_lose
"""


@pytest.mark.long
def test_ranks_that_wait_on_the_store_come_when_another_one_has_lost_contact(undisturbed, tmp_path):  # noqa: F811
    losing = altered(tmp_path / "other_ddp", {IMPORTS: LOSES, **until_all_are_there(4, RETURN)})
    play(losing, (3, 1), tmp_path / "run", *FLAGS, "--elastic", 1, "--timeout", 15)
    require_same(tmp_path / "run", undisturbed)
    assert causes(tmp_path / "run")[0].startswith("lost rank 3, node 1"), causes(tmp_path / "run")


def test_who_waits_goes_to_the_member_that_leads_and_to_another_one_once_that_has_ended():
    first, second = Standby("127.0.0.1"), Standby("127.0.0.1")
    for standby in (first, second):
        standby.store.set(LEADER, first.address)
    assert may_lead(first.store, first.address) and not may_lead(second.store, second.address)
    second.store.set(LEADS, "")
    assert may_lead(second.store, second.address)
    second.store.delete_key(LEADS)
    assert not may_lead(second.store, second.address)
    del first.store  # its process has ended
    wait_until(lambda: may_lead(second.store, second.address))
