"""--elastic: ranks are lost and come back, and the losses, rows and weights are those of the undisturbed run.

Each run waits: for the rank that it has lost (`until_all_are_there`), or for the test (`Patient`).
"""

import json
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from common.elastic.standby import reach
from common.join.handshake import leader_in
from common.join.store import connect
from common.record.plots import spans_of_members
from tests.harness import (
    MNIST,
    TIMEOUT_SECONDS,
    Node,
    Result,
    kill,
    largest_difference,
    losses,
    nodes_of,
    play,
    playing,
    rows,
    rows_so_far,
    run,
    wait_until,
    weights,
)
from tests.trainers import EPOCH, Patient, altered, until_all_are_there

LAST = 69  # steps of a run that waits for the rank that it has lost
RETURN = 60  # from this step on
FLAGS = (*Patient.FLAGS, "--max-steps", LAST)
ELASTIC = ("--elastic", 1, "--timeout", 120)  # a rank that has ended is noticed at once

# a place in the trainer's code -> what makes the rank end there, once
MOMENTS = {
    "backward": "                    run.backward(",
    "before the update": "            run.optimizer_step(",
    "after the update": "            scheduler.step()\n",
    "exchange": "            run.end_step()\n",  # which exchanges what the ranks have noted
    "evaluation": "                run.log_evaluation(",
    "checkpoint": "                run.save(",
}
OFTEN_ENOUGH = [(0, "after the update")]  # for every day; `make test-long` has all
IMPORTS = "import torch\n"  # of the trainer, once
DIE = "__import__('os').kill(__import__('os').getpid(), 9)"
# The supervisor of a rank that has died posts why, and the others wait for that, as long as it takes.
WAITS_FOR_CAUSES = """import common.elastic.members as elastic_members
import common.launch.supervisor as launch_supervisor
elastic_members.CAUSE_SECONDS = elastic_members.ANSWER_SECONDS = launch_supervisor.TELL_SECONDS = 100.0
"""


# The process that replaces another one comes to a run that has gone on without that one.
COMES_LATE = """    while worker.predecessor and '"members"' not in (args.out_dir / "metrics.jsonl").read_text():
        __import__("time").sleep(0.02)
"""
COMES_AFTER_THE_END = """    while worker.predecessor and not [*args.out_dir.glob("checkpoints/step-0000003*")]:
        __import__("time").sleep(0.02)
"""
BEGIN = "    with Run(worker, args,"


def does(moment: str, when: str, what: str) -> dict[str, str]:
    """The change with which a rank does something at a moment."""
    place = MOMENTS[moment]
    if moment == "exchange":
        what = f"run.log.exchange = lambda *_: {what}"
    indent = place[: -len(place.lstrip())]
    return {place: f"{indent}if {when}:\n{indent}    {what}\n{place}"}


def dies(rank: int, moment: str = "backward", ranks: int = 3, imports: str = "") -> dict[str, str]:
    """The changes with which a rank dies once; the others go on without it, and then wait until all are there again."""
    step = {"exchange": 45, "evaluation": 46, "checkpoint": 46}.get(moment, 30)
    dying = does(moment, f"run.step == {step} and worker.rank == {rank} and not worker.membership", DIE)
    return {**dying, BEGIN: COMES_LATE + BEGIN, **until_all_are_there(ranks, RETURN), IMPORTS: IMPORTS + imports}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Patient.undisturbed(tmp_path_factory.getbasetemp())


def require_same(folder: Path, undisturbed: Path, last: int = LAST) -> None:
    """Every step up to the last once, with the losses, evaluations and weights of the undisturbed run."""
    found = losses(folder)
    assert len(found) == last
    assert found == pytest.approx(losses(undisturbed)[:last], rel=1e-9)
    found = rows(folder, "eval")
    wanted = [row for row in rows(undisturbed, "eval") if row["step"] <= last]
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-9)
    checkpoint = load_file(undisturbed / "checkpoints" / f"step-{last:08d}" / "model.safetensors")
    assert largest_difference(weights(folder), checkpoint) < 1e-9


