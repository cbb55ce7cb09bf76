"""Tables for clusters that are not here: what `python -m common.predict --examples` prints."""

from collections.abc import Iterator

from common.predict.step import Cluster, Link, Way, predict, ways

GRADIENTS = 440e6  # BERT-base: 110 M weights of 4 bytes
GBIT = 1e9 / 8
NVLINK = Link(200e9, 5e-6)
# Published: AAAI-21, four GPUs a node, 2.60 s a step on one node; each GPU has four micro-batches of 32 rows.
HETSEQ_SECONDS, HETSEQ_MICRO_BATCHES, HETSEQ_ROWS = 2.60, 4, 4 * 32
HETSEQ = {1: (2.60, 1.0), 2: (2.69, 1.72), 4: (2.794, 3.22), 8: (3.126, 5.94)}  # nodes -> seconds, times as fast
HALF, RARE = Way(compressed=0.5), Way(sync_every=50)


def uneven() -> Iterator[str]:
    """Eight GPUs beside two that are slower."""
    yield "8 + 2 GPUs: BERT-base, 210 and 120 rows/s a GPU, global batch 1,024, 10 Gbit/s and 0.1 ms between the nodes"
    yield "  flags                                     step        times as fast"
    cluster = Cluster((8, 2), (210.0,) * 8 + (120.0,) * 2, (0.0,) * 10, NVLINK, Link(10 * GBIT, 1e-4))
    found = {way: predict(cluster, 1024, GRADIENTS, way) for way in ways(cluster, 50)}
    for way, step in found.items():
        yield f"  {way.flags:<42}{step.seconds * 1e3:>7,.0f} ms  {found[Way()].seconds / step.seconds:.2f}"


def hetseq() -> Iterator[str]:
    """HetSeq's published scaling, beside the model's for two kinds of link, which the paper does not name."""
    yield "HetSeq's 4 to 32 GPUs: BERT-base, 4 GPUs a node, 128 rows a GPU in 4 micro-batches, 2.60 s on one node"
    yield "  GPUs  published: step, times as fast   10 Gbit/s, 0.1 ms: step, times   4 Gbit/s, 0.1 ms: step, times"
    for nodes, (seconds, times) in HETSEQ.items():
        line, rows = f"  {4 * nodes:<6}{f'{seconds:.2f} s, {times:.2f}':<33}", HETSEQ_ROWS * 4 * nodes
        for rate in (10, 4):
            cluster = _equal(nodes, 4, HETSEQ_ROWS / HETSEQ_SECONDS, Link(12e9, 1e-5), Link(rate * GBIT, 1e-4))
            step = predict(cluster, rows, GRADIENTS, Way(), HETSEQ_MICRO_BATCHES).seconds
            line += f"{f'{step:.2f} s, {nodes * HETSEQ_SECONDS / step:.2f}':<33}"
        yield line.rstrip()


def many() -> Iterator[str]:
    """Up to a thousand ranks, and what their exchange adds to a step."""
    yield "Up to 1,000 ranks: BERT-base, nodes of 8 GPUs with 210 rows/s, 64 rows a GPU, 100 Gbit/s and 0.02 ms"
    yield "  ranks   step      of it exchange   --compress bf16   --sync-every 50"
    for nodes in (1, 2, 5, 10, 25, 50, 125):
        cluster, three = _equal(nodes, 8, 210.0, NVLINK, Link(100 * GBIT, 2e-5)), (Way(), HALF, RARE)
        exact, half, rare = (predict(cluster, 64 * 8 * nodes, GRADIENTS, way) for way in three)
        cells = [f"{one * 1e3:.0f} ms" for one in (exact.seconds, exact.exchange, half.seconds, rare.seconds)]
        yield f"  {8 * nodes:<8}{cells[0]:<10}{cells[1]:<17}{cells[2]:<18}{cells[3] if nodes > 1 else '-'}"


def _equal(nodes: int, ranks: int, speed: float, inside: Link, between: Link) -> Cluster:
    """So many nodes with so many ranks each."""
    return Cluster((ranks,) * nodes, (speed,) * ranks * nodes, (0.0,) * ranks * nodes, inside, between)


def tables() -> str:
    return "\n\n".join("\n".join(lines) for lines in (uneven(), hetseq(), many()))
