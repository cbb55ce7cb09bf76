"""The rules: from facts to findings.

Pure functions of plain dictionaries (see node.py, mesh.py, speed.py), so that every rule is tested without the
hardware that it is about.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from common.doctor.finding import Finding, listed
from common.join.interfaces import VARIABLES, only_loopback

LEAST_DISK_GB, LITTLE_DISK_GB = 0.5, 5.0
LITTLE_SHARED_MEMORY_GB = 0.5  # Docker's default is 0.064
LITTLE_FREE_GPU_MEMORY = 0.5
LARGE_CLOCK_DIFFERENCE_MS = 1000.0
LARGE_SPEED_DIFFERENCE = 1.3
FEW_OPEN_FILES = 1024
LINK_CLASSES_MBIT = (10, 100, 1000, 2500, 5000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000, 400_000)
BERT_BASE_GRADIENT_BYTES = 440e6  # 110 million parameters in float32
LIBRARIES = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_")  # whose settings must not differ between nodes
_error, _warning = partial(Finding, "error"), partial(Finding, "warning")


@listed
def judge_network(where: str, addresses: Mapping[str, list[str]], nodes: int) -> Iterator[Finding]:
    """A job of several nodes needs a network. `addresses` is interface -> its addresses, for interfaces
    that are up."""
    if nodes > 1 and all(map(only_loopback, addresses.values())):
        yield _error(
            where, "no network interface is up", "see `ip address`: bring an interface up, or plug the cable in"
        )


@listed
def judge_node(where: str, facts: dict, own_pids: set[int]) -> Iterator[Finding]:
    """One node's disk, memory, settings and GPUs. `own_pids` are the processes of this job."""
    settings, disk, shm, files = (facts[name] for name in ("settings", "disk", "shm", "open_files"))
    if settings.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        yield _error(where, "TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes", "unset it")
    if settings.get("CUDA_LAUNCH_BLOCKING") == "1":
        problem = "CUDA_LAUNCH_BLOCKING is 1, so the CPU waits for every kernel"
        yield _warning(where, problem, "unset it, except to debug")
    if disk["free_gb"] < LITTLE_DISK_GB:
        problem = f"{disk['path']} has {disk['free_gb']:.2f} GB free"
        level = "error" if disk["free_gb"] < LEAST_DISK_GB else "warning"
        yield Finding(level, where, problem, "make room, or write elsewhere with --out-dir")
    if shm and shm["free_gb"] < LITTLE_SHARED_MEMORY_GB:
        problem = f"/dev/shm has {shm['free_gb']:.2f} of {shm['total_gb']:.2f} GB free: NCCL and data loaders need it"
        yield _warning(
            where, problem, "start the container with --ipc=host or --shm-size=8g, or remove old files there"
        )
    if files and files < FEW_OPEN_FILES:
        yield _warning(where, f"a process may open only {files} files", "ulimit -n 65536")
    for gpu in facts["gpus"]:
        if gpu["memory_gb"] is None:
            problem = f"GPU {gpu['index']} is {gpu['name']}"
            yield _error(where, problem, "see `nvidia-smi` and `dmesg`; reboot the node")
    if facts["driver"] and not facts["gpus"] and facts["cuda"] and "CUDA_VISIBLE_DEVICES" not in settings:
        problem = f"driver {facts['driver']} is installed, but CUDA {facts['cuda']} of torch sees no GPU"
        yield _error(where, problem, "install a torch built for this driver (see `nvidia-smi`), or update the driver")
    for process in facts["gpu_processes"]:
        if process["pid"] not in own_pids:
            held = f" with {process['memory_mb']} MB" if process["memory_mb"] is not None else ""
            problem = f"process {process['pid']} ({process['name']}) is on a GPU{held}"
            yield _warning(where, problem, f"if a dead job has left it behind: kill {process['pid']}")


@listed
def judge_settings(nodes: dict[str, dict]) -> Iterator[Finding]:
    """Settings of the communication libraries that differ between nodes; `nodes` is name -> facts."""
    (first, reference), *others = nodes.items()
    for where, facts in others:
        for name in sorted(reference["settings"].keys() | facts["settings"].keys()):
            here, there = (node["settings"].get(name, "not set") for node in (facts, reference))
            if here != there and name.startswith(LIBRARIES) and name not in VARIABLES.values():
                problem = f"{name} is {here}, but on {first} it is {there}"
                yield _warning(where, problem, "set it to the same value on every node, or on none")


