#!/usr/bin/env python3
"""Is this cluster fit to train? Looks at every node, every link between them and every rank, and says what to mend.

    python -m common.doctor                                         # this machine alone
    python -m common.doctor -n 2 -g 8,2 -i 0                        # on each node, with the trainer's layout flags
    python -m common.doctor -n 2 -g 8,2 -i 1 --master-addr NODE0
    torchrun --nproc-per-node 4 -m common.doctor                    # any launcher

Node 0 prints the table, every node the findings. Exit code 1 when something would break training, 2 for a wrong flag.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.launch import cli, start


def flags() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    group = parser.add_argument_group("doctor")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else, on standard output"
    )
    group.add_argument(
        "--min-rate", type=cli.positive_float, default=500.0, metavar="MBIT", help="Mbit/s that a link must carry"
    )
    parser.set_defaults(join_timeout=15.0, timeout=10.0)
    return parser


if __name__ == "__main__":
    start.main(flags())

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from common.doctor import diagnosis
from common.doctor import links as link_test
from common.doctor import node as node_facts
from common.doctor import speed as speed_test
from common.doctor import table as doctor_table
from common.doctor.diagnosis import Finding
from common.errors import RunError, UserError
from common.join import devices, network, process_group
from common.launch.layout import Worker
from common.record.report import say

POLL_SECONDS = 0.03
LOOK_SECONDS = 12.0  # for a node or a rank to look at itself
JOIN_SPARE_SECONDS = 8.0  # beyond --join-timeout
LINK_SECONDS = 0.4  # of data, for one direction of one link
ALL_LINKS_SECONDS = 8.0
CONNECT_SECONDS = 10.0
END_SECONDS = 3.0


def train(worker: Worker, args: argparse.Namespace) -> None:
    """Examine this cluster. Every rank must enter; raises RunError when something would break training."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        examination = Examination(worker, args, output)
        examination.run()
        examination.conclude()


