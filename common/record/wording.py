"""The text of a report: the header of a run, and numbers as a person reads them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from common.join.process_group import Group
from common.launch.options import RunOptions
from common.uneven.plan import BatchPlan

SHOWN_IN_PERCENT = ("accuracy", "precision", "recall", "f1")  # and names that end in _accuracy and so on


def header(group: Group, plan: BatchPlan, options: RunOptions, facts: Mapping[str, Any]) -> str:
    """Layout, devices, backend and batch of a run, then `facts`, one line each; `micro_batches` of them are by rank."""
    layout, flags = group.worker.layout, options.flags
    hosts: dict[tuple[int, str], list[str]] = {}
    for view in group.views:
        name = view["device"].partition("(")[2].rstrip(")")  # of "cuda:0 (NVIDIA H100)"
        hosts.setdefault((view["node_rank"], view["host"]), []).append(name)
    counted = {host: [f"{names.count(one)} x {one}" for one in dict.fromkeys(names)] for host, names in hosts.items()}
    shares, sizes = f"shares {runs(plan.shares)}", [size or max(plan.shares) for size in facts["micro_batches"]]
    if plan.balances_tokens:  # a rank may have few long rows, or many short ones
        shares = f"shares {runs([f'{weight:g}' for weight in plan.changes[-1].weights])} of the tokens"
        sizes = [size or plan.global_batch for size in facts["micro_batches"]]
    most = runs(sizes) if len(set(sizes)) > 1 else str(sizes[0])
    idle = f"; {_plural(plan.shares.count(0), 'rank')} without samples" if 0 in plan.shares else ""
    all_of = f" (there are {plan.samples})" if plan.global_batch > plan.samples else ""
    lines = {
        "layout": f"{_plural(layout.world_size, 'process')} on {_plural(len(hosts), 'node')} ({layout.source})",
        "devices": "; ".join(f"{host}: {', '.join(names)}" for (_, host), names in counted.items()),
        "backend": f"{group.backend}, {flags['precision']}",
        "batch": f"{plan.global_batch} {options.unit} a step over all ranks{all_of}, {shares}, "
        f"micro-batches of at most {most}{idle}",
        **_links(flags, len(hosts), layout.world_size),
        **{name: value for name, value in facts.items() if name != "micro_batches"},
    }
    return "\n".join(f"{name:<9}{value}" for name, value in lines.items())


def _links(flags: Mapping[str, Any], nodes: int, ranks: int) -> dict[str, str]:
    """A line where the ranks do not exchange all gradients exactly in every step."""
    if every := flags.get("sync_every"):
        one = "; there is one node, so nothing is saved" if nodes == 1 else ""
        often = "every step" if every == 1 else f"every {every} steps"
        rounded = ", rounded to bf16" if flags.get("compress") == "bf16" and nodes > 1 else ""
        return {"links": f"nodes average their changes {often}{rounded}, so the result depends on the nodes{one}"}
    if (compress := flags.get("compress", "off")) != "off" and ranks > 1:
        return {"links": f"gradients are exchanged as {compress}, so the result depends on the layout a little"}
    return {}


def measures(numbers: Mapping[str, object]) -> str:
    """loss 0.1051, accuracy 98.33%, count 359."""
    return ", ".join(f"{name} {_measure(name, value)}" for name, value in numbers.items())


def _measure(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2%}" if name.split("_")[-1] in SHOWN_IN_PERCENT else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def runs(values: Sequence[object]) -> str:
    """(64, 64, 64, 32) -> '64 x3, 32'."""
    parts = [(value, len([*same])) for value, same in groupby(values)]
    return ", ".join(f"{value} x{times}" if times > 1 else str(value) for value, times in parts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"
