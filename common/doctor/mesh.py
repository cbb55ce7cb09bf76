"""The links between all nodes, measured so that no two measurements share a direction of a node's network card."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from common.doctor.alone import Alone, place
from common.doctor.board import Board
from common.doctor.finding import Finding
from common.doctor.links import ANSWER_SECONDS, Connection, Server, reason
from common.join import network
from common.join.process_group import Joined
from common.launch.layout import Worker

RATE_SECONDS = 0.4  # of data, for one direction of one link; less where there are many nodes
ALL_RATES_SECONDS = 5.0
MEASURE_SECONDS = 8.0  # after which no measurement begins
RESULTS_SECONDS = MEASURE_SECONDS + ANSWER_SECONDS  # after which every node has its results
MOST_THREADS = 64


def serve(worker: Worker, joined: Joined, mine: Alone) -> Server | None:
    """Start this node's link test server at the address that gloo and NCCL will use, and note it in `mine.facts`.

    On failure, add a finding and return None.
    """
    endpoint = mine.facts["endpoint"] = _endpoint(worker, joined)
    address, interface = endpoint["address"], endpoint["interface"]
    try:
        server = Server(address)
    except OSError as error:
        problem = f"cannot listen at {address} (interface {interface}): {error.strerror or error}"
        mine.findings.append(Finding("error", place(worker), problem, "see `ip address`, or name another --interface"))
        return None
    endpoint |= {"port": server.port, "identity": server.identity}
    return server


def _endpoint(worker: Worker, joined: Joined) -> dict:
    """The address and interface that gloo will take here, and the interface on which the nodes have met."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or network.interface_of(joined.own_address)
    here = network.local_addresses().get(interface or "", [])
    address = joined.own_address if joined.own_address in here or not interface else network.own_address(interface)
    from_other_nodes = [view["addresses"]["master"] for view in joined.views if view["node_rank"] != worker.node_rank]
    met_at = next(filter(None, from_other_nodes), joined.own_address) if worker.is_main else joined.own_address
    return {"address": address, "interface": interface, "met_on": network.interface_of(met_at)}


def measure(rank: int, endpoints: dict[int, dict], board: Board) -> list[dict]:
    """This node's links to the others. `endpoints` is by the first rank of each node; each of these must call this.

    A link has from, to, port, latency_ms, clock_ms (their clock minus ours) and mbit_per_second, which is None where
    the time did not suffice; or from, to, port and error.

    In round k every node sends to the k-th node after it, as in a ring all-reduce: each sends to one and receives
    from one. Latencies come before, while no link is loaded, and from all links at once, so that several timeouts
    take no longer than one.
    """
    until = time.monotonic() + MEASURE_SECONDS
    links = {other: {"from": rank, "to": other, "port": endpoints[other].get("port")} for other in endpoints}
    del links[rank]
    connections: dict[int, Connection] = {}
    with ThreadPoolExecutor(max_workers=MOST_THREADS) as pool:
        list(pool.map(lambda other: _connect(endpoints[other], links[other], connections, other), links))
    nodes = sorted(endpoints)
    board.barrier("connecting to the other nodes", nodes, MEASURE_SECONDS)
    seconds = min(RATE_SECONDS, ALL_RATES_SECONDS / max(1, len(links)))
    for distance in range(1, len(nodes)):
        other = nodes[(nodes.index(rank) + distance) % len(nodes)]
        if other in connections and time.monotonic() < until:
            _measure_rate(connections[other], links[other], seconds)
        board.barrier(f"testing the links, round {distance}", nodes, until - time.monotonic())
    for connection in connections.values():
        connection.close()
    return list(links.values())


def _connect(endpoint: dict, link: dict, connections: dict[int, Connection], other: int) -> None:
    if "port" not in endpoint:
        link["error"] = "it does not listen"
        return
    try:
        connection = Connection(endpoint["address"], endpoint["port"], endpoint["identity"])
        latency, ahead = connection.latency()
        connections[other] = connection
        link |= {"latency_ms": round(latency * 1e3, 4), "mbit_per_second": None, "clock_ms": round(ahead * 1e3, 2)}
    except OSError as error:
        link["error"] = reason(error)


def _measure_rate(connection: Connection, link: dict, seconds: float) -> None:
    try:
        link["mbit_per_second"] = round(connection.rate(seconds) / 1e6, 1)
    except OSError as error:
        link["error"] = reason(error)