class Examination:
    """One rank's part. `report` grows from stage to stage, so that it can be shown whenever a stage fails."""

    def __init__(self, worker: Worker, args: argparse.Namespace, output):
        self.worker, self.args, self.output = worker, args, output
        self.here = f"node {worker.node_rank} ({socket.gethostname()})"
        self.early: list[Finding] = []  # before the ranks can speak to one another
        self.findings: list[Finding] = []
        self.report = {
            "layout": {
                "source": worker.layout.source,
                "world_size": worker.world_size,
                "gpus_per_node": worker.layout.gpus_per_node,
                "rendezvous": worker.layout.init_method,
            },
            "nodes": [],
            "links": [],
            "ranks": [],
            "all_reduce": [],
        }
        self.board: Board | None = None
        self.shown = threading.Lock()
        self.watch = Watch(self._hung)

    # --- the stages --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All stages, as far as they lead."""
        self.watch.enter("looking at this node", LOOK_SECONDS)
        facts = {"place": self.here, "node": self.worker.node_rank, **node_facts.collect()} if self._leads else {}
        self.report["nodes"] = [facts] if facts else []
        self._judge_interface()
        device, backend = self._device_and_backend()
        self.report["layout"]["backend"] = backend

        self.watch.enter("joining", self.args.join_timeout + JOIN_SPARE_SECONDS)
        joining = argparse.Namespace(**{name: value for name, value in vars(self.args).items() if name != "json"})
        try:
            joined = process_group.join(self.worker, joining, device, backend)
        except (UserError, RuntimeError) as error:
            self.findings = [*self.early, diagnosis.from_error(self._origin(error), error)]
            self._judge_own_node()
            return

        self.board = Board(self.worker, joined)
        self.places = {view["rank"]: f"node {view['node_rank']} ({view['host']})" for view in joined.views}
        self.leaders = [view["rank"] for view in joined.views if view["local_rank"] == 0]
        self.watch.enter("looking at the ranks", 2 * LOOK_SECONDS)
        listener = self._listen(joined, facts) if self._leads else None
        self._share_facts(joined, facts, device)
        self._test_links(listener)
        if self._blocked():
            return
        self._test_collectives(joined, device, backend)

    @property
    def _leads(self) -> bool:
        """One rank of each node looks at the node, tests its links and speaks."""
        return self.worker.local_rank == 0

    def _judge_interface(self) -> None:
        """A wrong interface is noted and dropped, so that the nodes can still meet and tell one another."""
        addresses, nodes = network.local_addresses(), self.worker.layout.nodes
        found = diagnosis.judge_interfaces(self.here, self.args.interface, os.environ, addresses, nodes)
        if found:
            self.args.interface = None
            for variable in diagnosis.INTERFACE_VARIABLES:
                os.environ.pop(variable, None)
        if self._leads:
            self.early += found + diagnosis.judge_network(self.here, addresses, nodes)

    def _device_and_backend(self) -> tuple[torch.device, str]:
        """As the trainers choose them; a failure is noted, and the CPU serves to go on."""
        self.unusable = False
        device, backend = torch.device("cpu"), self.args.backend
        try:
            device = devices.choose_device(self.worker)
            torch.zeros(1, device=device)
        except (UserError, RuntimeError) as error:
            self._unusable(error)
        try:
            backend = devices.choose_backend(self.worker, self.args)
        except UserError as error:
            self._unusable(error)
        return device if not self.unusable else torch.device("cpu"), backend

    def _unusable(self, error: Exception) -> None:
        self.unusable = True
        self.early.append(diagnosis.from_error(f"rank {self.worker.rank}, {self.here}", error))

    def _origin(self, error: BaseException) -> str:
        """Whose fault a failed join is, where the error itself does not say."""
        return "joining" if getattr(error, "same_on_every_rank", False) else self.here

    def _listen(self, joined: process_group.Joined, facts: dict) -> link_test.Listener | None:
        """Open this node's end of the link test, at the address that gloo and NCCL will use."""
        address, interface, to_master = _way(joined, self.worker)
        facts["way"] = {"address": address, "interface": interface, "to_master": to_master}
        try:
            listener = link_test.Listener(address)
        except OSError as error:
            problem = f"cannot listen at {address} (interface {interface}): {error.strerror or error}"
            self.early.append(Finding("error", self.here, problem, "see `ip address`, or name another --interface"))
            return None
        facts["way"] |= {"port": listener.port, "identity": listener.identity}
        return listener

    def _share_facts(self, joined: process_group.Joined, facts: dict, device: torch.device) -> None:
        mine = {"facts": facts, "rank": None, "unusable": self.unusable}
        try:
            mine["rank"] = speed_test.rank_facts(self.worker.rank, device)
        except RuntimeError as error:
            self._unusable(error)
            mine["unusable"] = True
        mine["findings"] = [finding.as_dict() for finding in self.early]
        posts = self.board.exchange("looking at the ranks", mine, LOOK_SECONDS)
        self.unusable = any(post["unusable"] for post in posts.values())
        self.findings += [Finding(**found) for post in posts.values() for found in post["findings"]]
        self.nodes = {rank: posts[rank]["facts"] for rank in self.leaders if rank in posts}
        self.report["nodes"] = list(self.nodes.values())
        ranks = [post["rank"] for post in posts.values() if post["rank"]]
        self.report["ranks"] = [{"place": self.places[rank["rank"]], **rank} for rank in ranks]
        for node in self.report["nodes"]:
            own = {view["pid"] for view in joined.views if view["host"] == node["host"]}
            self.findings += diagnosis.judge_node(node["place"], node, own)
        self.findings += diagnosis.judge_settings({node["place"]: node for node in self.report["nodes"]})
        self.findings += diagnosis.judge_ranks(self.places, ranks)

    def _test_links(self, listener: link_test.Listener | None) -> None:
        """Leaders measure their links, two nodes at a time; every rank learns the results."""
        seconds = ALL_LINKS_SECONDS + 2 * len(self.nodes) * LINK_SECONDS
        until = time.monotonic() + seconds
        self.watch.enter("testing the links", seconds + 2)
        mine = self._measure_links(until - 1) if self._leads else []
        posts = self.board.exchange("testing the links", mine, until - time.monotonic())
        if listener:
            listener.close()
        self.report["links"] = [link for post in posts.values() for link in post]
        names = {rank: self.places[rank] for rank in self.leaders}
        self.findings += diagnosis.judge_links(names, self.nodes, self.report["links"], self.args.min_rate)

    def _measure_links(self, until: float) -> list[dict]:
        """This node's links to the others. Connects to all at once first, so that dead ways cost their time once."""
        others = {rank: node["way"] for rank, node in self.nodes.items() if rank != self.worker.rank}
        links = {rank: {"from": self.worker.rank, "to": rank, "port": way.get("port")} for rank, way in others.items()}
        ways = {rank: way for rank, way in others.items() if "port" in way}
        if ways:
            with ThreadPoolExecutor(max_workers=min(64, len(ways))) as pool:
                tries = {rank: pool.submit(_try, way) for rank, way in ways.items()}
            for rank, answer in tries.items():
                links[rank] |= answer.result()
        for rank in others.keys() - ways.keys():
            links[rank]["error"] = "it does not listen"
        mesh = sorted(self.nodes)
        self.board.exchange("connecting to the other nodes", True, link_test.CONNECT_SECONDS + 2, mesh)
        for number, pairs in enumerate(link_test.rounds(len(mesh))):
            for back in (False, True):
                if self.board.silent or time.monotonic() > until:
                    break
                for pair in pairs:
                    source, target = (mesh[index] for index in (reversed(pair) if back else pair))
                    if source == self.worker.rank and "error" not in links[target]:
                        links[target] |= _measure(ways[target], LINK_SECONDS)
                stage = f"testing the links, round {number}{'b' * back}"
                self.board.exchange(stage, True, min(2 * LINK_SECONDS + 4, until - time.monotonic()), mesh)
        return list(links.values())

    def _blocked(self) -> bool:
        """Is there a reason why a process group cannot come to be? The same answer on every rank."""
        return self.unusable or bool(self.board.silent) or any(link.get("error") for link in self.report["links"])

    def _test_collectives(self, joined: process_group.Joined, device: torch.device, backend: str) -> None:
        self.watch.enter("connecting the process group", CONNECT_SECONDS)
        try:
            process_group.connect(self.worker, self.args, device, backend, joined)
            self.watch.enter("all-reduce", speed_test.BUDGET_SECONDS + self.args.timeout + 2)
            bf16 = speed_test.bf16_all_reduce(device, self.worker.world_size)
            rows = speed_test.all_reduce_times(device) if self.worker.world_size > 1 else []
            mine = {"bf16": bf16, "rows": rows, "error": None}
        except (RuntimeError, ValueError) as error:
            mine = {"bf16": None, "rows": [], "error": str(error).strip().splitlines()[0]}
        posts = self.board.exchange("all-reduce", mine, self.args.timeout)
        self.report["all_reduce"] = posts.get(0, mine)["rows"]
        for rank, post in posts.items():
            where = f"rank {rank}, {self.places[rank]}"
            if post["error"]:
                mend = "see the other findings; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL say more"
                self.findings.append(Finding("error", where, f"{backend} failed: {post['error']}", mend))
            elif post["bf16"] != "ok":
                mend = "train without the bf16 communication hook"
                self.findings.append(Finding("error", where, f"all-reduce in bfloat16: {post['bf16']}", mend))

    # --- the end -----------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Show the report and raise RunError when there are errors."""
        self.watch.leave()
        self._show()
        if self.board:
            self.board.leave()
        if errors := [finding for finding in self.findings if finding.level == "error"]:
            raise RunError(f"not fit to train: {_count(len(errors), 'error')}, named above", same_on_every_rank=True)

    def _show(self) -> None:
        with self.shown:
            if self.board:
                self.findings += self.board.findings(self.places)
            self.findings.sort(key=lambda finding: finding.level)  # errors first
            self.report["findings"] = [finding.as_dict() for finding in self.findings]
            self.report["ok"] = not any(finding.level == "error" for finding in self.findings)
            if not self._leads:
                return
            if self.args.json:
                self.output.write(json.dumps(self.report) + "\n")
                self.output.flush()
            else:
                say(None, doctor_table.render(self.report, whole=self.worker.is_main or not self.board))

    def _judge_own_node(self) -> None:
        for node in self.report["nodes"]:
            self.findings += diagnosis.judge_node(node["place"], node, {os.getpid()})

    def _hung(self, stage: str) -> None:
        """The watch's last resort: say what is known, and end."""
        silent = "this rank"
        if self.board and self.board.waiting_for:
            silent = " and ".join(self.board.waiting_for)
        problem = f"no end to {stage}: {silent} did not answer in time"
        mend = "is that process alive, and the link to it whole? See what the other nodes say"
        self.findings.append(Finding("error", self.here, problem, mend))
        self._show()
        say(self.worker, "error: not fit to train: a stage did not end, see above", error=True)
        os._exit(RunError.exit_code)


