"""How fast a rank computes, and how fast the ranks exchange numbers."""

import time

import torch
import torch.distributed as dist

SIZES = (4, 4 * 1024, 64 * 1024, 1024**2, 4 * 1024**2, 16 * 1024**2, 64 * 1024**2)  # bytes
SECONDS_A_SIZE = 0.3
LEAST_REPEATS, MOST_REPEATS = 6, 20
BUDGET_SECONDS = 10.0  # of all sizes: on a slow link the largest are left out
LARGE_ERROR = 0.01  # relative, of bfloat16


def rank_facts(rank: int, device: torch.device, seconds: float = 0.25) -> dict:
    """This rank's device: name, memory in GB, speed of a matrix product in TFLOP/s, and whether bfloat16 works."""
    facts = {"rank": rank, "device": str(device), "name": "CPU", "memory_gb": None, "free_gb": None}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts |= {"name": torch.cuda.get_device_name(device)}
        facts |= {"memory_gb": round(total / 1e9, 2), "free_gb": round(free / 1e9, 2)}
    facts["fp32_tflops"] = round(tflops(device, torch.float32, seconds), 4)
    try:
        facts["bf16_tflops"] = round(tflops(device, torch.bfloat16, seconds), 4)
        facts["bf16"] = _bf16_product(device)
    except RuntimeError as error:
        facts |= {"bf16_tflops": None, "bf16": str(error).splitlines()[0]}
    return facts


def tflops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """10^12 operations a second in a product of square matrices, the best of what fits in `seconds`."""
    side = 4096 if device.type == "cuda" else 512
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    product = matrix @ matrix  # the first one loads kernels
    times: list[float] = []
    began = _now(device)
    while not times or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        torch.mm(matrix, matrix, out=product)
        times.append(_now(device) - start)
    return 2 * side**3 / min(times) / 1e12


def _bf16_product(device: torch.device) -> str:
    """ "ok" where a product in bfloat16 is right on this device."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    expected = left.double() @ right.double()
    found = (left.to(device) @ right.to(device)).double().cpu()
    error = ((found - expected).norm() / expected.norm()).item()
    return "ok" if error < LARGE_ERROR else f"a product is wrong by {error:.0%}"


def collectives(device: torch.device, world_size: int) -> dict:
    """The all-reduce, timed, and checked in bfloat16, as plain JSON. Every rank must call this after the process group
    is up."""
    ones = torch.ones(1024, device=device, dtype=torch.bfloat16)
    dist.all_reduce(ones)
    error = (ones.float() - world_size).abs().max().item() / world_size
    bf16 = "ok" if error < LARGE_ERROR else f"a sum is wrong by {error:.0%}"
    return {"bf16": bf16, "rows": all_reduce_times(device) if world_size > 1 else [], "error": None}


def all_reduce_times(
    device: torch.device, sizes: tuple[int, ...] = SIZES, budget_seconds: float = BUDGET_SECONDS
) -> list[dict]:
    """Rows of bytes, ms and gb_per_second: the size of the buffer that is summed, the time of the slowest rank, and
    their ratio. Every rank must call this.

    A size that would not fit in the budget has ms None, and expected_ms instead. All ranks decide the same,
    because they all use the slowest rank's time.
    """
    rows, spent, expected = [], 0.0, 0.0
    for size, following in zip(sizes, (*sizes[1:], 0), strict=True):
        if spent + expected > budget_seconds:
            rows.append({"bytes": size, "ms": None, "gb_per_second": None, "expected_ms": round(expected * 1e3, 1)})
            took = expected
        else:
            buffer = torch.zeros(size // 4, device=device)
            took = _all_reduce_seconds(buffer, 1)
            spent += took
            repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(SECONDS_A_SIZE / took)))
            if spent + repeats * took < budget_seconds:
                took = _all_reduce_seconds(buffer, repeats)
                spent += repeats * took
            rows.append({"bytes": size, "ms": round(took * 1e3, 3), "gb_per_second": float(f"{size / took / 1e9:.3g}")})
        expected = took * min(following / size, 16)  # the time of small sizes is latency, which does not grow
    return rows


def _all_reduce_seconds(buffer: torch.Tensor, repeats: int) -> float:
    """The slowest rank's median; of an even number, the lower one. The later half of the repeats counts: the first
    ones are slower than those of training, because TCP opens its window slowly where packets take long."""
    seconds = []
    for _ in range(repeats):
        began = _now(buffer.device)
        dist.all_reduce(buffer)
        seconds.append(_now(buffer.device) - began)
    later = sorted(seconds[repeats // 2 :])
    median = torch.tensor([later[(len(later) - 1) // 2]], dtype=torch.float64, device=buffer.device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def _now(device: torch.device) -> float:
    """Seconds, when the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
