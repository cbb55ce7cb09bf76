"""The rules: from facts to findings.

Pure functions of plain dictionaries (see node.py, mesh.py, speed.py), so that every rule is tested without the
hardware that it is about.
"""

from collections.abc import Mapping

from common.doctor.finding import Finding
from common.join.interfaces import VARIABLES, only_loopback

LEAST_DISK_GB, LITTLE_DISK_GB = 0.5, 5.0
LITTLE_SHARED_MEMORY_GB = 0.5  # Docker's default is 0.064
LITTLE_FREE_GPU_MEMORY = 0.5
LARGE_CLOCK_DIFFERENCE_MS = 1000.0
LARGE_SPEED_DIFFERENCE = 1.3
FEW_OPEN_FILES = 1024
LINK_CLASSES_MBIT = (10, 100, 1000, 2500, 5000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000, 400_000)
BERT_BASE_GRADIENT_BYTES = 440e6  # 110 million parameters in float32


def judge_network(where: str, addresses: Mapping[str, list[str]], nodes: int) -> list[Finding]:
    """A job of several nodes needs a network. `addresses` is interface -> its addresses, for interfaces
    that are up."""
    if nodes == 1 or any(not only_loopback(own) for own in addresses.values()):
        return []
    fix = "see `ip address`: bring an interface up, or plug the cable in"
    return [Finding("error", where, "no network interface is up", fix)]


def judge_node(where: str, facts: dict, own_pids: set[int]) -> list[Finding]:
    """One node's disk, memory, settings and GPUs. `own_pids` are the processes of this job."""
    findings = []

    def find(level: str, problem: str, fix: str) -> None:
        findings.append(Finding(level, where, problem, fix))

    if facts["settings"].get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        find("error", "TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes", "unset it")
    if facts["settings"].get("CUDA_LAUNCH_BLOCKING") == "1":
        find("warning", "CUDA_LAUNCH_BLOCKING is 1, so the CPU waits for every kernel", "unset it, except to debug")
    disk = facts["disk"]
    if disk["free_gb"] < LITTLE_DISK_GB:
        level = "error" if disk["free_gb"] < LEAST_DISK_GB else "warning"
        find(level, f"{disk['path']} has {disk['free_gb']:.2f} GB free", "make room, or write elsewhere with --out-dir")
    shm = facts["shm"]
    if shm and shm["free_gb"] < LITTLE_SHARED_MEMORY_GB:
        shown = f"/dev/shm has {shm['free_gb']:.2f} of {shm['total_gb']:.2f} GB free: NCCL and data loaders need it"
        find("warning", shown, "start the container with --ipc=host or --shm-size=8g, or remove old files there")
    if facts["open_files"] and facts["open_files"] < FEW_OPEN_FILES:
        find("warning", f"a process may open only {facts['open_files']} files", "ulimit -n 65536")
    for gpu in facts["gpus"]:
        if gpu["memory_gb"] is None:
            find("error", f"GPU {gpu['index']} is {gpu['name']}", "see `nvidia-smi` and `dmesg`; reboot the node")
    if facts["driver"] and not facts["gpus"] and facts["cuda"]:
        visible = facts["settings"].get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            shown = f"driver {facts['driver']} is installed, but CUDA {facts['cuda']} of torch sees no GPU"
            find("error", shown, "install a torch built for this driver (see `nvidia-smi`), or update the driver")
    for process in facts["gpu_processes"]:
        if process["pid"] not in own_pids:
            held = f" with {process['memory_mb']} MB" if process["memory_mb"] is not None else ""
            shown = f"process {process['pid']} ({process['name']}) is on a GPU{held}"
            find("warning", shown, f"if a dead job has left it behind: kill {process['pid']}")
    return findings


def judge_settings(nodes: dict[str, dict]) -> list[Finding]:
    """Settings of the communication libraries that differ between nodes; `nodes` is name -> facts."""
    findings = []
    (first, reference), *others = nodes.items()
    for where, facts in others:
        for name in sorted(reference["settings"].keys() | facts["settings"].keys()):
            here, there = (node["settings"].get(name, "not set") for node in (facts, reference))
            differs = here != there and name.startswith(("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_"))
            if differs and name not in VARIABLES.values():
                problem = f"{name} is {here}, but on {first} it is {there}"
                findings.append(
                    Finding("warning", where, problem, "set it to the same value on every node, or on none")
                )
    return findings