@listed
def judge_ranks(places: dict[int, str], ranks: list[dict]) -> Iterator[Finding]:
    """bfloat16, free memory and speed of every rank. `places` is rank -> its node."""
    where = {rank["rank"]: f"rank {rank['rank']}, {places[rank['rank']]}" for rank in ranks}
    for rank in ranks:
        if rank["bf16"] != "ok":
            fix = "use --precision fp32, or train without this GPU"
            yield _error(where[rank["rank"]], f"bfloat16: {rank['bf16']}", fix)
        if rank["memory_gb"] and rank["free_gb"] < LITTLE_FREE_GPU_MEMORY * rank["memory_gb"]:
            problem = f"{rank['free_gb']} of {rank['memory_gb']} GB are free on {rank['device']}"
            yield _warning(where[rank["rank"]], problem, "see `nvidia-smi` for the process that uses the rest")
    speeds = {rank["rank"]: rank["fp32_tflops"] for rank in ranks}
    if speeds and max(speeds.values()) > LARGE_SPEED_DIFFERENCE * min(speeds.values()):
        slowest = min(speeds, key=speeds.__getitem__)
        shares = [speed / speeds[slowest] for speed in speeds.values()]
        problem = f"is the slowest, {max(shares):.1f} times slower than the fastest; the others would wait for it"
        shown = ",".join(f"{share:.1f}".removesuffix(".0") for share in shares)
        yield _warning(where[slowest], problem, f"give each rank its share: --shares {shown}")


@listed
def judge_collectives(places: dict[int, str], backend: str, results: dict[int, dict]) -> Iterator[Finding]:
    """The all-reduce through the backend of training. `results` is rank -> what `speed.collectives` returns."""
    for rank, result in results.items():
        where = f"rank {rank}, {places[rank]}"
        if result["error"]:
            fix = "see the other findings; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=INFO say more"
            yield _error(where, f"{backend} failed: {result['error']}", fix)
        elif result["bf16"] != "ok":
            problem = f"all-reduce in bfloat16: {result['bf16']}"
            yield _error(where, problem, "train without the bf16 communication hook")


@listed
def judge_links(names: dict[int, str], nodes: dict[int, dict], links: list[dict], min_mbit: float) -> Iterator[Finding]:
    """Each direction of each link, as `mesh.measure` returns them. `names` (rank -> node) and `nodes` (rank -> facts)
    hold the first rank of each node."""
    for link in links:
        where, rate = f"{names[link['from']]} -> {names[link['to']]}", link.get("mbit_per_second")
        if link.get("error"):
            yield _broken_link(where, nodes[link["to"]]["endpoint"], names[link["to"]], link)
            continue
        if rate is not None and rate < min_mbit:
            seconds = BERT_BASE_GRADIENT_BYTES * 8 / (rate * 1e6)
            problem = f"a {link_class(rate)} link: it carries {rate:.0f} Mbit/s, but training needs {min_mbit:.0f}"
            problem += f" (BERT-base's gradients alone would take {seconds:.0f} s a step)"
            fix = f"{_faster_interface(nodes[link['to']])}see `ethtool` for the negotiated speed, cable and switch"
            yield _error(where, problem, fix)
        if abs(link["clock_ms"]) > LARGE_CLOCK_DIFFERENCE_MS and link["from"] < link["to"]:
            problem = f"the clocks differ by {abs(link['clock_ms']) / 1e3:.1f} s: logs and file times will mislead"
            yield _warning(where, problem, "set them by NTP: timedatectl set-ntp true")


def _broken_link(where: str, endpoint: dict, name: str, link: dict) -> Finding:
    interface, met_on = endpoint["interface"], endpoint["met_on"]
    if "latency_ms" in link:
        fix = f"is {name} alive? Then see `ip address` and `ethtool -S` there, its cable and its switch"
    elif met_on and met_on != interface:
        fix = f"on {name}, use --interface {met_on}, over which the nodes have met, or leave it out"
    else:
        fix = f"let all TCP ports through between the nodes (firewall of {name}), or name another --interface there"
    failed = "lost the connection to" if "latency_ms" in link else "cannot connect to"
    problem = f"{failed} {endpoint['address']} (interface {interface}) port {link['port']}: {link['error']}"
    return _error(where, problem, fix)


def _faster_interface(facts: dict) -> str:
    """A hint where this node has an interface whose driver reports a higher speed."""
    used = facts["endpoint"]["interface"]
    speeds = {entry["name"]: entry["mbit_per_second"] or 0 for entry in facts["interfaces"]}
    faster = [name for name, speed in speeds.items() if name != used and speed > max(speeds.get(used, 0), 100)]
    return f"use --interface {faster[0]} ({speeds[faster[0]]} Mbit/s); " if faster else ""


def link_class(mbit_per_second: float) -> str:
    """The class of Ethernet that carries this rate: TCP gets 85 to 100 % of it. "slow" where no class fits."""
    size = next((size for size in LINK_CLASSES_MBIT if 0.6 * size <= mbit_per_second <= 1.05 * size), None)
    if size is None:
        return "slow"
    return f"{size} Mbit" if size < 1000 else f"{size / 1000:g} Gbit"