def causes(folder: Path) -> list[str]:
    return [row["cause"] for row in rows(folder, "members")]


@pytest.fixture(scope="module")
def after_a_death(tmp_path_factory):
    """The folder of a run of 2+1 of which rank 2 dies at step 30."""
    folder = tmp_path_factory.mktemp("after-a-death")
    play(altered(folder / "dying_ddp", dies(2, imports=WAITS_FOR_CAUSES)), (2, 1), folder / "run", *FLAGS, *ELASTIC)
    return folder / "run"


def test_a_rank_that_dies_changes_nothing(after_a_death, undisturbed):
    require_same(after_a_death, undisturbed)


def test_members_rows_say_who_is_there(after_a_death):
    first, *_, last = rows(after_a_death, "members")
    assert first["step"] == 30 and first["generation"] == 1
    assert [one["original"] for one in first["ranks"]] == [0, 1]
    assert {"original", "node_rank", "host"} == set(first["ranks"][0])
    assert "rank 2, node 1" in first["cause"] and "SIGKILL" in json.dumps(first)
    assert sorted(one["original"] for one in last["ranks"]) == [0, 1, 2]


@pytest.mark.parametrize("rank, moment", [
    pytest.param(rank, moment, marks=[pytest.mark.long] * ((rank, moment) not in OFTEN_ENOUGH))
    for moment in MOMENTS for rank in (0, 2) if (rank, moment) != (2, "backward")
])  # fmt: skip
def test_a_rank_that_dies_at_another_moment_changes_nothing(rank, moment, undisturbed, tmp_path):
    dying = altered(tmp_path / "dying_ddp", dies(rank, moment))
    play(dying, (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    require_same(tmp_path / "run", undisturbed)
    found = causes(tmp_path / "run")
    assert any(f"lost rank {rank}, node {0 if rank < 2 else 1}" in cause for cause in found), found


COUNTING = f"""{IMPORTS}from torch import nn
from common.uneven.options.global_batch import global_batch_norm


class Counting(nn.Sequential):
    calls = 0

    def forward(self, images):
        self.calls += self.training
        return super().forward(images) * (1 + 1 / (1 + self.calls))


"""
COUNTS = {
    "ConvNet(train_set.side)": "global_batch_norm(Counting(ConvNet(train_set.side), nn.BatchNorm1d(10)))",
    IMPORTS: COUNTING,
}


@pytest.mark.long
def test_what_forward_has_changed_in_a_step_that_is_done_again_counts_once(tmp_path):
    dying = dies(2)
    assert dying.pop(IMPORTS) == IMPORTS
    play(altered(tmp_path / "dying_ddp", {**dying, **COUNTS}), (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    play(altered(tmp_path / "counting_ddp", COUNTS), (1,), tmp_path / "wanted", *FLAGS)
    require_same(tmp_path / "run", tmp_path / "wanted")
    counted = [tensor.item() for name, tensor in weights(tmp_path / "run").items() if "num_batches" in name]
    assert counted == [LAST]


LOADS = "            train_set, test_set, fingerprint = data.load("


def test_a_rank_that_dies_while_the_others_wait_for_its_data_is_not_waited_for(undisturbed, tmp_path):
    """They wait on the store, where no connection is lost with it."""
    dying = {LOADS: f"            if worker.rank == 2 and not worker.predecessor:\n                {DIE}\n{LOADS}"}
    script = altered(tmp_path / "dying_ddp", {**dying, **until_all_are_there(3, RETURN)})
    play(script, (2, 1), tmp_path / "run", *FLAGS, "--elastic", 1, "--timeout", 3600)
    require_same(tmp_path / "run", undisturbed)


CONNECTS = """import common.elastic.group as joining
connect = joining.connect


def die_while_others_connect(worker, *rest):
    if worker.membership and worker.membership.generation == 1 and worker.membership.original.rank == 1:
        __import__("os").kill(__import__("os").getpid(), 9)
    connect(worker, *rest)


joining.connect = die_while_others_connect
"""


@pytest.mark.long
def test_a_rank_that_dies_while_the_others_connect_anew_changes_nothing(undisturbed, tmp_path):
    dying = altered(tmp_path / "dying_ddp", dies(2, imports=CONNECTS))
    play(dying, (2, 1), tmp_path / "run", *FLAGS, *ELASTIC)
    require_same(tmp_path / "run", undisturbed)
    assert any("lost rank 1, node 0" in cause for cause in causes(tmp_path / "run")), causes(tmp_path / "run")


JOINS = """import common.elastic.group as joining
join = joining.join
joining.REJOIN_SECONDS = 600.0


def die_while_others_join(worker, *rest, **more):
    if worker.membership and worker.membership.generation == 1 and worker.membership.original.rank == 1:
        __import__("os").kill(__import__("os").getpid(), 9)
    return join(worker, *rest, **more)


joining.join = die_while_others_join
"""


@pytest.mark.long
def test_a_rank_that_dies_before_the_others_join_anew_is_named_and_not_waited_for(undisturbed, tmp_path):
    dying = altered(tmp_path / "dying_ddp", dies(3, ranks=4, imports=JOINS))
    play(dying, (3, 1), tmp_path / "run", *FLAGS, *ELASTIC, "--join-timeout", 600)
    require_same(tmp_path / "run", undisturbed)
    found = causes(tmp_path / "run")
    assert any("lost rank 1, node 0" in cause and "while the ranks joined" in cause for cause in found), found


class Run:
    """A patient run of 2+1 under way, of which nodes are killed and started again."""

    def __init__(self, folder: Path, *flags: object, gpus: tuple[int, ...] = (2, 1), changes: dict | None = None):
        self.folder, self.started, self.ranks = folder, folder.parent, sum(gpus)
        self.patient = Patient(self.started, changes)
        flags_of_all = [*Patient.FLAGS, *ELASTIC]
        if "--batch-per-gpu" in flags:
            place = flags_of_all.index("--global-batch")
            del flags_of_all[place : place + 2]
        self.nodes = nodes_of(gpus, folder, *flags_of_all, *flags)
        self.playing = [playing(self.patient.script, [node], self.started) for node in self.nodes]
        self.wait_for("train", 2 * EPOCH)  # it is slow from now on

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Wait until there are so many rows of this kind."""
        wait_until(lambda: len(rows_so_far(self.folder, kind)) >= count, self)

    def wait_for_change(self, cause: str, count: int = 1) -> None:
        """Wait until the members have changed so often for this cause."""
        wait_until(lambda: sum(cause in row["cause"] for row in rows_so_far(self.folder, "members")) >= count, self)

    def wait_for_members(self, *originals: int) -> None:
        """Wait until the run goes on with these ranks; two of a node may be let in one after the other."""

        def there() -> list[int]:
            found = rows_so_far(self.folder, "members")
            return sorted(one["original"] for one in found[-1]["ranks"]) if found else []

        wait_until(lambda: there() == list(originals), self)

    def wait_for_all(self) -> None:
        self.wait_for_members(*range(self.ranks))

    def kill(self, node: int) -> None:
        self.playing[node].kill()

    def start(self, node: int) -> None:
        self.playing[node] = playing(self.patient.script, [self.nodes[node]], self.started)

    def start_beside(self, node: int, *more: object) -> Result:
        """What another process for this node says, which ends at once."""
        folder = self.started / "beside"
        folder.mkdir()
        (result,) = playing(self.patient.script, [Node([*self.nodes[node].flags, *more])], folder).results()
        return result

    def worker(self, rank: int) -> psutil.Process:
        """The process of a rank at the start; not by its title, which under pytest does not always change."""
        start, *_ = json.loads((self.folder / "run.json").read_text())["starts"]
        return psutil.Process(start["ranks"][rank]["pid"])

    def worker_of_node(self, node: int) -> psutil.Process:
        """The process of the first rank on a node, now."""
        return psutil.Process(self.playing[node].processes[0].pid).children()[0]

    def goes_on(self) -> bool:
        return any(node.goes_on() for node in self.playing)

    def said(self) -> str:
        return "\n".join(node.said() for node in self.playing)

    def end(self) -> int:
        """Let it end, well on every node that is there. Returns its last step."""
        last = self.patient.end(self.folder)
        codes = [result.code for node in self.playing for result in node.results()]
        assert not any(codes), self.said()
        return last


@pytest.mark.long
def test_a_node_that_dies_while_the_others_wait_for_its_evaluation_is_not_waited_for(undisturbed, tmp_path):
    """They wait on the store, and nobody is left on that node to say what has happened to it."""
    file = tmp_path / "evaluates"
    stays = f"open({str(file)!r}, 'w').close(), __import__('time').sleep(3600)"
    stays = does("evaluation", "run.step == 46 and worker.rank == 2", stays)
    under_way = Run(tmp_path / "run", "--timeout", 3600, changes=stays)
    wait_until(file.exists, under_way)
    under_way.kill(1)
    under_way.wait_for_members(0, 1)
    del under_way.playing[1]
    require_same(tmp_path / "run", undisturbed, under_way.end())


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_dies_and_is_started_again_is_let_in(node, undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    under_way.kill(node)
    under_way.wait_for_members(*([2] if node == 0 else [0, 1]))
    under_way.start(node)
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())


@pytest.mark.long
def test_a_replacement_is_let_in_although_the_code_was_edited_meanwhile(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    with (under_way.patient.script.parent / "train.py").open("a") as file:
        file.write("# edited while the run goes on\n")
    kill(under_way.worker(2).pid)
    under_way.wait_for_change("lost rank 2, node 1")
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert "starting another process for it" in under_way.playing[1].said()


NO_GRACE = "import common.launch.supervisor as launch_supervisor\nlaunch_supervisor.GRACE_SECONDS = 0.0\n"
AGREES = '        run.agree(data=f"{args.dataset} {fingerprint}")'
WAITS_ITS_TURN = "        with run.first_on_node("
GONE = """        if worker.predecessor:
            raise __import__("common.errors").errors.UserError("--data-dir nowhere: no such folder")
"""


@pytest.mark.parametrize("change, said", [
    ({AGREES: AGREES.replace("{fingerprint}", "{fingerprint}{worker.predecessor}")}, "this run is under way, and "),
    pytest.param({WAITS_ITS_TURN: GONE + WAITS_ITS_TURN}, "--data-dir nowhere: no such folder", marks=pytest.mark.long),
], ids=["other data", "none"])  # fmt: skip
def test_a_replacement_that_does_not_fit_is_told_so_and_its_neighbour_goes_on(change, said, undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", changes={**change, IMPORTS: IMPORTS + NO_GRACE})
    kill(under_way.worker(1).pid)
    under_way.playing[0].wait_for(said)
    under_way.wait_for_members(0, 2)
    under_way.wait_for("train", len(rows_so_far(tmp_path / "run", "train")) + 10)  # a second at least
    last = under_way.patient.end(tmp_path / "run")
    assert [result.code for node in under_way.playing for result in node.results()] == [2, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed, last)
    assert [one["original"] for one in rows(tmp_path / "run", "members")[-1]["ranks"]] == [0, 2]


@pytest.mark.parametrize("mistake, said", [
    (("--lr", 0.5), "has --lr 0.5, but node 0"),
    pytest.param(("--gpus", "2,2"), "has -g/--gpus 2,2, but node 0", marks=pytest.mark.long),
])  # fmt: skip
def test_a_node_that_comes_back_with_another_flag_is_refused_and_the_run_goes_on(mistake, said, undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    under_way.kill(1)
    under_way.wait_for_members(0, 1)
    wrong = under_way.start_beside(1, *mistake)
    assert wrong.code == 2 and said in wrong.output and "this run is under way" in wrong.output, wrong.output
    assert "Traceback" not in wrong.output
    del under_way.playing[1]
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert not any("let in rank 2" in cause for cause in causes(tmp_path / "run"))


@pytest.mark.long
def test_a_node_that_is_started_twice_and_a_stranger_change_nothing(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    second = under_way.start_beside(1)
    assert second.code == 2 and "rank 2 is in the run already: node 1" in second.output, second.output
    flags = under_way.nodes[0].flags
    main = connect("127.0.0.1", int(flags[flags.index("--master-port") + 1]), TIMEOUT_SECONDS)
    leader = wait_until(lambda: leader_in(main), under_way)  # the leader writes it once a second
    standby = wait_until(lambda: reach(leader), under_way)
    standby.set(f"present/{standby.add('present', 1)}", "a stranger")
    ignored = "something that is not a rank of this code has written into the store: ignored"
    wait_until(lambda: ignored in under_way.said(), under_way)
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert not rows(tmp_path / "run", "members")


@pytest.mark.long
def test_a_node_that_comes_back_with_another_secret_is_told_so_and_the_run_goes_on(undisturbed, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    under_way = Run(tmp_path / "run", "--secret-file", tmp_path / "one")
    under_way.kill(1)
    under_way.wait_for_members(0, 1)
    wrong = under_way.start_beside(1, "--secret-file", tmp_path / "other")
    assert wrong.code == 2 and "this rank has another secret" in wrong.output, wrong.output
    assert "has another secret than this rank (--secret-file): not let in" in under_way.said()
    del under_way.playing[1]
    require_same(tmp_path / "run", undisturbed, under_way.end())


@pytest.mark.long
def test_a_run_that_was_resumed_takes_a_node_back_that_was_started_without_resume(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "--resume")
    under_way.kill(1)
    under_way.wait_for_members(0, 1)
    under_way.nodes[1] = Node([flag for flag in under_way.nodes[1].flags if flag != "--resume"])
    under_way.start(1)
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())


@pytest.mark.long
def test_a_node_finds_a_run_that_another_node_leads_although_node_0s_worker_was_replaced(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", gpus=(1, 1, 1))
    under_way.kill(0)  # node 1 leads from now on
    under_way.wait_for_members(1, 2)
    under_way.start(0)  # its worker serves the store at --master-addr
    under_way.wait_for_all()
    kill(under_way.worker_of_node(0).pid)
    under_way.wait_for_change("lost rank 2, node 0")
    under_way.wait_for_all()
    under_way.kill(2)
    under_way.wait_for_members(0, 1)
    under_way.start(2)
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())


def test_a_rank_that_is_stopped_is_replaced(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "--timeout", 15)
    under_way.worker(1).suspend()
    under_way.wait_for_change("lost rank 1, node 0")
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())


NEVER_LATE = """import common.launch.replacing as replacing
replacing.SOON_SECONDS = 10_000.0
"""


@pytest.mark.long
def test_a_rank_that_dies_again_and_again_is_left_out_and_its_neighbour_goes_on(undisturbed, tmp_path):
    always = "run.step >= 30 and getattr(worker.membership, 'original', worker).rank == 1"
    changes = {**does("backward", always, "__import__('os')._exit(3)"), IMPORTS: IMPORTS + NEVER_LATE}
    under_way = Run(tmp_path / "run", changes=changes)
    said = "rank 1 has ended 3 times within 10000 s of its start: it is left out"
    under_way.playing[0].wait_for(said)
    under_way.wait_for_members(0, 2)
    last = under_way.patient.end(tmp_path / "run")
    assert [result.code for node in under_way.playing for result in node.results()] == [3, 0], under_way.said()
    require_same(tmp_path / "run", undisturbed, last)
    assert [one["original"] for one in rows(tmp_path / "run", "members")[-1]["ranks"]] == [0, 2]


def test_too_few_ranks_save_and_end_and_the_run_can_be_resumed(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "--elastic", 3)
    under_way.kill(1)
    (result,) = under_way.playing[0].results()
    assert result.code == 75, result.output
    assert "interrupted: 2 of 3 ranks are left, fewer than --elastic 3: ended after step" in result.output
    last = under_way.patient.end(tmp_path / "run")
    play(under_way.patient.script, (1, 1), tmp_path / "run", *Patient.FLAGS, "--resume")
    require_same(tmp_path / "run", undisturbed, last)


@pytest.mark.long
def test_shares_and_micro_batches_stay_with_their_ranks(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "--shares", "4,1,2", "--micro-batch", "16,8,32")
    kill(under_way.worker(0).pid)
    under_way.wait_for_change("lost rank 0, node 0")
    under_way.wait_for_all()
    require_same(tmp_path / "run", undisturbed, under_way.end())
    by_generation = {len(row["shares"]): row["shares"] for row in rows(tmp_path / "run", "ranks")}
    assert by_generation[3] in ([37, 9, 18], [9, 18, 37]), by_generation


@pytest.mark.long
def test_a_batch_per_gpu_keeps_the_global_batch_of_the_start(tmp_path):
    under_way = Run(tmp_path / "run", "--batch-per-gpu", 16)
    under_way.kill(1)
    under_way.wait_for_members(0, 1)
    under_way.start(1)
    under_way.wait_for_all()
    under_way.end()
    shares = [row["shares"] for row in rows(tmp_path / "run", "ranks")]
    assert {len(one) for one in shares} == {2, 3} and {sum(one) for one in shares} == {48}


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--elastic", 5, "-n", 1, "-g", 2), "--elastic 5, but the job has 2 ranks"),
        (("--elastic", 1, "-n", 1, "-g", 2, "--sync-every", 5), "--elastic with --sync-every"),
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


def test_a_signal_before_a_change_of_the_members_takes_effect_after_it(tmp_path):
    once = "run.step == 30 and not worker.membership"  # one rank is signalled in the step in which another dies
    signalled = "__import__('os').kill(__import__('os').getpid(), 10 if worker.rank == 1 else 9)"
    changes = {**does("backward", f"{once} and worker.rank", signalled), BEGIN: COMES_AFTER_THE_END + BEGIN}
    dying = altered(tmp_path / "dying_ddp", changes)
    results = playing(dying, nodes_of((2, 1), tmp_path / "run", *Patient.FLAGS, *ELASTIC), tmp_path).results()
    assert results[0].code == 75 and "interrupted: SIGUSR1 on rank 1" in results[0].output, results


def test_a_rank_that_is_lost_between_the_update_and_the_end_of_a_step_ends_the_run_with_the_way_on(tmp_path):
    """The others wait there for it, by a collective of the trainer's own: their weights have moved already."""
    place = MOMENTS["exchange"]
    dying = f"            if run.step == 30 and worker.rank == 2:\n                {DIE}\n"
    waiting = "            torch.distributed.all_reduce(torch.zeros(1))\n"
    script = altered(tmp_path / "torn_ddp", {place: dying + waiting + place})
    first, _ = playing(script, nodes_of((2, 1), tmp_path / "run", *FLAGS, *ELASTIC), tmp_path).results()
    assert first.code == 1 and "Traceback" not in first.output, first.output
    assert "a part of that step is done, and it cannot be taken back. Go on from the last checkpoint" in first.output
    assert len(losses(tmp_path / "run")) <= 30
