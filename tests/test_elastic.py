"""--elastic: ranks are lost and come back, and the losses, rows and weights are those of the undisturbed run."""

import json
import time

import psutil
import pytest

from common.join.elastic.standby import reach
from common.join.handshake import leader_in
from common.join.store import connect
from common.join.waiting import poll
from common.record.plots import spans_of_members
from tests.harness import (
    MNIST,
    Node,
    kill,
    largest_difference,
    losses,
    nodes_of,
    play,
    playing,
    rows,
    rows_so_far,
    run,
    weights,
)
from tests.trainers import altered

FLAGS = ("--dataset", "digits", "--precision", "fp64", "--global-batch", 64, "--max-steps", 60)  # 23 steps an epoch
ELASTIC = ("--elastic", 1, "--timeout", 20)
LONG = ("--dataset", "digits", "--precision", "fp64", "--max-steps", 1200, "--epochs", 100)

# a place in the trainer's code -> what makes the rank end there, once
MOMENTS = {
    "backward": "                        precision.backward(",
    "before the update": "                grad_norm = precision.step(",
    "after the update": "                scheduler.step()\n",
    "exchange": "                for done in report.exchange():",
    "evaluation": "                    numbers = evaluate(",
    "checkpoint": "                report.save(",
}
DIES = "{indent}if {when} and worker.rank == {rank} and not worker.membership:\n"
DIES += "{indent}    __import__('os').kill(__import__('os').getpid(), 9)\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    play(MNIST, (1,), folder, *FLAGS)
    return folder


