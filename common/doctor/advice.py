"""One line of flags for this cluster, from what was measured and a model of a step (common/predict/step.py)."""

from common.doctor.report import Report
from common.predict import figures
from common.predict.step import Cluster, Link, advice, predict, ways

# BERT-base, the example that most people know: what a step costs there.
WEIGHTS, ROWS, LENGTH = 110e6, 8, 128  # rows of a rank and step, tokens of a row
PART_OF_PEAK = 0.4  # that training reaches, of the speed of a matrix product
NEAR = 0.9  # ranks at least this near to the fastest count as equal: a speed is measured for a quarter of a second
SAME_NODE = Link(10e9, 2e-5)
SYNC_EVERY = 50


def advise(report: Report) -> str:
    """The flags that would make a step of BERT-base fastest on this cluster; empty where ranks or links are missing."""
    ranks, sizes = sorted(report.ranks, key=lambda one: one["rank"]), report.layout.gpus_per_node
    link = figures.slowest_link(report.links)
    is_whole = len(ranks) >= max(2, report.layout.world_size) and report.all_reduce
    if not is_whole or not sizes or (len(sizes) > 1 and link is None):
        return ""
    peaks = [one["fp32_tflops" if one["device"] == "cpu" else "bf16_tflops"] or one["fp32_tflops"] for one in ranks]
    peaks = [max(peaks) if peak > NEAR * max(peaks) else peak for peak in peaks]
    speeds = tuple(peak * 1e12 * PART_OF_PEAK / (6 * WEIGHTS * LENGTH) for peak in peaks)
    measured, fixed = figures.all_reduces_of(report.all_reduce), (0.0,) * len(ranks)
    cluster = Cluster(tuple(sizes), speeds, fixed, SAME_NODE, link or SAME_NODE, measured)
    steps = {way: predict(cluster, ROWS * len(ranks), 4 * WEIGHTS, way) for way in ways(cluster, SYNC_EVERY)}
    return f"for BERT-base, {ROWS} rows of {LENGTH} tokens a rank and step: {advice(steps)}"
