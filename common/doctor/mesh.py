"""The links between all nodes, measured so that no two measurements share a direction of a node's network card."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from common.doctor.alone import Alone
from common.doctor.board import Board
from common.doctor.finding import Finding
from common.doctor.links import ANSWER_SECONDS, Connection, Server, reason
from common.join import network
from common.join.process_group import Joined

RATE_SECONDS = 0.4  # of data, for one direction of one link; less where there are many nodes
ALL_RATES_SECONDS = 5.0
MEASURE_SECONDS = 8.0  # after which no measurement begins
RESULTS_SECONDS = MEASURE_SECONDS + ANSWER_SECONDS  # after which every node has its results
MOST_THREADS = 64


def serve(joined: Joined, mine: Alone) -> Server | None:
    """Start this node's link test server at the address that gloo and NCCL will use, and note it in `mine.facts`.

    On failure, add a finding and return None.
    """
    endpoint = mine.facts["endpoint"] = _endpoint(joined, mine)
    address, interface = endpoint["address"], endpoint["interface"]
    try:
        server = Server(address)
    except OSError as error:
        problem = f"cannot listen at {address} (interface {interface}): {error.strerror or error}"
        mine.findings.append(Finding("error", mine.place, problem, "see `ip address`, or name another --interface"))
        return None
    endpoint |= {"port": server.port, "identity": server.identity}
    return server


def _endpoint(joined: Joined, mine: Alone) -> dict:
    """The address and interface that gloo will take here, and the interface on which the nodes have met."""
    own, number = joined.own_address, mine.worker.node_rank
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or network.interface_of(own)
    here = network.local_addresses().get(interface or "", [])
    address = own if own in here or not interface else network.own_address(interface)
    from_others = [view["addresses"]["master"] for view in joined.views if view["node_rank"] != number]
    met_at = next(filter(None, from_others), own) if mine.worker.is_main else own
    return {"address": address, "interface": interface, "met_on": network.interface_of(met_at)}


def measure(rank: int, endpoints: dict[int, dict], board: Board) -> list[dict]:
    """This node's links to the others. `endpoints` is by the first rank of each node; each of these must call this.

    A link has from, to, port, latency_ms, clock_ms (their clock minus ours) and mbit_per_second, which is None where
    the time did not suffice; or from, to, port and error.

    In round k every node sends to the k-th node after it, as in a ring all-reduce: each sends to one and receives
    from one. Latencies come before, while no link is loaded, and from all links at once, so that several timeouts
    take no longer than one.
    """
    until, nodes = time.monotonic() + MEASURE_SECONDS, sorted(endpoints)
    others = [other for other in endpoints if other != rank]
    links = {other: {"from": rank, "to": other, "port": endpoints[other].get("port")} for other in others}
    with ThreadPoolExecutor(max_workers=MOST_THREADS) as pool:
        connections = dict(
            zip(others, pool.map(lambda other: _connect(endpoints[other], links[other]), others), strict=True)
        )
    board.barrier("connecting to the other nodes", nodes, MEASURE_SECONDS)
    seconds = min(RATE_SECONDS, ALL_RATES_SECONDS / max(1, len(links)))
    for distance in range(1, len(nodes)):
        other = nodes[(nodes.index(rank) + distance) % len(nodes)]
        if (connection := connections[other]) and time.monotonic() < until:
            try:
                links[other]["mbit_per_second"] = round(connection.rate(seconds) / 1e6, 1)
            except OSError as error:
                links[other]["error"] = reason(error)
        board.barrier(f"testing the links, round {distance}", nodes, until - time.monotonic())
    for connection in filter(None, connections.values()):
        connection.close()
    return list(links.values())


def _connect(endpoint: dict, link: dict) -> Connection | None:
    """Connect to that node and note the latency in `link`; or note the error and return None."""
    if "port" not in endpoint:
        link["error"] = "it does not listen"
        return None
    try:
        connection = Connection(endpoint["address"], endpoint["port"], endpoint["identity"])
        latency, ahead = connection.latency()
    except OSError as error:
        link["error"] = reason(error)
        return None
    link |= {"latency_ms": round(latency * 1e3, 4), "mbit_per_second": None, "clock_ms": round(ahead * 1e3, 2)}
    return connection