def _way(joined: process_group.Joined, worker: Worker) -> tuple[str, str | None, str | None]:
    """The address and interface that gloo will take here, and the interface on which the nodes have met."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or network.interface_of(joined.own_address)
    here = network.local_addresses().get(interface or "", [])
    address = joined.own_address if joined.own_address in here or not interface else network.own_address(interface)
    seen = [view["addresses"]["master"] for view in joined.views if view["node_rank"] != worker.node_rank]
    met = next(filter(None, seen), joined.own_address) if worker.is_main else joined.own_address
    return address, interface, network.interface_of(met)


def _try(way: dict) -> dict:
    """Connect once, and make sure that it is the right node that answers: {} or {"error": why}."""
    return {name: value for name, value in _measure(way, 0.0).items() if name == "error"}


def _measure(way: dict, seconds: float) -> dict:
    return link_test.measure(way["address"], way["port"], way["identity"], seconds)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


class Board:
    """Where the ranks post what they found, on the store of the join. Nobody waits long for a rank that is silent."""

    def __init__(self, worker: Worker, joined: process_group.Joined):
        self.worker, self.store = worker, dist.PrefixStore("doctor", joined.store)
        self.everyone = range(worker.world_size)
        self.silent: dict[int, str] = {}  # rank -> the stage in which it fell silent
        self.waiting_for: list[str] = []

    def exchange(
        self, stage: str, value: object, seconds: float, among: Iterable[int] | None = None
    ) -> dict[int, object]:
        """Post `value` and take everyone's: rank -> value, in order. Who does not come is left out from then on."""
        self.store.set(f"{stage}/{self.worker.rank}", json.dumps(value))
        expected = [rank for rank in (self.everyone if among is None else among) if rank not in self.silent]
        self.waiting_for = [f"rank {rank}" for rank in expected if rank != self.worker.rank]
        deadline = time.monotonic() + seconds
        while not self.store.check([f"{stage}/{rank}" for rank in expected]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        posts = {}
        for rank in expected:
            if self.store.check([f"{stage}/{rank}"]):
                posts[rank] = json.loads(self.store.get(f"{stage}/{rank}"))
            else:
                self.silent[rank] = stage
        self.waiting_for = []
        return posts

    def findings(self, places: dict[int, str]) -> list[Finding]:
        """A finding for each rank that fell silent."""
        mend = "look at its log; is the process alive and the link to its node whole?"
        return [
            Finding("error", f"rank {rank}, {places[rank]}", f"fell silent while {stage}", mend)
            for rank, stage in self.silent.items()
        ]

    def leave(self) -> None:
        """Rank 0, whose process may hold the store, goes last."""
        self.store.add("left", 1)
        deadline = time.monotonic() + END_SECONDS
        expected = self.worker.world_size - len(self.silent)
        while self.worker.is_main and self.store.add("left", 0) < expected and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class Watch:
    """Calls `expired(stage)` when a stage takes longer than it may: on a cut link a store blocks for minutes."""

    def __init__(self, expired: Callable[[str], None]):
        self.expired, self.stage, self.deadline = expired, "", float("inf")
        threading.Thread(target=self._run, daemon=True).start()

    def enter(self, stage: str, seconds: float) -> None:
        self.deadline, self.stage = time.monotonic() + seconds, stage

    def leave(self) -> None:
        self.deadline = float("inf")

    def _run(self) -> None:
        while time.monotonic() < self.deadline:
            time.sleep(0.1)
        self.expired(self.stage)
