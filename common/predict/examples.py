"""Tables for clusters that are not here: what `python -m common.predict --examples` prints."""

from common.predict.step import Cluster, Link, Way, predict, ways

MB = 1e6
GRADIENTS = 440 * MB  # BERT-base: 110 M weights of 4 bytes
GBIT = 1e9 / 8
NVLINK = Link(200e9, 5e-6)
# Published: AAAI-21, four GPUs a node, 2.60 s a step on one node; each GPU has four micro-batches of 32 rows.
HETSEQ_SECONDS, HETSEQ_MICRO_BATCHES, HETSEQ_ROWS = 2.60, 4, 4 * 32
HETSEQ = {1: (2.60, 1.0), 2: (2.69, 1.72), 4: (2.794, 3.22), 8: (3.126, 5.94)}  # nodes -> seconds, times as fast


def uneven() -> list[str]:
    """Eight GPUs beside two that are slower."""
    cluster = Cluster((8, 2), (210.0,) * 8 + (120.0,) * 2, (0.0,) * 10, NVLINK, Link(10 * GBIT, 1e-4))
    found = {way: predict(cluster, 1024, GRADIENTS, way) for way in ways(cluster, 50)}
    lines = [
        "8 + 2 GPUs: BERT-base, 210 and 120 rows/s a GPU, global batch 1,024, 10 Gbit/s and 0.1 ms between the nodes",
        "  flags                                     step        times as fast",
    ]
    for way, step in found.items():
        ratio = found[Way()].seconds / step.seconds
        lines.append(f"  {way.flags:<42}{step.seconds * 1e3:>7,.0f} ms  {ratio:.2f}")
    return lines


def hetseq() -> list[str]:
    """HetSeq's published scaling, beside the model's for two kinds of link, which the paper does not name."""
    lines = [
        "HetSeq's 4 to 32 GPUs: BERT-base, 4 GPUs a node, 128 rows a GPU in 4 micro-batches, 2.60 s on one node",
        "  GPUs  published: step, times as fast   10 Gbit/s, 0.1 ms: step, times   4 Gbit/s, 0.1 ms: step, times",
    ]
    for nodes, (seconds, times) in HETSEQ.items():
        cells = []
        for rate in (10, 4):
            ranks = 4 * nodes
            speed = HETSEQ_ROWS / HETSEQ_SECONDS
            cluster = Cluster((4,) * nodes, (speed,) * ranks, (0.0,) * ranks, Link(12e9, 1e-5), Link(rate * GBIT, 1e-4))
            step = predict(cluster, HETSEQ_ROWS * ranks, GRADIENTS, Way(), HETSEQ_MICRO_BATCHES).seconds
            cells.append(f"{step:.2f} s, {nodes * HETSEQ_SECONDS / step:.2f}")
        lines.append(f"  {4 * nodes:<6}{f'{seconds:.2f} s, {times:.2f}':<33}{cells[0]:<33}{cells[1]}")
    return lines


def many() -> list[str]:
    """Up to a thousand ranks, and what their exchange adds to a step."""
    lines = [
        "Up to 1,000 ranks: BERT-base, nodes of 8 GPUs with 210 rows/s, 64 rows a GPU, 100 Gbit/s and 0.02 ms",
        "  ranks   step      of it exchange   --compress bf16   --sync-every 50",
    ]
    for nodes in (1, 2, 5, 10, 25, 50, 125):
        ranks = 8 * nodes
        cluster = Cluster((8,) * nodes, (210.0,) * ranks, (0.0,) * ranks, NVLINK, Link(100 * GBIT, 2e-5))
        exact, half, rare = (
            predict(cluster, 64 * ranks, GRADIENTS, way) for way in (Way(), Way(compressed=0.5), Way(sync_every=50))
        )
        rarely = f"{rare.seconds * 1e3:.0f} ms" if nodes > 1 else "-"
        cells = [f"{exact.seconds * 1e3:.0f} ms", f"{exact.exchange * 1e3:.0f} ms", f"{half.seconds * 1e3:.0f} ms"]
        lines.append(f"  {ranks:<8}{cells[0]:<10}{cells[1]:<17}{cells[2]:<18}{rarely}")
    return lines


def tables() -> str:
    return "\n\n".join("\n".join(lines) for lines in (uneven(), hetseq(), many()))