def require_same(folder, undisturbed):
    """Every step once, with the losses, evaluations and weights of the undisturbed run."""
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=1e-9)
    found, wanted = (rows(one, "eval") for one in (folder, undisturbed))
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-9)
    assert largest_difference(weights(folder), weights(undisturbed)) < 1e-9


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_changes_nothing(moment, rank, undisturbed, tmp_path):
    place = MOMENTS[moment]
    when = "step == 46" if moment in ("exchange", "evaluation", "checkpoint") else "step == 30"
    body = DIES.format(indent=" " * (len(place) - len(place.lstrip())), when=when, rank=rank)
    dying = altered(tmp_path / "dying_ddp", {place: body + place})
    play(dying, (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    require_same(tmp_path / "run", undisturbed)
    causes = [row["cause"] for row in rows(tmp_path / "run", "members")]
    assert any(f"lost rank {rank}, node {0 if rank < 2 else 1}" in cause for cause in causes), causes


CONNECTS = """import common.join.process_group as joining
connect = joining.connect


def die_while_others_connect(worker, *rest):
    if worker.membership and worker.membership.generation == 1 and worker.membership.original.rank == 1:
        __import__("os").kill(__import__("os").getpid(), 9)
    connect(worker, *rest)


joining.connect = die_while_others_connect
"""


def test_a_rank_that_dies_while_the_others_connect_anew_changes_nothing(undisturbed, tmp_path):
    place, imports = MOMENTS["backward"], "import torch\n"
    body = DIES.format(indent=" " * (len(place) - len(place.lstrip())), when="step == 30", rank=2)
    dying = altered(tmp_path / "dying_ddp", {place: body + place, imports: imports + CONNECTS})
    play(dying, (2, 1), tmp_path / "run", *FLAGS, "--elastic", 1, "--timeout", 60)
    require_same(tmp_path / "run", undisturbed)
    causes = [row["cause"] for row in rows(tmp_path / "run", "members")]
    assert any("lost rank 1, node 0" in cause for cause in causes), causes


JOINS = """import common.join.process_group as joining
join = joining.join
joining.REJOIN_SECONDS = 600.0


def die_while_others_join(worker, *rest, **more):
    if worker.membership and worker.membership.generation == 1 and worker.membership.original.rank == 1:
        __import__("os").kill(__import__("os").getpid(), 9)
    return join(worker, *rest, **more)


joining.join = die_while_others_join
"""


def test_a_rank_that_dies_before_the_others_join_anew_is_named_and_not_waited_for(undisturbed, tmp_path):
    place, imports = MOMENTS["backward"], "import torch\n"
    body = DIES.format(indent=" " * (len(place) - len(place.lstrip())), when="step == 30", rank=3)
    dying = altered(tmp_path / "dying_ddp", {place: body + place, imports: imports + JOINS})
    play(dying, (3, 1), tmp_path / "run", *FLAGS, "--elastic", 1, "--timeout", 20, "--join-timeout", 600)
    require_same(tmp_path / "run", undisturbed)
    causes = [row["cause"] for row in rows(tmp_path / "run", "members")]
    assert any("lost rank 1, node 0" in cause and "while the ranks joined" in cause for cause in causes), causes


class Run:
    """A run of 2+1 under way, of which nodes are killed and started again."""

    def __init__(self, folder, *flags, gpus=(2, 1)):
        self.folder, self.started = folder, folder.parent
        batch = () if "--batch-per-gpu" in flags else ("--global-batch", 64)
        self.nodes = nodes_of(gpus, folder, *LONG, *batch, *ELASTIC, *flags)
        self.playing = [playing(MNIST, [node], self.started) for node in self.nodes]

    def wait_for(self, kind: str, count: int = 1, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while len(rows_so_far(self.folder, kind)) < count:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def kill(self, node: int) -> None:
        self.playing[node].kill()

    def start(self, node: int) -> None:
        self.playing[node] = playing(MNIST, [self.nodes[node]], self.started)

    def worker(self, rank: int) -> psutil.Process:
        """The process of a rank at the start; not by its title, which under pytest does not always change."""
        (start,) = json.loads((self.folder / "run.json").read_text())["starts"]
        return psutil.Process(start["ranks"][rank]["pid"])

    def said(self) -> str:
        return "\n".join(log.read_text() for node in self.playing for log in node.logs)

    def results(self):
        return [result for node in self.playing for result in node.results()]


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed-long")
    play(MNIST, (1,), folder, *LONG, "--global-batch", 64)
    return folder


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_and_is_started_again_is_let_in(node, undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run")
    under_way.wait_for("train", 50)
    under_way.kill(node)
    under_way.wait_for("members", 1)
    under_way.start(node)
    under_way.wait_for("members", 2)
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed_long)
    there = [len(row["ranks"]) for row in rows(tmp_path / "run", "members")]
    assert there in ([[1, 3], [1, 2, 3]] if node == 0 else [[2, 3]])  # two ranks may come one after the other


@pytest.mark.parametrize("mistake, said", [
    (("--lr", 0.5), "has --lr 0.5, but node 0"),
    (("--gpus", "2,2"), "has -g/--gpus 2,2, but node 0"),
])  # fmt: skip
def test_a_node_that_comes_back_with_another_flag_is_refused_and_the_run_goes_on(
    mistake, said, undisturbed_long, tmp_path
):
    under_way = Run(tmp_path / "run")
    under_way.wait_for("train", 50)
    under_way.kill(1)
    under_way.wait_for("members", 1)
    (tmp_path / "wrong").mkdir()
    (wrong,) = playing(MNIST, [Node([*under_way.nodes[1].flags, *mistake])], tmp_path / "wrong").results()
    assert wrong.code == 2 and said in wrong.output and "this run is under way" in wrong.output, wrong.output
    assert "Traceback" not in wrong.output
    assert under_way.playing[0].results()[0].code == 0, under_way.said()
    require_same(tmp_path / "run", undisturbed_long)
    assert len(rows(tmp_path / "run", "members")) == 1


def test_a_node_that_is_started_twice_is_refused_and_the_run_goes_on(undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run")
    under_way.wait_for("train", 50)
    (tmp_path / "second").mkdir()
    (second,) = playing(MNIST, [under_way.nodes[1]], tmp_path / "second").results()
    assert second.code == 2 and "rank 2 is in the run already: node 1" in second.output, second.output
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed_long)
    assert not rows(tmp_path / "run", "members")


def test_a_stranger_at_the_standby_is_ignored(undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run")
    under_way.wait_for("train", 50)
    flags = under_way.nodes[0].flags
    main = connect("127.0.0.1", int(flags[flags.index("--master-port") + 1]), 5)
    standby = reach(poll(lambda: leader_in(main), 20))  # the leader writes it once a second
    standby.set(f"present/{standby.add('present', 1)}", "a stranger")
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    assert "something that is not a rank of this code has written into the store: ignored" in under_way.said()
    require_same(tmp_path / "run", undisturbed_long)


def test_a_node_that_comes_back_with_another_secret_is_told_so_and_the_run_goes_on(undisturbed_long, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    under_way = Run(tmp_path / "run", "--secret-file", tmp_path / "one")
    under_way.wait_for("train", 50)
    under_way.kill(1)
    under_way.wait_for("members", 1)
    under_way.nodes[1] = Node([*under_way.nodes[1].flags, "--secret-file", tmp_path / "other"])
    under_way.start(1)
    (wrong,) = under_way.playing[1].results()
    assert wrong.code == 2 and "this rank has another secret" in wrong.output, wrong.output
    assert under_way.playing[0].results()[0].code == 0, under_way.said()
    assert "has another secret than this rank (--secret-file): not let in" in under_way.said()
    require_same(tmp_path / "run", undisturbed_long)


def test_a_run_that_was_resumed_takes_a_node_back_that_was_started_without_resume(tmp_path):
    under_way = Run(tmp_path / "run", "--resume")
    under_way.wait_for("train", 50)
    under_way.kill(1)
    under_way.wait_for("members", 1)
    under_way.nodes[1] = Node([flag for flag in under_way.nodes[1].flags if flag != "--resume"])
    under_way.start(1)
    under_way.wait_for("members", 2)
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()


def test_a_node_finds_a_run_that_another_node_leads_although_node_0s_worker_was_replaced(tmp_path):
    longer = ("--max-steps", 4000, "--epochs", 400, "--lr", 1e-4)  # three processes come back, in some seconds each
    play(MNIST, (1,), tmp_path / "alone", *LONG, *longer, "--global-batch", 64)
    under_way = Run(tmp_path / "run", *longer, gpus=(1, 1, 1))
    under_way.wait_for("train", 50)
    under_way.kill(0)  # node 1 leads from now on
    under_way.wait_for("members", 1)
    under_way.start(0)  # its worker serves the store at --master-addr
    under_way.wait_for("members", 2)
    kill(psutil.Process(under_way.playing[0].processes[0].pid).children()[0].pid)
    under_way.wait_for("members", 4)
    under_way.kill(2)
    under_way.wait_for("members", 5)
    under_way.start(2)
    under_way.wait_for("members", 6)
    assert [result.code for result in under_way.results()] == [0, 0, 0], under_way.said()
    require_same(tmp_path / "run", tmp_path / "alone")


def test_a_rank_that_is_stopped_is_replaced(undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run", "--timeout", 8)
    under_way.wait_for("train", 50)
    under_way.worker(1).suspend()
    under_way.wait_for("members", 1)
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed_long)


def test_a_rank_that_dies_again_and_again_is_left_out_and_its_neighbour_goes_on(undisturbed_long, tmp_path):
    place = MOMENTS["backward"]
    always = "getattr(worker.membership, 'original', worker).rank == 1"
    body = f"{place[: -len(place.lstrip())]}if step >= 30 and {always}:\n"
    body += f"{place[: -len(place.lstrip())]}    __import__('os')._exit(3)\n"
    dying = altered(tmp_path / "dying_ddp", {place: body + place})
    nodes = nodes_of((2, 1), tmp_path / "run", *LONG, "--global-batch", 64, *ELASTIC)
    results = playing(dying, nodes, tmp_path).results()
    assert [result.code for result in results] == [3, 0], results
    assert "rank 1 has ended 3 times within 30 s of its start: it is left out" in results[0].output
    there = [[one["original"] for one in row["ranks"]] for row in rows(tmp_path / "run", "members")]
    assert there[-1] == [0, 2], there
    require_same(tmp_path / "run", undisturbed_long)


def test_too_few_ranks_save_and_end_and_the_run_can_be_resumed(undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run", "--elastic", 3)
    under_way.wait_for("train", 50)
    under_way.kill(1)
    result = under_way.playing[0].results()[0]
    assert result.code == 75, result.output
    assert "interrupted: 2 of 3 ranks are left, fewer than --elastic 3: ended after step" in result.output
    play(MNIST, (1, 1), tmp_path / "run", *LONG, "--global-batch", 64, "--resume")
    require_same(tmp_path / "run", undisturbed_long)


def test_shares_and_micro_batches_stay_with_their_ranks(undisturbed_long, tmp_path):
    under_way = Run(tmp_path / "run", "--shares", "4,1,2", "--micro-batch", "16,8,32")
    under_way.wait_for("train", 50)
    kill(under_way.worker(0).pid)
    under_way.wait_for("members", 1)
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed_long)
    by_generation = {len(row["shares"]): row["shares"] for row in rows(tmp_path / "run", "ranks")}
    assert by_generation[3] in ([37, 9, 18], [9, 18, 37]), by_generation


def test_a_batch_per_gpu_keeps_the_global_batch_of_the_start(tmp_path):
    under_way = Run(tmp_path / "run", "--batch-per-gpu", 16)
    under_way.wait_for("train", 50)
    kill(under_way.worker(2).pid)
    under_way.wait_for("members", 1)
    assert [result.code for result in under_way.results()] == [0, 0], under_way.said()
    shares = [row["shares"] for row in rows(tmp_path / "run", "ranks")]
    assert {len(one) for one in shares} >= {2, 3} and {sum(one) for one in shares} == {48}


def test_members_rows_say_who_is_there(tmp_path):
    place = MOMENTS["backward"]
    body = DIES.format(indent=" " * 24, when="step == 30", rank=2)
    play(altered(tmp_path / "dying_ddp", {place: body + place}), (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    first = rows(tmp_path / "run", "members")[0]
    assert first["step"] == 30 and first["generation"] == 1
    assert {one["original"] for one in first["ranks"]} >= {0, 1}
    assert {"original", "node_rank", "host"} == set(first["ranks"][0])
    assert "rank 2, node 1" in first["cause"] and "SIGKILL" in json.dumps(first)


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--elastic", 5, "-n", 1, "-g", 2), "--elastic 5, but the job has 2 ranks"),
        (("--elastic", 1, "-n", 1, "-g", 2, "--sync-every", 5), "--elastic with --sync-every"),
        (("--elastic", 1, "-n", 1, "-g", 2, "--compress", "powersgd:2"), "--elastic with --compress powersgd"),
        (("--elastic", 0), "--elastic"),
    ],
)
def test_what_cannot_survive_a_loss_is_refused(flags, said):
    result = run("python", MNIST, "--device", "cpu", *flags)
    assert result.code == 2 and said in result.output


def test_a_launcher_that_owns_the_processes_is_named():
    placed = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torchrun = {**placed, "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "1"}
    result = run("python", MNIST, "--device", "cpu", "--elastic", 1, **torchrun)
    assert result.code == 2 and "--elastic 1 under torchrun, which ends a job that has lost a process" in result.output


def test_spans_of_members_follow_the_rows():
    ranks = [{"original": 0}, {"original": 2}]
    found = [
        {"kind": "ranks", "step": 5, "shares": [2, 2, 2]},
        {"kind": "members", "step": 7, "ranks": ranks},
        {"kind": "members", "step": 11, "ranks": [*ranks, {"original": 1}]},
        {"kind": "train", "step": 20},
    ]
    assert spans_of_members(found) == {0: [(0, 20)], 1: [(0, 7), (11, 20)], 2: [(0, 20)]}


def test_a_signal_before_a_change_of_the_members_is_heeded_after_it(tmp_path):
    place = MOMENTS["backward"]  # one rank is signalled in the step in which another dies: they cannot agree before
    indent, once = place[: -len(place.lstrip())], "step == 30 and not worker.membership"
    body = (
        f"{indent}if {once} and worker.rank == 1:\n{indent}    __import__('os').kill(__import__('os').getpid(), 10)\n"
    )
    body += (
        f"{indent}if {once} and worker.rank == 2:\n{indent}    __import__('os').kill(__import__('os').getpid(), 9)\n"
    )
    dying = altered(tmp_path / "dying_ddp", {place: body + place})
    nodes = nodes_of((2, 1), tmp_path / "run", *LONG, "--global-batch", 64, *ELASTIC)
    results = playing(dying, nodes, tmp_path).results()
    assert results[0].code == 75 and "interrupted: SIGUSR1 on rank 1" in results[0].output, results
