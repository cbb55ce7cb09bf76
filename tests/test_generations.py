"""The join can be entered again on the same store: the basis for members that leave and return."""

from tests.harness import nodes_of, playing, write_trainer

AGAIN = """
    from common.join.process_group import Joined, choose, connect, disconnect, join
    from common.join.store import OpenStore

    device, backend, _ = choose(worker, group.options)
    opened = OpenStore(group.store, "127.0.0.1", "" if worker.is_main else "127.0.0.1", leads=worker.is_main)
    joined = Joined(dist.PrefixStore("first", group.store), group.views, "127.0.0.1")
    for generation in (1, 2, 3):
        disconnect(worker, joined)
        joined = join(worker, group.options, opened, device, backend, generation=generation)
        connect(worker, group.options, device, backend, joined)
        total = torch.full((), float(worker.rank + generation))
        dist.all_reduce(total)
        print(f"generation {generation}: {[view['rank'] for view in joined.views]} {total.item():.0f}")
"""


def test_the_same_ranks_join_and_connect_again_and_again(tmp_path):
    nodes = nodes_of((1, 1, 1), tmp_path)
    for node in nodes:
        node.flags = node.flags[: node.flags.index("--out-dir")]
    for result in playing(write_trainer(tmp_path, AGAIN), nodes, tmp_path).results():
        assert result.code == 0, result.output
        for generation in (1, 2, 3):
            assert f"generation {generation}: [0, 1, 2] {3 + 3 * generation}" in result.output
