"""The examination of a cluster: runs its stages in order and prints the report, even if a stage fails or hangs."""

import contextlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import torch.distributed as dist

from common.console import say
from common.doctor import diagnosis, links, mesh, speed
from common.doctor.advice import advise
from common.doctor.alone import Alone, place
from common.doctor.board import LEAVE_SECONDS, Board
from common.doctor.finding import Finding, from_error
from common.doctor.report import Report, render
from common.errors import ExplainedError, RunError
from common.join import process_group
from common.join.process_group import Joined
from common.join.store import open_store
from common.join.waiting import limit
from common.launch import cli
from common.launch.layout import Worker
from common.launch.options import JoinOptions
from common.launch.reading import count

LOOK_SECONDS = 12.0  # for a node or a rank to examine itself
JOIN_SPARE_SECONDS = 8.0  # beyond --join-timeout
SPARE_SECONDS = 2.0  # from the end of a wait to the limit of its stage
CONNECT_PART = 0.9  # of --timeout: at --timeout the join itself would end the process, without our report


@dataclass(frozen=True)
class Options:
    """What the doctor's flags say."""

    json: bool  # the report as JSON, not as text
    min_mbit: float  # per second, that a link must carry
    join: JoinOptions


def examine(worker: Worker, args: Namespace) -> None:
    """Examine this cluster and print the report. Every rank must call this.

    Raises RunError when something would break training.
    """
    options, output = Options(args.json, args.min_rate, cli.join_options(args)), sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        examination = Examination(worker, options, output)
        examination.run()
        examination.conclude()


