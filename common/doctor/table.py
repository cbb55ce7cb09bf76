"""The report as text."""


def render(report: dict, whole: bool) -> str:
    """The report as text: with all tables, or with the findings alone."""
    parts = [_head(report)]
    if whole:
        parts += [_node(node, len(report["nodes"]) > 1) for node in report["nodes"]]
        parts += [_links(report), _ranks(report), _all_reduce(report)]
    else:
        parts.append("the tables are on node 0")
    parts.append(_findings(report))
    if whole and report["advice"]:
        parts.append(
            f"advice   {report['advice']}\n         for your own model: python -m common.predict --doctor FILE"
        )
    return "\n\n".join(filter(None, parts))


def _head(report: dict) -> str:
    layout = report["layout"]
    sizes = layout["gpus_per_node"]
    nodes = f" on {len(sizes)} node{'s' * (len(sizes) > 1)} ({','.join(map(str, sizes))})" if sizes else ""
    count = layout["world_size"]
    return f"doctor: {count} process{'es' * (count > 1)}{nodes}, from {layout['source']}, {layout.get('backend', '')}"


def _node(node: dict, several: bool) -> str:
    versions, shm, disk = node["versions"], node["shm"], node["disk"]
    nccl = f", NCCL {node['nccl']}" if node["nccl"] else ""
    cuda = f"CUDA {node['cuda']}{nccl}" if node["cuda"] else "without CUDA"
    lines = {
        "system": f"{node['system']}, {node['cores']} cores",
        "memory": f"{node['free_memory_gb']:.1f} of {node['memory_gb']:.1f} GB free",
        "software": f"Python {versions['python']}, torch {versions['torch']} ({cuda}), code {versions['code']}",
        "backends": ", ".join(node["backends"]),
        "driver": node["driver"] or "none",
        "GPUs": _gpus(node["gpus"]),
        "on GPUs": ", ".join(f"{entry['name']} (pid {entry['pid']})" for entry in node["gpu_processes"]) or "nothing",
        "network": _interfaces(node, several),
        "disk": f"{disk['free_gb']:.1f} GB free in {disk['path']}",
        "/dev/shm": f"{shm['free_gb']:.1f} of {shm['total_gb']:.1f} GB free" if shm else "none",
        "settings": " ".join(f"{name}={value}" for name, value in node["settings"].items()) or "none",
    }
    return "\n".join([node["place"], *(f"  {name:<10}{value}" for name, value in lines.items())])


def _gpus(gpus: list[dict]) -> str:
    names = [f"{gpu['name']} {gpu['memory_gb']} GB" if gpu["memory_gb"] else gpu["name"] for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none visible"


def _interfaces(node: dict, several: bool) -> str:
    endpoint = node.get("endpoint", {})
    shown = []
    for entry in node["interfaces"]:
        speed = f", {entry['mbit_per_second']} Mbit/s" if entry["mbit_per_second"] else ""
        used = ", reaches the others" if several and entry["name"] == endpoint.get("interface") else ""
        shown.append(f"{entry['name']} ({', '.join(entry['addresses']) or 'no address'}{speed}{used})")
    return "; ".join(shown)


def _links(report: dict) -> str:
    places = {rank["rank"]: rank["place"] for rank in report["ranks"]}
    rows: list[tuple[str, ...]] = [("link", "latency", "rate", "clocks differ by")]
    for link in report["links"]:
        ends = f"{places.get(link['from'], link['from'])} -> {places.get(link['to'], link['to'])}"
        if link.get("error"):
            rows.append((ends, link["error"], "", ""))
        else:
            rate, clock = link["mbit_per_second"], f"{link['clock_ms']:.1f} ms"
            rows.append((ends, f"{link['latency_ms']:.3f} ms", _rate(rate), clock))
    return _table(rows) if len(rows) > 1 else ""


def _rate(mbit_per_second: float | None) -> str:
    if mbit_per_second is None:
        return "not measured"
    return f"{mbit_per_second:.0f} Mbit/s" if mbit_per_second < 1000 else f"{mbit_per_second / 1e3:.1f} Gbit/s"


def _ranks(report: dict) -> str:
    rows: list[tuple[str, ...]] = [("rank", "where", "device", "memory free", "fp32", "bf16", "bf16 is")]
    for rank in report["ranks"]:
        memory = f"{rank['free_gb']} of {rank['memory_gb']} GB" if rank["memory_gb"] else "-"
        device = rank["name"] if rank["device"] == "cpu" else f"{rank['device']} {rank['name']}"
        speeds = [f"{rank[name]:.3f} TFLOP/s" if rank[name] else "-" for name in ("fp32_tflops", "bf16_tflops")]
        rows.append((str(rank["rank"]), rank["place"], device, memory, *speeds, rank["bf16"]))
    return _table(rows) if len(rows) > 1 else ""


def _all_reduce(report: dict) -> str:
    rows: list[tuple[str, ...]] = [("all-reduce", "time", "rate")]
    for row in report["all_reduce"]:
        if row["ms"] is None:
            rows.append((_size(row["bytes"]), "left out", f"would take about {row['expected_ms'] / 1e3:.0f} s"))
        else:
            rows.append((_size(row["bytes"]), f"{row['ms']:.3f} ms", f"{row['gb_per_second']:.3g} GB/s"))
    return _table(rows) if len(rows) > 1 else ""


def _size(size: int) -> str:
    for unit in ("B", "KB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} MB"


def _findings(report: dict) -> str:
    lines = []
    for finding in report["findings"]:
        lines.append(f"{finding['level']:<9}{finding['where']}: {finding['problem']}")
        lines.append(f"         fix: {finding['fix']}")
    if report["ok"]:
        lines.append("fit to train" + (", with warnings" if report["findings"] else ": nothing found"))
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
