"""--join, Ctrl-C on one node, and --stop: a run with --elastic that grows and shrinks has the curve of one that does
not."""

import http.server
import itertools
import os
import re
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from common.errors import Interrupted
from common.join import network
from common.join.store import connect, split
from common.launch.addresses import free_port, host_and_port
from tests.harness import (
    BERT,
    FINETUNE,
    MNIST,
    TIMEOUT_SECONDS,
    Node,
    kill,
    largest_difference,
    losses,
    play,
    playing,
    rows,
    rows_so_far,
    wait_until,
    weights,
)
from tests.small_bert import save_model, save_ner
from tests.test_bert_exactness import flags_of, text  # noqa: F401 (a fixture)
from tests.test_elastic import causes, require_same
from tests.trainers import Patient, Unhurried

SAVED = Interrupted.exit_code
ELASTIC = ("--device", "cpu", "--no-plot", "--elastic", 1, "--timeout", 120)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Patient.undisturbed(tmp_path_factory.getbasetemp())


class Run:
    """A patient run that begins with one command, `first`; further machines join it."""

    def __init__(
        self,
        folder: Path,
        *flags: object,
        trainer: Patient | Unhurried | None = None,
        base: tuple[object, ...] = Patient.FLAGS,
        second: tuple[object, ...] = (),
    ):
        self.folder, self.commands, self.numbers = folder, [], itertools.count()
        self.patient = trainer or Patient(folder.parent)
        self.first = self.start(*base, "--out-dir", folder, *ELASTIC, *(flags or ("-g", 1)))
        if second:
            self.start(*base, "--out-dir", folder, *ELASTIC, *second)
        self.wait_until_it_trains()
        self.address = self.address_in(self.first)

    def start(self, *flags: object) -> playing:
        folder = self.folder.parent / f"command-{next(self.numbers)}"
        folder.mkdir()
        self.commands.append(playing(self.patient.script, [Node(list(flags))], folder))
        return self.commands[-1]

    def join(self, *flags: object, address: str = "") -> playing:
        return self.start("--join", address or self.address, "--device", "cpu", *flags)

    def address_in(self, *commands: playing) -> str:
        """Where others join, as one of these commands has said."""

        def answers(address: str) -> bool:
            host, port = host_and_port(f"tcp://{address}")
            return bool(network.listens(host, port, TIMEOUT_SECONDS))

        def found() -> list[str]:
            said = "".join(command.said() for command in commands)
            return [one for one in re.findall(r"joins by: .* --join (\S+)", said) if answers(one)]

        return wait_until(found, self)[-1]

    def wait_until_it_trains(self) -> None:
        wait_until(lambda: rows_so_far(self.folder, "train"), self)

    def wait_for_members(self, *originals: int) -> None:
        def there() -> list[int]:
            found = rows_so_far(self.folder, "members")
            return sorted(one["original"] for one in found[-1]["ranks"]) if found else []

        wait_until(lambda: there() == list(originals), self)

    def leaves(self, command: playing, number: int = signal.SIGINT) -> str:
        """Send a signal to one machine. Returns what its command has said, which has ended well."""
        os.kill(command.processes[0].pid, number)
        (result,) = command.results()
        self.commands.remove(command)
        assert result.code == 0, result.output
        return result.output

    def goes_on(self) -> bool:
        return any(command.goes_on() for command in self.commands)

    def said(self) -> str:
        return "\n".join(command.said() for command in self.commands)

    def title(self) -> str:
        return f"{len(self.commands)} commands"

    def end(self) -> int | None:
        """Let it end, well on every machine that is there. Returns its last step, of a patient run."""
        last = self.patient.end(self.folder)
        codes = [result.code for command in self.commands for result in command.results()]
        assert not any(codes), self.said()
        return last


