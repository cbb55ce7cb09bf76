"""`Layout`: one node's view of the job. `Worker`: one process's place in it. Both are the same for any launcher."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """One node's view of the job: how many processes there are, which of them run here, where they meet."""

    source: str  # flags or launcher that gave it, for the log: such as "-n 2 -g 8,2 -i 0" or "torchrun"
    world_size: int  # processes in the whole job
    first_rank: int  # of the processes that this command runs
    local_world_size: int  # processes on this node
    first_local_rank: int = 0
    node_rank: int = 0
    nodes: int = 1  # 0 where the launcher does not say
    gpus_per_node: tuple[int, ...] | None = None  # (8, 2); None where the launcher does not say
    spawn: bool = True  # start local_world_size processes; False: this process is the only worker here
    launched: bool = False  # an outer launcher has started this process, which is one of its workers and ends with it
    one_terminal: bool = False  # the launcher shows the lines of all nodes in one place
    init_method: str = ""  # tcp://host:port or file:///path
    meeting: tuple[str, str] = ("--master-addr", "--master-port")  # who gave host and port, for messages
    problem: str = ""  # an error that only this node can see: the join reports it on every node, so that none waits
    hosts_store: bool = True  # rank 0 serves the store; False: the launcher does
    device_type: str = "cpu"  # cuda or cpu
    first_device: int = 0  # device index of the first worker here
    devices: int = 0  # devices that this node may use; workers share them under --oversubscribe
    # Of a machine that joins a run under way (--join): a name of this launch, where the rank that leads the run is, and
    # how many processes the run was started with.
    joins: str = ""
    leader: str = ""
    run_size: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.first_rank < self.world_size, self
        assert 1 <= self.local_world_size <= self.world_size, self
        assert self.gpus_per_node is None or sum(self.gpus_per_node) == self.world_size, self

    @property
    def meets_at_file(self) -> bool:
        return self.init_method.startswith("file://")

    def workers(self) -> list["Worker"]:
        """The workers that this command runs: all of the node's, or just this process."""
        return [self._worker(index) for index in range(self.local_world_size if self.spawn else 1)]

    def _worker(self, index: int) -> "Worker":
        device = self.first_device + index
        return Worker(
            layout=self,
            rank=self.first_rank + index,
            local_rank=self.first_local_rank + index,
            device_index=device % self.devices if self.devices else 0,
        )


@dataclass(frozen=True)
class Worker:
    """One process's place in the job. Read `rank` from here; never compute it again."""

    layout: Layout
    rank: int
    local_rank: int
    device_index: int
    membership: Any = None  # of a rank that goes on after a change of the members (--elastic)
    originals: tuple[int, ...] = ()  # for each rank that goes on, its rank as the launcher has placed it
    board: Any = None  # what the workers of this node and their supervisor tell each other
    predecessor: str = ""  # how the process has ended that this one replaces

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def run_size(self) -> int:
        """How many processes the run was started with."""
        return self.layout.run_size or self.layout.world_size

    @property
    def local_world_size(self) -> int:
        return self.layout.local_world_size

    @property
    def node_rank(self) -> int:
        return self.layout.node_rank

    @property
    def device_type(self) -> str:
        return self.layout.device_type

    @property
    def is_main(self) -> bool:
        """True on one process of the whole job. (`local_rank == 0` is true once on every node.)"""
        return self.rank == 0
