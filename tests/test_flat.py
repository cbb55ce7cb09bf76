"""What a process keeps does not grow with the steps: a run may take a week."""

import json

import pytest

from tests.harness import play
from tests.trainers import altered

EPOCHS = 60  # of one step each, with an evaluation and a checkpoint
FLAGS = ("--dataset", "digits", "--global-batch", 1438, "--epochs", EPOCHS, "--keep", 2)
LOOP = "        while True:\n"
KEPT = """        import gc, json, os, pickle
        from torch._C._distributed_c10d import _dump_fr_trace as dump
        gc.collect()
        gc.freeze()  # what is there already
        kept = []
        while True:
            gc.collect()
            folders = {"descriptors": "/proc/self/fd", "threads": "/proc/self/task"}
            counts = {name: len(os.listdir(folder)) for name, folder in folders.items()}
            # the last changes of the shares, and times: how many depends on how busy the machine is
            remembered = len(run.batches.plan.changes) + 3 * len(run.balancer.speeds.windows)
            counts["collectives noted"] = len(pickle.loads(dump())["entries"])
            counts |= {"objects": len(gc.get_objects()) - remembered, "keys of the store": run.group.store.num_keys()}
            kept.append(counts)
            open(f"FOLDER/kept-{worker.rank}.json", "w").write(json.dumps(kept))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """By rank, what a process has kept after each epoch."""
    folder = tmp_path_factory.mktemp("kept")
    script = altered(folder / "counting_ddp", {LOOP: KEPT.replace("FOLDER", str(folder))})
    play(script, (1, 1), folder / "run", *FLAGS, "--elastic", 1, "--balance", "auto", "--async-save")
    return [json.loads((folder / f"kept-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("what", ["descriptors", "threads", "objects", "keys of the store", "collectives noted"])
def test_what_a_process_keeps_does_not_grow_with_the_steps(what, kept):
    for of_rank in kept:
        counts = [one[what] for one in of_rank]
        early, late = counts[10:35], counts[-10:]  # connections come and go
        more = 8 if what == "objects" else 0  # they come and go
        assert min(late) <= max(early) + more, counts