class Examination:
    """One rank's part of it. `report` grows from stage to stage, so that it can be shown whenever a stage fails."""

    def __init__(self, worker: Worker, options: Options, output: TextIO):
        self.worker, self.options, self.output, self.here = worker, options, output, place(worker)
        self.speaks = worker.local_rank == 0  # one rank of each node looks at the node, tests its links and prints
        self.report = Report(worker.layout)
        self.board: Board | None = None  # once the ranks have joined
        self.places: dict[int, str] = {}  # rank -> node, once the ranks have joined

    def run(self) -> None:
        """Run the stages. Stop where one makes the next impossible."""
        try:
            self._run_stages()
        except RuntimeError as error:
            if not self.board:
                raise
            lost = from_error(self.here, error).problem
            fix = "see the log of rank 0: is it alive, and does the link to its node work?"
            self._find_error(f"lost contact with rank 0: {lost}", fix)

    def _find_error(self, problem: str, fix: str) -> None:
        self.report.findings.append(Finding("error", self.here, problem, fix))

    def _run_stages(self) -> None:
        with self._stage("looking at this node", LOOK_SECONDS):
            mine = Alone(self.worker, self.options.join)
            self.report.nodes, self.report.backend = [mine.facts] if mine.facts else [], mine.backend
        with self._stage("joining", self.options.join.join_timeout_seconds + JOIN_SPARE_SECONDS):
            joined = self._join(mine)
        if joined is None:
            return
        board = self.board = Board(self.worker.rank, self.worker.world_size, joined.store)
        self.places = {view["rank"]: f"node {view['node_rank']} ({view['host']})" for view in joined.views}
        with self._stage("looking at the ranks", 2 * LOOK_SECONDS):
            server = mesh.serve(joined, mine) if self.speaks else None
            usable = self._look_at_ranks(board, joined, mine)
        with self._stage("testing the links", mesh.RESULTS_SECONDS + SPARE_SECONDS):
            self._test_links(board, server)
        if usable and not board.silent and not any(link.get("error") for link in self.report.links):
            self._test_collectives(board, joined, mine)

    def _join(self, mine: Alone) -> Joined | None:
        """Join as the trainers do. On failure, add findings about the error and about this node, and return None."""
        try:
            opened = open_store(self.worker, mine.join)
            problem = self.worker.layout.problem
            return process_group.join(self.worker, mine.join, opened, mine.device, mine.backend, problem)
        except (ExplainedError, RuntimeError) as error:
            where = "joining" if getattr(error, "same_on_every_rank", False) else self.here
            self.report.findings += [*mine.findings, from_error(where, error)]
            for facts in self.report.nodes:
                self.report.findings += diagnosis.judge_node(self.here, facts, own_pids={os.getpid()})
            return None

    def _look_at_ranks(self, board: Board, joined: Joined, mine: Alone) -> bool:
        """Exchange what each rank and node has found. Returns whether every rank's device can be used."""
        posts = board.exchange("looking at the ranks", mine.measured(), LOOK_SECONDS).values()
        report, ranks = self.report, [post["rank"] for post in posts if post["rank"]]
        report.nodes = [post["facts"] for post in posts if post["facts"]]
        report.ranks = [{"place": self.places[rank["rank"]], **rank} for rank in ranks]
        report.findings += [Finding(**found) for post in posts for found in post["findings"]]
        for node in report.nodes:
            own_pids = {view["pid"] for view in joined.views if view["host"] == node["host"]}
            report.findings += diagnosis.judge_node(node["place"], node, own_pids)
        report.findings += diagnosis.judge_settings({node["place"]: node for node in report.nodes})
        report.findings += diagnosis.judge_ranks(self.places, ranks)
        return all(post["usable"] for post in posts)

    def _test_links(self, board: Board, server: links.Server | None) -> None:
        """The first rank of each node measures the node's links, and all ranks exchange the results."""
        nodes = {node["rank"]: node for node in self.report.nodes}
        deadline = time.monotonic() + mesh.RESULTS_SECONDS
        endpoints = {rank: node["endpoint"] for rank, node in nodes.items()}
        measured = mesh.measure(self.worker.rank, endpoints, board) if self.speaks else []
        posts = board.exchange("testing the links", measured, deadline - time.monotonic())
        if server:
            server.close()
        self.report.links = [link for post in posts.values() for link in post]
        self.report.findings += diagnosis.judge_links(self.places, nodes, self.report.links, self.options.min_mbit)

    def _test_collectives(self, board: Board, joined: Joined, mine: Alone) -> None:
        """Connect the ranks as the trainers do, time the all-reduce, and check its sum in bfloat16."""
        seconds = mine.join.timeout_seconds
        try:
            with self._stage("connecting the process group", CONNECT_PART * seconds):
                process_group.connect(self.worker, mine.join, mine.device, mine.backend, joined)
            with self._stage("all-reduce", speed.BUDGET_SECONDS + seconds + SPARE_SECONDS):
                result = speed.collectives(mine.device, self.worker.world_size)
        except (RuntimeError, ValueError) as error:
            result = {"bf16": None, "rows": [], "error": str(error).strip().splitlines()[0]}
        with self._stage("all-reduce", seconds + SPARE_SECONDS):
            posts = board.exchange("all-reduce", result, seconds)
            self.report.all_reduce = posts.get(0, result)["rows"]
            self.report.findings += diagnosis.judge_collectives(self.places, mine.backend, posts)
            if len(posts) == self.worker.world_size and not any(post["error"] for post in posts.values()):
                dist.destroy_process_group()

    def conclude(self) -> None:
        """Print the report. Raises RunError when there are errors."""
        self._show()
        if self.board:
            with limit(SPARE_SECONDS + LEAVE_SECONDS, self.worker.rank, "leaving"), contextlib.suppress(RuntimeError):
                self.board.leave()
        if errors := self.report.count_errors():
            raise RunError(f"not fit to train: {count(errors, 'error')}, named above", same_on_every_rank=True)

    def _show(self) -> None:
        if self.board:
            self.report.findings += self.board.findings(self.places)
        if not self.speaks:
            return
        self.report.advice = advise(self.report)
        if self.options.json:
            self.output.write(json.dumps(self.report.as_dict()) + "\n")
            self.output.flush()
        else:
            say(render(self.report.as_dict(), whole=self.worker.is_main or not self.board))

    @contextlib.contextmanager
    def _stage(self, stage: str, seconds: float) -> Iterator[None]:
        """Print the report and end this process if the body takes longer: on a cut link a store blocks for minutes."""

        def report_hang() -> None:
            silent = " and ".join(self.board.waiting_for if self.board else []) or "this rank"
            fix = "is that process alive, and does the link to it work? See the output of the other nodes"
            self._find_error(f"{stage} did not end: {silent} did not answer in time", fix)
            self._show()

        with limit(seconds, self.worker.rank, f"not fit to train, see above: {stage}", report_hang):
            yield
