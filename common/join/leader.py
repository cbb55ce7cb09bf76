"""Rank 0's part of the handshake: challenge every entry, compare the views of those that answer, decide once."""

import json
import secrets

import torch.distributed as dist

from common.console import say
from common.join.secret import is_sealed, seal
from common.join.view import claimed_twice, difference, node_of, place, ranges, read_view
from common.join.waiting import poll
from common.launch.layout import Worker

LINGER_SECONDS = 4.0  # rank 0 stays this long after a refusal, so that nodes that join late can read it
READ_SECONDS = 20.0  # and at most this long for those that have joined to read the verdict


class Leader:
    """What rank 0 does besides its own handshake; see handshake.py for the protocol."""

    def __init__(self, worker: Worker, store: dist.Store, view: dict, secret: bytes = b""):
        self.worker, self.store, self.view, self.secret = worker, store, view, secret
        self.token = secrets.token_hex(8)
        self.entries = self.answers = 0  # how many of each have been counted
        self.without_view: set[int] = set()  # entries without a view yet: the process may have died
        self.without_entry: set[int] = set()  # answers without an entry yet
        # entry -> view, as posted and read, not answered: may be from a run that died
        self.challenged: dict[int, tuple[str, dict]] = {}
        self.alive: dict[int, dict] = {}  # rank -> view
        self.heard_by = 0  # processes that have answered: all of them read the verdict
        self.expected = worker.world_size  # how many processes may join: the largest world size among their views
        self.given_up = 0  # how many ranks have ended and will not join
        self.decided = False
        self.posted_missing = ""

    def advance(self) -> None:
        """Process new entries and answers. Decide when all ranks have joined or something is wrong."""
        self._challenge_new_entries()
        self._admit_new_answers()
        if len(self.alive) == self.worker.world_size:
            self.decide()
        elif (missing := self.missing()) != self.posted_missing:
            self.posted_missing = missing
            self.store.set("missing", missing)

    def _challenge_new_entries(self) -> None:
        entries = self.store.add("entries", 0)
        self.without_view |= set(range(self.entries + 1, entries + 1))
        self.entries = entries
        for entry in sorted(self.without_view):
            if self.store.check([f"{entry}/view"]):
                self.without_view.remove(entry)
                posted = self.store.get(f"{entry}/view").decode(errors="replace")
                if view := read_view(posted):
                    self.challenged[entry] = posted, view
                    self.store.set(f"{entry}/challenge", self.token)
                else:
                    say("something that is not a rank of this code has written into the store: ignored", rank=0)

    def _admit_new_answers(self) -> None:
        answers = self.store.add(f"{self.token}/answers", 0)
        self.without_entry |= set(range(self.answers + 1, answers + 1))
        self.answers = answers
        for answer in sorted(self.without_entry):
            if self.store.check([f"{self.token}/answer/{answer}"]):
                self.without_entry.remove(answer)
                content = self.store.get(f"{self.token}/answer/{answer}").decode(errors="replace")
                entry, _, code = content.partition(" ")
                known = int(entry) if entry.isascii() and entry.isdigit() and len(entry) < 9 else -1
                if known not in self.challenged:  # not of this code, or answered twice
                    continue
                posted, view = self.challenged[known]
                if not is_sealed(self.secret, code, self.token, entry, posted):
                    say(f"{place(view)} has another secret than this rank (--secret-file): not let in", rank=0)
                    self.store.set(f"{entry}/refused", "secret")
                    continue
                del self.challenged[known]
                self.heard_by += 1
                self.expected = max(self.expected, int(view["layout"]["world size"]))
                self._admit(view)

    def _admit(self, view: dict) -> None:
        # Report rank 0's own problem first, so that the message does not depend on the order of arrival.
        troubled = next((one for one in (self.view, view) if one["problem"]), None)
        problem = troubled and f"{place(troubled)}: {troubled['problem']}"
        problem = problem or difference(self.view, view)
        if not problem and view["rank"] in self.alive:
            problem = claimed_twice(self.alive[view["rank"]], view)
        problem = problem or self._same_gpu(view)
        if problem:
            self.decide(problem)
        self.alive.setdefault(view["rank"], view)

    def _same_gpu(self, view: dict) -> str:
        """A message if another rank has the same GPU, which NCCL's own error would not say; else empty."""
        for other in self.alive.values():
            if view["gpu"] and view["gpu"] == other["gpu"] and view["rank"] != other["rank"]:
                return (
                    f"{place(other)} and {place(view)} have the same GPU, {view['device']}, {view['gpu']}: "
                    "give each rank its own (CUDA_VISIBLE_DEVICES, --device-id), or share it with --oversubscribe"
                )
        return ""

    def absent(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(self.worker.world_size) if rank not in self.alive]

    def give_up(self, ended: list[int]) -> None:
        """Let nobody wait for these ranks, which have ended."""
        if ended:
            self.given_up = len(ended)
            self.decide(f"rank{'s' * (len(ended) > 1)} {ranges(ended)} ended while the ranks joined", missing=True)

    def missing(self) -> str:
        """The ranks that have not joined, by node where the layout is known: 'node 1 (ranks 8 to 9)'."""
        absent = self.absent()
        sizes = self.worker.layout.gpus_per_node
        if sizes is None:
            return f"rank{'s' * (len(absent) > 1)} {ranges(absent)} of {self.worker.world_size}"
        nodes = []
        for node, size in enumerate(sizes):
            first = sum(sizes[:node])
            here = [rank for rank in absent if first <= rank < first + size]
            if here:
                nodes.append(f"node {node} (rank{'s' * (len(here) > 1)} {ranges(here)})")
        return " and ".join(nodes) or "the last answers"

    def decide(self, problem: str | None = None, missing: bool = False) -> None:
        """Post the verdict: go on, or the problem. Only the first call counts."""
        if self.decided:
            return
        self.decided = True
        verdict: dict = {"problem": problem, "missing": missing}
        if not problem:
            verdict["views"] = [self.alive[rank] for rank in range(self.worker.world_size)]
            reached = (view["addresses"]["master"] for view in verdict["views"] if node_of(view) != node_of(self.view))
            verdict["master"] = next(filter(None, reached), "")
            places = {rank: f"{view['host']} (pid {view['pid']})" for rank, view in self.alive.items()}
            self.store.set("closed", json.dumps(places))
        content = json.dumps(verdict)
        self.store.set(f"{self.token}/verdict", f"{seal(self.secret, self.token, content)} {content}")

    def linger(self, verdict: dict) -> None:
        """Wait a limited time until all have read the verdict; after a refusal also for those still to join."""

        def all_have_joined() -> bool:
            self.advance()
            return self.heard_by >= self.expected - self.given_up

        if verdict["problem"]:
            poll(all_have_joined, LINGER_SECONDS)
        poll(lambda: self.store.add(f"{self.token}/heard", 0) >= self.heard_by, READ_SECONDS)
