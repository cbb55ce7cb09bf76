"""From facts to findings: what would break training, what may disturb it, and how to mend it.

Pure functions of plain dictionaries (see node_facts.py, link_test.py, speed_test.py), so that every rule is
tested without the hardware that it is about.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from common.errors import UserError

LEAST_DISK_GB, LITTLE_DISK_GB = 0.5, 5.0
LITTLE_SHARED_MEMORY_GB = 0.5  # Docker's default is 0.064
LITTLE_FREE_GPU_MEMORY = 0.5
LARGE_CLOCK_DIFFERENCE_MS = 1000.0
LARGE_SPEED_DIFFERENCE = 1.3
FEW_OPEN_FILES = 1024
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LINK_CLASSES_MBIT = (10, 100, 1000, 2500, 5000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000, 400_000)
BERT_BASE_GRADIENT_BYTES = 440e6  # 110 million parameters in float32


@dataclass(frozen=True)
class Finding:
    """Something that a person should know, where it is, and what to do about it."""

    level: str  # "error": training would break; "warning": it may be slow or disturbed
    where: str
    problem: str
    mend: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def from_error(where: str, error: BaseException) -> Finding:
    """Our errors end in ': how to mend it'."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, UserError):
        return Finding("error", where, text.splitlines()[0], "see the message; it comes from torch or the driver")
    problem, found, mend = text.rpartition(": ")
    return Finding("error", where, problem, mend) if found else Finding("error", where, text, "see the message")


def judge_interfaces(
    where: str, flag: str | None, environ: Mapping[str, str], addresses: Mapping[str, list[str]], nodes: int
) -> list[Finding]:
    """The interface that the user named, by flag or variable: it must be there, and lead out of this machine."""
    named = {"--interface": flag, **{variable: environ.get(variable) for variable in INTERFACE_VARIABLES}}
    usable = [name for name in addresses if not _only_loopback(addresses[name])]
    mend = f"name one of {', '.join(usable) or 'none: this node has no network'}, or leave it out"
    findings = []
    for source, value in named.items():
        if not value or (source == "NCCL_SOCKET_IFNAME" and value[0] in "^="):
            continue
        known = [name for name in addresses if name == value or (source.startswith("NCCL") and name.startswith(value))]
        if not known and "," not in value:
            findings.append(Finding("error", where, f"{source} is {value}, which is no interface here", mend))
        elif nodes > 1 and known and all(_only_loopback(addresses[name]) for name in known):
            findings.append(Finding("error", where, f"{source} is {value}, which reaches this machine only", mend))
    return findings


def judge_network(where: str, addresses: Mapping[str, list[str]], nodes: int) -> list[Finding]:
    """A job of several nodes needs a network: `addresses` is interface -> its addresses, for those that are up."""
    if nodes == 1 or any(not _only_loopback(own) for own in addresses.values()):
        return []
    mend = "see `ip address`: bring an interface up, or plug the cable in"
    return [Finding("error", where, "no network interface is up", mend)]


def _only_loopback(addresses: list[str]) -> bool:
    return not any(address for address in addresses if address != "::1" and not address.startswith(("127.", "fe80")))


def judge_node(where: str, facts: dict, own_pids: set[int]) -> list[Finding]:
    """One node's disk, memory, settings and GPUs."""
    findings = []

    def find(level: str, problem: str, mend: str) -> None:
        findings.append(Finding(level, where, problem, mend))

    if facts["settings"].get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        find("error", "TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes", "unset it")
    if facts["settings"].get("CUDA_LAUNCH_BLOCKING") == "1":
        find("warning", "CUDA_LAUNCH_BLOCKING is 1, which makes every kernel wait", "unset it, except to debug")
    disk = facts["disk"]
    if disk["free_gb"] < LITTLE_DISK_GB:
        level = "error" if disk["free_gb"] < LEAST_DISK_GB else "warning"
        find(level, f"{disk['path']} has {disk['free_gb']:.2f} GB free", "make room, or write elsewhere with --out-dir")
    shm = facts["shm"]
    if shm and shm["free_gb"] < LITTLE_SHARED_MEMORY_GB:
        shown = f"/dev/shm has {shm['free_gb']:.2f} of {shm['total_gb']:.2f} GB free: NCCL and data loaders need it"
        find("warning", shown, "start the container with --ipc=host or --shm-size=8g, or remove old files there")
    if facts["open_files"] and facts["open_files"] < FEW_OPEN_FILES:
        find("warning", f"a process may open {facts['open_files']} files only", "ulimit -n 65536")
    for gpu in facts["gpus"]:
        if gpu["memory_gb"] is None:
            find("error", f"GPU {gpu['index']} is {gpu['name']}", "see `nvidia-smi` and `dmesg`; reboot the node")
    if facts["driver"] and not facts["gpus"] and facts["cuda"]:
        visible = facts["settings"].get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            shown = f"driver {facts['driver']} is there, but CUDA {facts['cuda']} of torch sees no GPU"
            find("error", shown, "install a torch built for this driver (see `nvidia-smi`), or update the driver")
    for process in facts["gpu_processes"]:
        if process["pid"] not in own_pids:
            held = f" with {process['memory_mb']} MB" if process["memory_mb"] is not None else ""
            shown = f"process {process['pid']} ({process['name']}) is on a GPU{held}"
            find("warning", shown, f"is it left over? then: kill {process['pid']}")
    return findings