def judge_ranks(places: dict[int, str], ranks: list[dict]) -> list[Finding]:
    """bfloat16, free memory and speed of every rank. `places` is rank -> its node."""
    findings = []
    for rank in ranks:
        where = f"rank {rank['rank']}, {places[rank['rank']]}"
        if rank["bf16"] != "ok":
            findings.append(
                Finding("error", where, f"bfloat16: {rank['bf16']}", "use --precision fp32, or train without this GPU")
            )
        if rank["memory_gb"] and rank["free_gb"] < LITTLE_FREE_GPU_MEMORY * rank["memory_gb"]:
            shown = f"{rank['free_gb']} of {rank['memory_gb']} GB are free on {rank['device']}"
            findings.append(Finding("warning", where, shown, "see `nvidia-smi` for the process that uses the rest"))
    speeds = [rank["fp32_tflops"] for rank in ranks]
    if speeds and max(speeds) > LARGE_SPEED_DIFFERENCE * min(speeds):
        shares = ",".join(f"{speed / min(speeds):.1f}".removesuffix(".0") for speed in speeds)
        slowest = min(ranks, key=lambda rank: rank["fp32_tflops"])
        times = max(speeds) / min(speeds)
        problem = f"is the slowest, {times:.1f} times slower than the fastest; the others would wait for it"
        where = f"rank {slowest['rank']}, {places[slowest['rank']]}"
        findings.append(Finding("warning", where, problem, f"give each rank its share: --shares {shares}"))
    return findings


def judge_collectives(places: dict[int, str], backend: str, results: dict[int, dict]) -> list[Finding]:
    """The all-reduce through the backend of training. `results` is rank -> what `speed.collectives` returns."""
    findings = []
    for rank, result in results.items():
        where = f"rank {rank}, {places[rank]}"
        if result["error"]:
            fix = "see the other findings; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=INFO say more"
            findings.append(Finding("error", where, f"{backend} failed: {result['error']}", fix))
        elif result["bf16"] != "ok":
            problem = f"all-reduce in bfloat16: {result['bf16']}"
            findings.append(Finding("error", where, problem, "train without the bf16 communication hook"))
    return findings


def judge_links(names: dict[int, str], nodes: dict[int, dict], links: list[dict], min_mbit: float) -> list[Finding]:
    """Each direction of each link, as `mesh.measure` returns them. `names` (rank -> node) and `nodes` (rank -> facts)
    hold the first rank of each node."""
    findings = []
    for link in links:
        where = f"{names[link['from']]} -> {names[link['to']]}"
        rate = link.get("mbit_per_second")
        if link.get("error"):
            findings.append(_broken_link(where, nodes[link["to"]], names[link["to"]], link))
            continue
        if rate is not None and rate < min_mbit:
            seconds = BERT_BASE_GRADIENT_BYTES * 8 / (rate * 1e6)
            problem = (
                f"a {link_class(rate)} link: it carries {rate:.0f} Mbit/s, but training needs {min_mbit:.0f} "
                f"(BERT-base's gradients alone would take {seconds:.0f} s a step)"
            )
            fix = f"{_faster_interface(nodes[link['to']])}see `ethtool` for the negotiated speed, cable and switch"
            findings.append(Finding("error", where, problem, fix))
        if abs(link["clock_ms"]) > LARGE_CLOCK_DIFFERENCE_MS and link["from"] < link["to"]:
            problem = f"the clocks differ by {abs(link['clock_ms']) / 1e3:.1f} s: logs and file times will mislead"
            findings.append(Finding("warning", where, problem, "set them by NTP: timedatectl set-ntp true"))
    return findings


def _broken_link(where: str, target: dict, name: str, link: dict) -> Finding:
    endpoint = target["endpoint"]
    address, interface, met_on = endpoint["address"], endpoint["interface"], endpoint["met_on"]
    failed = "lost the connection to" if "latency_ms" in link else "cannot connect to"
    problem = f"{failed} {address} (interface {interface}) port {link['port']}: {link['error']}"
    if "latency_ms" in link:
        fix = f"is {name} alive? Then see `ip address` and `ethtool -S` there, its cable and its switch"
    elif met_on and met_on != interface:
        fix = f"on {name}, use --interface {met_on}, over which the nodes have met, or leave it out"
    else:
        fix = f"let all TCP ports through between the nodes (firewall of {name}), or name another --interface there"
    return Finding("error", where, problem, fix)


def _faster_interface(facts: dict) -> str:
    """A hint where this node has an interface whose driver reports a higher speed."""
    used = facts["endpoint"]["interface"]
    speeds = {entry["name"]: entry["mbit_per_second"] or 0 for entry in facts["interfaces"]}
    faster = [name for name, speed in speeds.items() if name != used and speed > max(speeds.get(used, 0), 100)]
    return f"use --interface {faster[0]} ({speeds[faster[0]]} Mbit/s); " if faster else ""


def link_class(mbit_per_second: float) -> str:
    """The class of Ethernet that carries this rate: TCP gets 85 to 100 % of it. "slow" where no class fits."""
    fits = (size for size in LINK_CLASSES_MBIT if 0.6 * size <= mbit_per_second <= 1.05 * size)
    size = next(fits, None)
    if size is None:
        return "slow"
    return f"{size} Mbit" if size < 1000 else f"{size / 1000:g} Gbit"