def test_machines_join_and_leave_and_one_dies_and_nothing_changes(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    second = under_way.join("-g", 2)
    under_way.wait_for_members(0, 1, 2)
    left = under_way.leaves(under_way.first)
    assert "SIGINT on rank 0" in left and "this node has left the run, which goes on: ranks 1 to 2" in left
    under_way.wait_for_members(1, 2)
    under_way.join("-g", 1, address=under_way.address_in(second))
    under_way.wait_for_members(1, 2, 3)
    kill(psutil.Process(second.processes[0].pid).children()[0].pid)
    wait_until(lambda: any("lost rank" in cause for cause in causes_so_far(under_way)), under_way)
    # The process that takes its place is a new one of the same machine.
    wait_until(lambda: len(rows_so_far(under_way.folder, "members")[-1]["ranks"]) == 3, under_way)
    last_ranks = rows_so_far(under_way.folder, "members")[-1]["ranks"]
    assert sorted(one["node_rank"] for one in last_ranks) == [1, 1, 2]
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert "let in ranks 1 to 2, node 1" in causes(tmp_path / "run")[0]
    assert "rank 0, node 0" in causes(tmp_path / "run")[1] and "left: SIGINT on rank 0" in causes(tmp_path / "run")[1]


@pytest.mark.long
@pytest.mark.parametrize("script", [MNIST, BERT, FINETUNE], ids=["mnist", "pretraining", "fine-tuning"])
def test_a_run_grows_from_one_process_to_seven_and_shrinks_to_another_one(script, text, tmp_path):  # noqa: F811
    base = tuple(FLAGS[script](text, tmp_path))
    play(script, (1,), tmp_path / "alone", *base)
    under_way = Run(tmp_path / "run", trainer=Unhurried(tmp_path, script), base=base)
    second = under_way.join("-g", 3)
    under_way.wait_for_members(0, 1, 2, 3)
    third = under_way.join("-g", 2)
    under_way.wait_for_members(0, 1, 2, 3, 4, 5)
    under_way.leaves(under_way.first)
    under_way.wait_for_members(1, 2, 3, 4, 5)
    kill(psutil.Process(second.processes[0].pid).children()[0].pid)
    wait_until(
        lambda: 6 in [one["original"] for one in rows_so_far(under_way.folder, "members")[-1]["ranks"]], under_way
    )
    last = under_way.join("-g", 1, address=under_way.address_in(second, third))
    wait_until(
        lambda: 7 in [one["original"] for one in rows_so_far(under_way.folder, "members")[-1]["ranks"]], under_way
    )
    under_way.leaves(second)
    under_way.leaves(third)
    under_way.wait_for_members(7)
    under_way.end()
    assert last.processes[0].exitcode == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    found, wanted = (rows(tmp_path / name, "eval") for name in ("run", "alone"))
    assert [(row["step"], row["count"]) for row in found] == [(row["step"], row["count"]) for row in wanted]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9


FLAGS = {
    MNIST: lambda corpus, folder: (*Patient.FLAGS[:-1], 12),
    BERT: lambda corpus, folder: flags_of(corpus, "mlm+nsp", "--precision", "fp64", "--epochs", 30),
    FINETUNE: lambda corpus, folder: (
        *("--task", "ner", "--model", save_model(folder / "model"), "--data", save_ner(folder / "ner")),
        *("--global-batch", 16, "--lr", 3e-3, "--epochs", 60, "--precision", "fp64", "--dropout", 0),
    ),
}


def causes_so_far(run: Run) -> list[str]:
    return [row["cause"] for row in rows_so_far(run.folder, "members")]


def test_the_run_is_asked_to_end_saves_and_goes_on_with_resume(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    other = under_way.join()
    under_way.wait_for_members(0, 1)
    (asked,) = under_way.start("--stop", under_way.address).results()
    assert asked.code == 0 and re.search(r"--stop: ended after step \d+, which is saved", asked.output), asked.output
    for command in (under_way.first, other):
        (result,) = command.results()
        assert result.code == SAVED and "interrupted: --stop: ended after step" in result.output, result.output
    last = under_way.patient.end(tmp_path / "run")
    play(under_way.patient.script, (2,), tmp_path / "run", *Patient.FLAGS, "--resume")
    require_same(tmp_path / "run", undisturbed, last)


def test_the_last_machine_and_one_of_too_few_save_and_end_the_run(tmp_path):
    under_way = Run(tmp_path / "run", "-g", 2, "--elastic", 2)
    other = under_way.join()
    under_way.wait_for_members(0, 1, 2)
    under_way.leaves(other, signal.SIGTERM)
    under_way.wait_for_members(0, 1)
    os.kill(under_way.first.processes[0].pid, signal.SIGINT)
    (result,) = under_way.first.results()
    assert result.code == SAVED and re.search("SIGINT on rank [01]: ended after step", result.output), result.output


def test_a_machine_without_which_too_few_are_left_ends_the_run_and_says_why(tmp_path):
    under_way = Run(tmp_path / "run", "-g", 2, "--elastic", 2)
    other = under_way.join()
    under_way.wait_for_members(0, 1, 2)
    os.kill(under_way.first.processes[0].pid, signal.SIGTERM)
    for command in (under_way.first, other):
        (result,) = command.results()
        why = r"SIGTERM on rank [01], without whose node too few ranks are left \(--elastic\): ended after step"
        assert result.code == SAVED and re.search(why, result.output), result.output


def test_a_second_start_of_a_run_is_refused_and_the_run_is_found_by_its_folder_all_the_same(tmp_path):
    under_way = Run(tmp_path / "run")
    (second,) = under_way.start(*Patient.FLAGS, "--out-dir", tmp_path / "run", "-g", 1, *ELASTIC, "--resume").results()
    assert second.code == 2 and f"--join {tmp_path / 'run'} joins it" in second.output, second.output
    assert "another machine joins by" not in second.output
    (asked,) = under_way.start("--stop", tmp_path / "run").results()
    assert asked.code == 0 and "--stop: ended after step" in asked.output, asked.output


def test_a_machine_finds_a_run_by_its_folder_which_may_not_be_there_yet(tmp_path):
    patient = Patient(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    joins = playing(patient.script, [Node(["--join", tmp_path / "run", "--device", "cpu"])], tmp_path / "second")
    joins.wait_for("(there is no such folder yet); giving up in")
    flags = [*Patient.FLAGS, "--out-dir", tmp_path / "run", "-g", 1, *ELASTIC]
    first = playing(patient.script, [Node(flags)], tmp_path / "first")
    joins.wait_for("let in; the log of the run is")
    patient.end(tmp_path / "run")
    assert [result.code for result in [*first.results(), *joins.results()]] == [0, 0]


def test_ctrl_c_on_a_machine_that_looks_for_a_run_shows_no_traceback(tmp_path):
    joins = playing(MNIST, [Node(["--join", tmp_path / "run", "--device", "cpu"])], tmp_path)
    joins.wait_for("giving up in")
    os.kill(joins.processes[0].pid, signal.SIGINT)
    (result,) = joins.results()
    assert result.code == 130 and "Traceback" not in result.output, result.output


@pytest.mark.long
def test_two_machines_join_at_the_same_moment_and_one_that_dies_meanwhile_changes_nothing(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run")
    first, second, third = under_way.join(), under_way.join(), under_way.join()
    third.wait_for("waiting to be let in")
    third.kill()
    under_way.commands.remove(third)
    for command in (first, second):
        command.wait_for("let in; the log of the run is")
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert {one["original"] for row in rows(tmp_path / "run", "members") for one in row["ranks"]} >= {0, 1, 2}


@pytest.mark.long
def test_a_machine_that_waits_is_let_in_although_the_one_that_leads_leaves(undisturbed, tmp_path):
    """The other one stays; who leads leaves once the newcomer waits, before it is let in or after."""
    under_way = Run(tmp_path / "run")
    other = under_way.join()
    under_way.wait_for_members(0, 1)
    new = under_way.join()
    new.wait_for("waiting to be let in")
    under_way.leaves(under_way.first)
    under_way.wait_for_members(1, 2)
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert other.processes[0].exitcode == new.processes[0].exitcode == 0


NOBODY_IS_LET_IN = """    __import__("common.elastic.lookout").elastic.lookout.COMPLETE_SECONDS = 1e9
    with Run("""
UNTIL_ONE_WAITS = """            standby = run.members.membership.standby
            while run.step + 1 == run.total_steps and not standby.waiting:
                __import__("time").sleep(0.02)
            run.end_step()"""


@pytest.mark.long
def test_a_machine_that_still_waits_when_the_run_ends_is_told_so(undisturbed, tmp_path):
    changes = {"    with Run(": NOBODY_IS_LET_IN, "            run.end_step()": UNTIL_ONE_WAITS}
    under_way = Run(tmp_path / "run", trainer=Patient(tmp_path, changes))
    new = under_way.join()
    new.wait_for("waiting to be let in")
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert "the run has ended meanwhile, without this rank" in new.said()
    assert not rows(tmp_path / "run", "members")


WRONG_DATA = '        run.agree(data=f"{args.dataset} {fingerprint}")'


@pytest.fixture(scope="module")
def six_have_come(tmp_path_factory):
    """(its folder, its last step, what its worker has held) of a run that six machines have joined and left again."""
    folder = tmp_path_factory.mktemp("six") / "run"
    under_way, held = Run(folder), []
    (worker,) = psutil.Process(under_way.first.processes[0].pid).children()
    address = under_way.address.replace(":", " ")
    for number in range(1, 7):
        machine = under_way.join()
        under_way.wait_for_members(0, number)
        under_way.leaves(machine, signal.SIGTERM)
        under_way.wait_for_members(0)
        keys = connect(*split(address), TIMEOUT_SECONDS).num_keys()
        held.append({"descriptors": worker.num_fds(), "threads": worker.num_threads(), "keys of its store": keys})
    return folder, under_way.end(), held


@pytest.mark.long
def test_six_machines_join_and_leave_one_after_the_other(undisturbed, six_have_come):
    folder, last, _ = six_have_come
    require_same(folder, undisturbed, last)
    assert len(rows(folder, "members")) == 12


@pytest.mark.long
@pytest.mark.parametrize("what", ["descriptors", "threads", "keys of its store"])
def test_what_a_process_holds_does_not_grow_with_the_changes_of_members(what, six_have_come):
    counts = [one[what] for one in six_have_come[2]]
    assert counts[-1] <= counts[0] + 3, counts  # one or two come and go


def test_data_that_are_not_there_on_the_machine_that_joins_end_no_run(undisturbed, tmp_path):
    missing = {
        "        with run.first_on_node(": """        if __import__("os").environ.get("OTHER"):
            raise __import__("common.errors").errors.UserError("--data-dir nowhere: no such folder")
        with run.first_on_node("""
    }
    under_way = Run(tmp_path / "run", trainer=Patient(tmp_path, missing))
    (tmp_path / "other").mkdir()
    node = Node(["--join", under_way.address, "--device", "cpu"], {"OTHER": "1"})
    (result,) = playing(under_way.patient.script, [node], tmp_path / "other").results()
    assert result.code == 2 and "--data-dir nowhere: no such folder" in result.output, result.output
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert not rows(tmp_path / "run", "members")


@pytest.mark.long
def test_a_node_of_the_start_comes_back_although_a_machine_that_has_joined_leads(undisturbed, tmp_path):
    layout = ("-n", 2, "-g", "1,1", "--master-addr", "127.0.0.1", "--master-port", free_port())
    first = (*layout, "-i", 0)
    under_way = Run(tmp_path / "run", *first, second=(*layout, "-i", 1))
    under_way.join()
    under_way.wait_for_members(0, 1, 2)
    under_way.leaves(under_way.commands[1])
    under_way.leaves(under_way.first)
    under_way.wait_for_members(2)
    under_way.start(*Patient.FLAGS, "--out-dir", tmp_path / "run", *first, *ELASTIC)
    under_way.wait_for_members(0, 2)
    require_same(tmp_path / "run", undisturbed, under_way.end())


def test_who_does_not_fit_the_run_is_told_so_and_the_run_goes_on(undisturbed, tmp_path):
    other = {
        WRONG_DATA: WRONG_DATA.replace("{fingerprint}", "{fingerprint}{__import__('os').environ.get('OTHER', '')}")
    }
    under_way = Run(tmp_path / "run", trainer=Patient(tmp_path, other))
    for flags, said in {
        ("--lr", 0.5): "--lr is 0.5, but 0.008 in the run to join: leave it out here",
        ("-n", 2, "-g", "1,1", "-i", 0): "the run gives this machine its place: leave that out",
        ("-g", "2,2"): "with --join give one number, this machine's",
        ("--master-port", 29500): "--master-port 29500: the run gives this machine its place",
        ("--max-steps", 5): "--max-steps is 5, but not given in the run to join: leave it out here",
        ("--resume",): "--resume with --join: the run gives this machine its state and its folder",
        ("--out-dir", tmp_path / "other"): "--out-dir with --join: the run gives this machine its state and its folder",
        ("--stop", under_way.address): ": with --stop, which takes no others than --secret-file",
    }.items():
        refuse(under_way, said, *flags)
    folder = tmp_path / "other-data"
    folder.mkdir()
    node = Node(["--join", under_way.address, "--device", "cpu"], {"OTHER": "1"})
    (result,) = playing(under_way.patient.script, [node], folder).results()
    assert result.code == 2 and "this run is under way, and" in result.output and " has data " in result.output
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert not rows(tmp_path / "run", "members")


def refuse(run: Run, said: str, *flags: object) -> None:
    command = run.join(*flags)
    (result,) = command.results()
    run.commands.remove(command)
    assert result.code == 2 and said in result.output and "Traceback" not in result.output, result.output


def test_what_is_no_run_that_can_be_joined_is_named(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = join_at(tmp_path, f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "answers there" in web and "the log of the run shows the address" in web
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nothing = join_at(tmp_path, f"127.0.0.1:{unused.getsockname()[1]}")
    assert "nothing listens there: has the run ended?" in nothing
    assert "cannot resolve no-such-host.invalid" in join_at(tmp_path, "no-such-host.invalid:29500")
    assert "'29500' is not allowed: give HOST:PORT" in join_at(tmp_path, "29500")
    (result,) = playing(MNIST, [Node(["--join", "http://127.0.0.1:29500/", "--device", "cpu"])], tmp_path).results()
    assert result.code == 2 and "is not allowed: give HOST:PORT" in result.output, result.output


def join_at(folder: Path, address: str, flag: str = "--join") -> str:
    (folder / address).mkdir()
    (result,) = playing(MNIST, [Node([flag, address, "--device", "cpu"])], folder / address).results()
    assert result.code == 2 and "Traceback" not in result.output, result.output
    return result.output


def test_a_run_without_elastic_is_joined_by_nobody(tmp_path):
    port = free_port()
    patient = Patient(tmp_path)
    flags = (
        *Patient.FLAGS,
        "-g",
        1,
        "--device",
        "cpu",
        "--no-plot",
        "--master-port",
        port,
        "--out-dir",
        tmp_path / "run",
    )
    under_way = playing(patient.script, [Node(list(flags))], tmp_path)
    wait_until(lambda: rows_so_far(tmp_path / "run", "train"), under_way)
    said = join_at(tmp_path, f"127.0.0.1:{port}")
    assert "was started without --elastic" in said
    patient.end(tmp_path / "run")
    assert [result.code for result in under_way.results()] == [0]


@pytest.mark.long
def test_shares_and_micro_batches_of_a_machine_that_joins_are_its_own(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "-g", 2, "--shares", "3,1", "--micro-batch", "20,10")
    under_way.join("-g", 1)
    under_way.wait_for_members(0, 1, 2)
    require_same(tmp_path / "run", undisturbed, under_way.end())
    assert rows(tmp_path / "run", "ranks")[-1]["shares"] == [32, 11, 21]


@pytest.mark.long
def test_a_batch_per_gpu_keeps_the_global_batch_of_the_start(undisturbed, tmp_path):
    under_way = Run(tmp_path / "run", "-g", 1, "--batch-per-gpu", 64, base=Patient.FLAGS[:4] + Patient.FLAGS[6:])
    under_way.join()
    under_way.wait_for_members(0, 1)
    require_same(tmp_path / "run", undisturbed, under_way.end())