def judge_settings(nodes: dict[str, dict]) -> list[Finding]:
    """Settings of the communication libraries that differ between nodes; `nodes` is name -> facts."""
    findings = []
    (first, reference), *others = nodes.items()
    for where, facts in others:
        for name in sorted(reference["settings"].keys() | facts["settings"].keys()):
            here, there = (node["settings"].get(name, "not set") for node in (facts, reference))
            differs = here != there and name.startswith(("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_"))
            if differs and name not in INTERFACE_VARIABLES:
                problem = f"{name} is {here}, but on {first} it is {there}"
                findings.append(Finding("warning", where, problem, "set it the same everywhere, or nowhere"))
    return findings


def judge_ranks(places: dict[int, str], ranks: list[dict]) -> list[Finding]:
    """bfloat16, free memory and speed of every rank; `places` is rank -> where it is."""
    findings = []
    for rank in ranks:
        where = f"rank {rank['rank']}, {places[rank['rank']]}"
        if rank["bf16"] != "ok":
            findings.append(
                Finding("error", where, f"bfloat16: {rank['bf16']}", "use --precision fp32, or leave this GPU out")
            )
        if rank["memory_gb"] and rank["free_gb"] < LITTLE_FREE_GPU_MEMORY * rank["memory_gb"]:
            shown = f"{rank['free_gb']} of {rank['memory_gb']} GB are free on {rank['device']}"
            findings.append(Finding("warning", where, shown, "see `nvidia-smi` for the process that holds the rest"))
    speeds = [rank["fp32_tflops"] for rank in ranks]
    if speeds and max(speeds) > LARGE_SPEED_DIFFERENCE * min(speeds):
        shares = ",".join(f"{speed / min(speeds):.1f}".removesuffix(".0") for speed in speeds)
        slowest = min(ranks, key=lambda rank: rank["fp32_tflops"])
        times = max(speeds) / min(speeds)
        problem = f"is the slowest, {times:.1f} times slower than the fastest; the others would wait for it"
        where = f"rank {slowest['rank']}, {places[slowest['rank']]}"
        findings.append(Finding("warning", where, problem, f"give each rank its share: --shares {shares}"))
    return findings


def judge_links(names: dict[int, str], nodes: dict[int, dict], links: list[dict], least_mbit: float) -> list[Finding]:
    """Each way between two nodes. `names` and `nodes` are by node number; a link has from, to and measure()'s keys."""
    findings = []
    for link in links:
        where = f"{names[link['from']]} -> {names[link['to']]}"
        if link.get("error"):
            findings.append(_broken_link(where, nodes[link["to"]], names[link["to"]], link))
            continue
        rate = link["mbit_per_second"]
        if rate < least_mbit:
            seconds = BERT_BASE_GRADIENT_BYTES * 8 / (rate * 1e6)
            problem = (
                f"a {link_class(rate)} link: it carries {rate:.0f} Mbit/s, where training wants {least_mbit:.0f} "
                f"(BERT-base's gradients alone would take {seconds:.0f} s a step)"
            )
            mend = f"{_faster_interface(nodes[link['to']])}see `ethtool` for the negotiated speed, cable and switch"
            findings.append(Finding("error", where, problem, mend))
        if abs(link["clock_ms"]) > LARGE_CLOCK_DIFFERENCE_MS and link["from"] < link["to"]:
            problem = f"the clocks differ by {abs(link['clock_ms']) / 1e3:.1f} s: logs and file times will mislead"
            findings.append(Finding("warning", where, problem, "set them by NTP: timedatectl set-ntp true"))
    return findings


def _broken_link(where: str, target: dict, name: str, link: dict) -> Finding:
    way = target["way"]
    problem = f"cannot connect to {way['address']} (interface {way['interface']}) port {link['port']}: {link['error']}"
    if way["to_master"] and way["to_master"] != way["interface"]:
        right = way["to_master"]
        mend = f"on {name} the nodes have met over {right}: use --interface {right}, or leave it out"
    else:
        mend = f"let all TCP ports through between the nodes (firewall of {name}), or name another --interface there"
    return Finding("error", where, problem, mend)


def _faster_interface(facts: dict) -> str:
    """A hint where this node has an interface whose driver says that it is faster."""
    mine = facts["way"]["interface"]
    speeds = {entry["name"]: entry["mbit_per_second"] or 0 for entry in facts["interfaces"]}
    better = [name for name, speed in speeds.items() if name != mine and speed > max(speeds.get(mine, 0), 100)]
    return f"use --interface {better[0]} ({speeds[better[0]]} Mbit/s); " if better else ""


def link_class(mbit_per_second: float) -> str:
    """The kind of line that carries this: TCP gets 85 to 100 % of it. "slow" where it is like none."""
    fits = (size for size in LINK_CLASSES_MBIT if 0.6 * size <= mbit_per_second <= 1.05 * size)
    size = next(fits, None)
    if size is None:
        return "slow"
    return f"{size} Mbit" if size < 1000 else f"{size / 1000:g} Gbit"
