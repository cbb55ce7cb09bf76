"""A stranger's model and data: exact on uneven ranks, or an error that names what is not.

Each test replaces some lines of one small trainer, which uses nothing but common.uneven, and runs it on one rank and on
2+1. The text of the trainer is below.
"""

import json
import math
import re

import pytest

from tests.harness import ROOT, nodes_of, playing, write_trainer

IMPORTS = """
import json, random
import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from common.uneven import ddp
from common.uneven.options.global_batch import gather_rows, global_batch_norm
from common.uneven.global_batches import GlobalBatchLoader


class Samples(Dataset):
    \"\"\"Float32 points of ten classes, as people have them.\"\"\"

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(10, (count,), generator=generator)
        centres = torch.randn(10, 6, generator=generator)
        self.points = centres[self.labels] + torch.randn(count, 6, generator=generator) / 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], int(self.labels[index])
"""
STRANGER = {
    "more": "",  # classes and functions
    "data": "Samples(90)",
    "loader": "",  # further arguments of GlobalBatchLoader
    "micro_batch": "7",
    "net": "nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))",
    "optimizer": "torch.optim.AdamW(net.parameters(), 0.02)",
    "loss": "cross_entropy(model(micro[0]), micro[1], reduction='sum')",
    "wrapped_loss": "compute_loss",  # the function that wrap is given
    "wrap": "",  # further arguments
    "begin": "pass",  # each step
    "count": "batch.global_count",
    "after": "pass",  # each step
}
BODY = """
data = {data}
batches = GlobalBatchLoader(data, 40, seed=3, epochs=3, micro_batch={micro_batch}, dtype=torch.float64, {loader})
torch.manual_seed(0)
net = {net}.double()
optimizer = {optimizer}


def compute_loss(model, micro):
    return {loss}


model = ddp.wrap(net, batches, {wrapped_loss}, {wrap})
losses = []
for batch in batches:
    {begin}
    loss_sum = torch.zeros((), dtype=torch.float64)
    for micro, is_last in batch.micro_batches():
        with model.no_sync(enabled=not is_last):
            loss = compute_loss(model, micro)
            (loss / {count}).backward()
        loss_sum += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    losses.append(float(loss_sum / {count}))
    {after}
if worker.is_main:
    Path(args.out_dir, "losses.json").write_text(json.dumps(losses))
"""
LAYOUTS = {"one": (1,), "uneven": (2, 1)}


@pytest.fixture
def outputs(tmp_path):
    """`outputs(gpus, name=code, ...)`: what the stranger's trainer prints with these lines changed, and its losses."""

    def run(gpus, **changed):
        folder = tmp_path / "-".join(map(str, gpus))
        folder.mkdir(exist_ok=True)
        lines = STRANGER | changed
        body = BODY.format(**lines)
        script = write_trainer(folder, body, IMPORTS + lines["more"])
        results = playing(script, nodes_of(gpus, folder, "--timeout", 120), folder).results()
        written = folder / "losses.json"
        return results, json.loads(written.read_text()) if written.exists() else []

    return run


@pytest.fixture
def exact(outputs):
    """`exact(name=code, ...)`: the losses, which are the same on one rank and on 2+1."""

    def check(**changed):
        found = {}
        for name, gpus in LAYOUTS.items():
            results, found[name] = outputs(gpus, **changed)
            assert all(result.code == 0 for result in results), [result.output for result in results]
        assert len(found["one"]) == 9
        assert found["uneven"] == pytest.approx(found["one"], abs=1e-9, rel=0)
        assert found["one"][-1] < found["one"][0]
        return found["one"]

    return check


@pytest.fixture
def refused(outputs):
    """`refused(message, name=code, ...)`: the user's mistake ends the run on 1+1, with a message and no traceback."""

    def check(*messages, gpus=(1, 1), **changed):
        results, _ = outputs(gpus, **changed)
        text = "\n".join(result.output for result in results)
        assert all(result.code != 0 for result in results), text
        assert 2 in [result.code for result in results], text
        assert "Traceback" not in text
        for message in messages:
            assert message in text

    return check


# --- right -------------------------------------------------------------------------------------------------------


def test_a_stock_data_set_of_tuples_is_exact(exact):
    exact()


def test_a_data_set_of_dicts_with_texts_is_exact(exact):
    exact(
        more="""
class Dicts(Samples):
    def __getitem__(self, index):
        return {"x": self.points[index].numpy(), "y": int(self.labels[index]), "name": f"sample {index}"}
""",
        data="Dicts(90)",
        loss="cross_entropy(model(micro['x']), micro['y'], reduction='sum')",
    )


AUGMENTED = """
class Augmented(Samples):
    def __getitem__(self, index):
        noise = torch.randn(6) + np.random.rand() + random.random()
        return self.points[index] + noise / 4, int(self.labels[index])
"""


def test_augmentation_is_exact_and_new_in_every_epoch(exact):
    plain = exact(more=AUGMENTED, data="Augmented(90)")
    other = exact(more=AUGMENTED.replace("np.random", "0 * np.random"), data="Augmented(90)")
    assert plain != other


@pytest.mark.long
@pytest.mark.parametrize("persistent", [True, False])
def test_augmentation_in_loader_workers_is_that_of_no_workers(exact, persistent):
    options = f"num_workers=2, persistent_workers={persistent}, multiprocessing_context='fork'"
    without = exact(more=AUGMENTED, data="Augmented(90)")
    assert exact(more=AUGMENTED, data="Augmented(90)", loader=options) == without


def test_samples_of_a_class_of_ones_own_are_exact_with_a_collate_function(exact):
    exact(
        more="""
class Point:
    def __init__(self, place, label):
        self.place, self.label = place, label


class Points(Samples):
    def __getitem__(self, index):
        return Point(*super().__getitem__(index))


def together(points):
    return torch.stack([point.place for point in points]), torch.tensor([point.label for point in points])
""",
        data="Points(90)",
        loader="collate=together",
    )


def test_rows_of_different_lengths_are_exact_with_a_mean_over_tokens(exact):
    exact(
        more="""
class Sentences(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
        self.rows = [torch.randint(10, (length,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def padded(rows):
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"tokens": tokens, "labels": labels}


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).relu())
""",
        data="Sentences(90)",
        loader="collate=padded, lengths=data.lengths, counts=data.lengths",
        net="Next()",
        loss="cross_entropy(model(micro['tokens']).flatten(0, 1), micro['labels'].flatten(), reduction='sum')",
    )


NORMAL = "nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))"


def test_batch_norm_over_the_global_batch_is_exact_and_equals_torchs_on_one_process(exact, outputs):
    ours = exact(net=f"global_batch_norm({NORMAL})", micro_batch="None")
    changed = {"net": NORMAL, "micro_batch": "None", "wrap": "layout_dependent=['1']"}
    results, torchs = outputs((1,), **changed)
    assert results[0].code == 0, results[0].output
    assert ours == pytest.approx(torchs, abs=1e-12)


def test_statistics_of_the_global_batch_are_the_same_on_every_rank(exact):
    exact(
        net=f"global_batch_norm({NORMAL})",
        micro_batch="None",
        after="everyone = [None] * worker.world_size; "
        "dist.all_gather_object(everyone, [buffer.tolist() for buffer in net.buffers()]); "
        "assert all(one == everyone[0] for one in everyone), everyone",
    )


def test_a_contrastive_loss_over_the_whole_global_batch_is_exact(exact):
    exact(
        more="""
def contrast(model, points, plan, step, rank):
    own = nn.functional.normalize(model(points), dim=1)
    everyone = gather_rows(own, plan, step)
    begin = plan.part(step, rank).start - plan.begin(step)
    places = torch.arange(begin, begin + len(own))
    similar = own @ everyone.T / 0.1
    similar[torch.arange(len(own)), places] = -1e9  # not with itself
    return cross_entropy(similar, (places ^ 1).clamp(max=len(everyone) - 1), reduction="sum")
""",
        micro_batch="None",
        wrapped_loss="lambda model, micro: model(micro[0]).sum()",
        loss="contrast(model, micro[0], batches.plan, batch.step, worker.rank)",
    )


def test_a_contrast_of_two_views_is_exact(exact):
    exact(
        more="""
import math


def contrast(model, one, two, plan, step, rank):
    one, two = (nn.functional.normalize(model(view), dim=1) for view in (one, two))
    everyone = torch.cat([gather_rows(one, plan, step), gather_rows(two, plan, step)])
    first, count = plan.part(step, rank).start - plan.begin(step), plan.global_count(step)
    places, loss_sum = torch.arange(first, first + len(one)), 0
    for own, here, partner in ((one, places, places + count), (two, places + count, places)):
        scores = own @ everyone.T / 0.5
        scores[torch.arange(len(own)), here] = -math.inf
        loss_sum = loss_sum + cross_entropy(scores, partner, reduction="sum")
    return loss_sum
""",
        micro_batch="None",
        wrap="no_micro_batches=True",
        wrapped_loss="lambda model, micro: model(micro[0]).sum()",
        loss="contrast(model, micro[0], 0.9 * micro[0] + 0.1, batches.plan, batch.step, worker.rank)",
        count="(2 * batch.global_count)",
    )


def test_two_optimizers_are_exact(exact):
    exact(
        more="""
class Both:
    def __init__(self, net):
        self.all = [torch.optim.AdamW(net[0].parameters(), 0.02), torch.optim.SGD(net[2].parameters(), 0.1)]

    def step(self):
        for one in self.all:
            one.step()

    def zero_grad(self):
        for one in self.all:
            one.zero_grad()
""",
        optimizer="Both(net)",
    )


RESHAPES = """
class Reshapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 10)

    def forward(self, points):
        return self.head(self.first(points).relu().reshape(len(points), -1))
"""


def test_the_row_that_pads_an_empty_batch_reaches_inputs_within_a_dict(exact):
    exact(
        more=RESHAPES.replace("forward(self, points):", "forward(self, batch):\n        points = batch['points']"),
        net="Reshapes()",
        wrap="pad_empty_batch=True",
        data="Samples(82)",
        loss="cross_entropy(model({'points': micro[0]}), micro[1], reduction='sum')",
    )


def test_a_model_that_refuses_an_empty_batch_is_exact_where_it_is_padded(exact):
    exact(
        more=RESHAPES, net="Reshapes()", wrap="pad_empty_batch=True", data="Samples(82)"
    )  # a last step of two samples


# --- two networks, each with a loss and an optimizer of its own ---------------------------------------------------

TWO = """
data = Samples(90)
shares = (3, 2, 2, 1)[: worker.world_size]
batches = GlobalBatchLoader(data, 40, seed=3, epochs=3, micro_batch=5, shares=shares, dtype=torch.float64)
torch.manual_seed(0)
maker, critic = (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width)).double() for width in (6, 1))
optimizers = torch.optim.Adam(maker.parameters(), 3e-3), torch.optim.SGD(critic.parameters(), 0.05, momentum=0.9)
made, judged = (ddp.wrap(net, batches, lambda model, micro: model(micro[0]).sum()) for net in {wrapped})
losses = []
for batch in batches:
    step, count, loss_sum = batch.step, batch.global_count, torch.zeros((), dtype=torch.float64)
    for (x, _), is_last in batch.micro_batches():
        {before}
        {critic_step}
            both = {judge}(torch.cat([x, maker(x).detach()]))
            loss = nn.functional.softplus(-both[: len(x)]).sum() + nn.functional.softplus(both[len(x) :]).sum()
            (loss / count).backward()
        loss_sum += loss.detach()
        {between}
        critic.requires_grad_({critic_learns})
        with made.no_sync(enabled=not is_last):
            fake = {fake}
            loss = (fake - x).square().sum() + nn.functional.softplus(-{critic}(fake)).sum()
            (loss / count).backward()
        critic.requires_grad_(True)
        loss_sum += loss.detach()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    {reduce_loss}
    losses.append(float(loss_sum / count))
if worker.is_main:
    Path(args.out_dir, "losses.json").write_text(json.dumps(losses))
"""
ONE_LOOP = {
    "wrapped": "(maker, critic)",
    "critic_step": "with judged.no_sync(enabled=not is_last):",
    "judge": "judged",
    "reduce_loss": "dist.all_reduce(loss_sum)",
    "before": "pass",
    "between": "pass",
    "critic_learns": "False",
    "fake": "made(x)",
    "critic": "critic",
}


@pytest.fixture
def two_networks(outputs, monkeypatch):
    """`two_networks(gpus, name=code, ...)`: what this trainer prints with these lines changed, and its losses."""

    def run(gpus, **changed):
        monkeypatch.setitem(globals(), "BODY", TWO)
        return outputs(gpus, **ONE_LOOP | changed)

    return run


def test_two_networks_in_one_loop_are_exact_though_ranks_have_different_numbers_of_micro_batches(two_networks):
    _, one = two_networks((1,))
    results, uneven = two_networks((2, 1))
    assert len(one) == 9, results[0].output
    assert uneven == pytest.approx(one, abs=1e-12)


@pytest.mark.parametrize("changed, said", [
    ({"before": "early = made(x)", "fake": "early"}, "the wrapped model runs outside of its own `with model.no_"),
    ({"critic": "judged"}, "the wrapped model runs outside of its own `with model.no_sync"),
    ({"critic_learns": "True"}, "gradients in 0.weight, 0.bias, 2.weight and 1 more of another one (a Sequential)"),
])  # fmt: skip
def test_gradients_that_no_rank_exchanges_are_refused(two_networks, changed, said):
    results, _ = two_networks((2, 1), **changed)
    assert all(result.code != 0 for result in results)
    assert said in results[0].output


def test_a_network_that_some_ranks_skip_is_refused_and_not_added_to_the_sums_of_another(two_networks):
    """Both networks have gradients of the same size, so the backend would add them up."""
    skip = "if is_last and step == 4 and worker.rank == 2: continue"
    results, _ = two_networks((2, 1), between=skip, reduce_loss="pass")
    assert all(result.code != 0 for result in results)
    assert "exchange the gradients of network" in results[0].output


def test_a_second_network_without_a_wrap_is_said(two_networks):
    results, _ = two_networks(
        (2, 1), wrapped="(maker, nn.Linear(6, 1).double())", critic_step="if True:", judge="critic"
    )
    assert all(result.code == 0 for result in results)
    assert (
        "an optimizer trains parameters of shape (16, 6), (16,), (1, 16) and 1 more that no wrap()" in results[0].output
    )


# --- errors that name ---------------------------------------------------------------------------------------------


def test_an_evaluation_with_dropout_in_training_mode_is_said(outputs):
    net = "nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 10))"
    for before, said in (("", True), ("net.eval(); ", False)):
        results, _ = outputs((1,), net=net, after=f"{before}torch.no_grad()(net)(micro[0]); net.train()")
        assert results[0].code == 0, results[0].output
        assert ("a forward without gradients while 1 (Dropout) is in training mode" in results[0].output) == said


def test_a_stock_loader_is_refused(outputs, monkeypatch):
    monkeypatch.setitem(globals(), "BODY", BODY.replace("net, batches,", "net, DataLoader(data, batch_size=10),"))
    results, _ = outputs((2, 1))
    assert all(result.code == 2 and "Traceback" not in result.output for result in results)
    assert "wrap() got a DataLoader" in results[0].output
    assert "write batches = GlobalBatchLoader(dataset, global_batch, seed=..., epochs=...)" in results[0].output


def test_a_collate_function_that_loses_samples_is_refused(refused):
    refused(
        "the loader gave 1 rows, but this rank's part of the global batch has 14",
        "a row for each sample",
        gpus=(2, 1),
        loader="collate=lambda samples: torch.utils.data.default_collate(samples[:1])",
    )


OTHER_LOOPS = {
    "in batches:": "in GlobalBatchLoader(data, 40, seed=3, epochs=3, micro_batch=7, dtype=torch.float64):",
    "in batch.micro_batches():": "in [((data.points[:9].double(), data.labels[:9]), True)]:",
}


@pytest.mark.parametrize("loop", OTHER_LOOPS)
def test_a_loop_over_another_loader_or_other_rows_than_its_batches_is_refused(loop, outputs, monkeypatch):
    monkeypatch.setitem(globals(), "BODY", BODY.replace(loop, OTHER_LOOPS[loop]))
    results, _ = outputs((2, 1))
    assert all(result.code == 2 for result in results)
    assert "does not take its batches from the GlobalBatchLoader that wrap() was given" in results[0].output


def test_plain_ddp_is_refused_after_its_first_step(outputs, monkeypatch):
    plain = BODY.replace("ddp.wrap(net, batches, {wrapped_loss}, {wrap})", "nn.parallel.DistributedDataParallel(net)")
    plain = plain.replace("model.no_sync(enabled=not is_last)", "model.no_sync()")
    monkeypatch.setitem(globals(), "BODY", plain)
    results, _ = outputs((2, 1))
    assert all(result.code == 2 for result in results)
    assert "the gradients of this step were not exchanged: put forward and backward" in results[0].output


@pytest.mark.parametrize("spaces", [8, 12])  # after no_sync, and within
def test_gradients_that_are_clipped_between_micro_batches_are_refused(outputs, monkeypatch, spaces):
    clips = f"{' ' * (spaces - 8)}nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n        loss_sum += loss.detach()"
    monkeypatch.setitem(globals(), "BODY", BODY.replace("loss_sum += loss.detach()", clips))
    results, _ = outputs((2, 1))
    assert all(result.code == 2 for result in results)
    assert "a gradient has changed between two micro-batches of a step" in results[0].output


def test_a_model_that_is_in_ddp_already_is_refused(refused):
    refused(
        "the outermost module is a DistributedDataParallel",
        "give wrap() the module inside",
        net=f"nn.parallel.DistributedDataParallel({NORMAL.replace('nn.BatchNorm1d(16), ', '')}.double())",
    )


NOISY = """
class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(6, 10)
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, points):
        return super().forward(points + torch.rand(points.shape, generator=self.noise))
"""


GENERATORS = {
    "torch": "torch.Generator().manual_seed(0)",
    "numpy": "np.random.default_rng(0)",
    "python": "random.Random(0)",
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_the_model_keeps_is_refused_by_name(refused, kind):
    noisy = NOISY.replace(GENERATORS["torch"], GENERATORS[kind])
    refused("the model keeps a generator, noise", "draw from torch's default generator", more=noisy, net="Noisy()")


TWICE = """with model.no_sync(enabled=not is_last):
            loss = compute_loss(model, micro)
            (loss / {count}).backward()
"""
TWO_EXCHANGES = {
    "in one": TWICE.replace(
        "(loss / {count})", "(loss / {count}).backward()\n            (compute_loss(model, micro))"
    ),
    "one each": f"{TWICE}        {TWICE}",
}


@pytest.mark.parametrize("which", TWO_EXCHANGES)
def test_gradients_that_would_be_summed_twice_are_refused(outputs, monkeypatch, which):
    monkeypatch.setitem(globals(), "BODY", BODY.replace(TWICE, TWO_EXCHANGES[which]))
    results, _ = outputs((1, 1), micro_batch="None")
    assert all(result.code == 2 for result in results)
    assert "the gradients of this step would be summed over the ranks twice: add up the losses" in results[0].output


def test_two_losses_of_which_the_first_is_only_accumulated_are_exact(exact, monkeypatch):
    first = TWICE.replace("enabled=not is_last", "")
    monkeypatch.setitem(globals(), "BODY", BODY.replace(TWICE, f"{first}        {TWICE}"))
    exact()


def test_two_steps_on_one_batch_are_exact_with_micro_batches(exact):
    """As a critic takes several steps before the maker's."""
    passing = """for micro, is_last in batch.micro_batches():
        with model.no_sync(enabled=not is_last):
            (compute_loss(model, micro) / batch.global_count).backward()
    optimizer.step()
    optimizer.zero_grad()"""
    exact(begin=passing)


def test_a_backward_after_the_exchange_of_its_step_is_refused(refused, monkeypatch):
    more = "    with model.no_sync():\n        compute_loss(model, micro).backward()\n    optimizer.step()\n"
    monkeypatch.setitem(globals(), "BODY", BODY.replace("    optimizer.step()\n", more))
    refused("the gradients of this step would be summed over the ranks twice")


def test_layers_that_train_though_they_were_frozen_at_wrap_are_refused_by_name(refused):
    frozen = "(net[0].requires_grad_(False), torch.optim.AdamW(net.parameters(), 0.02))[1]"
    begin = "net[0].requires_grad_(len(losses) > 2)"
    refused("0.weight, 0.bias was frozen at wrap() and trains now", optimizer=frozen, begin=begin)


def test_gradients_that_are_emptied_within_a_micro_batch_are_refused(outputs, monkeypatch):
    loss = "            loss = compute_loss(model, micro)\n"
    monkeypatch.setitem(globals(), "BODY", BODY.replace(loss, f"            optimizer.zero_grad()\n{loss}"))
    results, _ = outputs((2, 1))
    assert all(result.code == 2 for result in results)
    assert "a gradient has changed between two micro-batches of a step" in results[0].output


KEEPING = """
from collections import deque


class Keeping(nn.Linear):
    kept = None

    def forward(self, points):
        self.kept = {what}
        return super().forward(points)
"""


@pytest.mark.parametrize(("what", "name"), [
    ("points.mean(dim=0)", "0.kept"),
    ("(points.detach(), points.detach() + 1)", "0.kept[0], 0.kept[1]"),
    ("points.mean(dim=0) if self.kept is None else self.kept", ""),
    ("points @ self.weight.T", ""),  # belongs to the graph
    ("(self.kept or 0.0) + 1.5", "0.kept"),
    ("[1.0, (self.kept or [0, 0])[1] + 1]", "0.kept[1]"),
    ("[*(self.kept or []), 1.0]", "the length of 0.kept"),
    ("{**(self.kept or {}), len(self.kept or {}): points}", ""),  # a cache, for all that is known
    ("deque([*(self.kept or []), points.mean(0)], 3)", "0.kept[0], 0.kept[1], 0.kept[2]"),
    ("2.5", ""),
])  # fmt: skip
def test_a_tensor_or_number_that_the_model_changes_from_step_to_step_is_said(outputs, what, name):
    net = "nn.Sequential(Keeping(6, 16), nn.ReLU(), nn.Linear(16, 10))"
    results, losses = outputs((1, 1), more=KEEPING.replace("{what}", what), net=net)
    said = "outside of its parameters and buffers: no checkpoint has it"
    assert len(losses) == 9 and (said in results[0].output) == bool(name), results[0].output
    assert not name or f"\n[0] warning: training changes {name}, which" in results[0].output


COUNTING = """
class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.count = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, points):
        self.count, self.last = self.count + 1, getattr(self, "last", 0) + 1
        self.calls += 1
        return super().forward(points)
"""


def test_what_wrap_tries_leaves_no_trace_in_what_the_model_keeps(outputs):
    results, losses = outputs(
        (1, 1),
        more=COUNTING,
        net="Counting(6, 10)",
        micro_batch="None",
        wrap="layout_dependent=['calls']",
        after="assert net.count == net.last == net.calls == batch.step + 1, (net.count, net.last, net.calls)",
    )
    assert len(losses) == 9, results


SCALED = """
def scaled(rank):
    net = nn.Linear(6, 10)
    net.scale = 1.0 + rank
    return net
"""


def test_a_list_that_the_model_may_keep_is_named_as_the_attribute(outputs):
    net = "nn.Sequential(Keeping(6, 16), nn.ReLU(), nn.Linear(16, 10))"
    more = KEEPING.replace("{what}", "[*(self.kept or []), points.mean(0)]")
    results, losses = outputs((1, 1), more=more, net=net, wrap="layout_dependent=['0.kept']")
    assert len(losses) == 9 and "no checkpoint has it" not in results[0].output


def test_a_number_of_the_model_that_differs_on_one_rank_is_refused(refused):
    refused("scale=2.0) on rank 1, but Linear(in_features=6, out_features=10, bias=True, scale=1.0) on rank 0",
            more=SCALED, net="scaled(worker.rank)")  # fmt: skip


def test_a_model_that_goes_on_in_evaluation_mode_is_said(outputs):
    results, losses = outputs((1, 1), after="net.eval()")
    assert len(losses) == 9
    assert results[0].output.count("the model trains in evaluation mode") == 1


def test_dropout_within_a_layer_in_an_evaluation_is_said(outputs):
    more = """
class Recurrent(nn.LSTM):
    def forward(self, points):
        return super().forward(points)[0]
"""
    net = "nn.Sequential(Recurrent(6, 8, num_layers=2, dropout=0.3), nn.Linear(8, 10))"
    begin = "exec('with torch.no_grad(): net(data.points[:4].double())')"
    results, _ = outputs((1,), more=more, net=net, begin=begin, wrap="pad_empty_batch=True")
    assert "a forward without gradients while 0 (Recurrent) is in training mode" in results[0].output


@pytest.mark.parametrize("layer", ["nn.BatchNorm1d(16)", "nn.SyncBatchNorm(16)"])
def test_batch_norm_is_refused_by_name(refused, layer):
    refused(
        f"1 ({layer[3:-4]})", "GroupNorm", "global_batch_norm(model)", net=NORMAL.replace("nn.BatchNorm1d(16)", layer)
    )


def test_batch_norm_over_the_global_batch_refuses_micro_batches(refused):
    refused("leave out --micro-batch", net=f"global_batch_norm({NORMAL})", micro_batch="4")


def test_the_row_that_pads_an_empty_batch_may_not_count_in_statistics_of_the_global_batch(refused):
    refused(
        "would count its row of zeros",
        net=f"global_batch_norm({NORMAL})",
        micro_batch="None",
        wrap="pad_empty_batch=True",
    )


def test_a_buffer_that_training_changes_is_refused_by_name(refused):
    refused(
        "training changes the buffer 0.mean",
        more="""
class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, points):
        if len(points):
            self.mean.lerp_(points.detach().mean(dim=0), 0.1)
        return points - self.mean
""",
        net="nn.Sequential(Running(), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))",
    )


UNUSED = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.never = nn.Linear(6, 10), nn.Linear(6, 10)

    def forward(self, points):
        return self.body(points) + (self.never(points) if CONDITION else 0)
"""


@pytest.mark.parametrize("gpus", LAYOUTS.values())
def test_parameters_that_no_backward_reaches_are_refused_by_name(refused, gpus):
    refused(
        "did not reach never.weight, never.bias", gpus=gpus, more=UNUSED.replace("CONDITION", "False"), net="Branches()"
    )


def test_parameters_that_one_ranks_backward_does_not_reach_are_refused_by_name(refused):
    condition = "dist.get_rank() != 2 or len(points) == 0"
    refused(
        "[2", "did not reach never.weight", gpus=(2, 1), more=UNUSED.replace("CONDITION", condition), net="Branches()"
    )


def test_parameters_that_only_an_earlier_micro_batch_reaches_are_refused(refused):
    refused(
        "some parameters in the last micro-batch",
        gpus=(3, 1),  # parts of 10 samples: 7 and 3
        more=UNUSED.replace("CONDITION", "len(points) != 3"),
        net="Branches()",
    )


def test_a_model_that_refuses_an_empty_batch_is_told_what_to_write(refused):
    refused("the model refuses an empty batch", "wrap(..., pad_empty_batch=True)", more=RESHAPES, net="Reshapes()")


def test_a_model_that_refuses_the_row_of_zeros_too_is_told_so(refused):
    refused(
        "the model refuses an empty batch (no samples), which a rank with an empty part has: it also refuses the row "
        "of zeros that pad_empty_batch=True gives it instead: correct the model",
        more="""
class Refuses(nn.Linear):
    def forward(self, points):
        if not points.any():
            raise ValueError("no samples")
        return super().forward(points)
""",
        net="Refuses(6, 10)",
        wrap="pad_empty_batch=True",
    )


def test_data_of_another_length_on_one_rank_are_refused(refused):
    refused(
        "the plan is BatchPlan(samples=89", "on rank 2", gpus=(2, 1), data="Samples(89 if worker.rank == 2 else 90)"
    )


def test_a_model_built_differently_on_one_rank_is_refused_by_name(refused):
    refused(
        "module 1 is GELU(approximate='none') on rank 2, but ReLU() on rank 0",
        gpus=(2, 1),
        net="nn.Sequential(nn.Linear(6, 16), nn.GELU() if worker.rank == 2 else nn.ReLU(), nn.Linear(16, 10))",
    )


def test_a_parameter_of_another_size_on_one_rank_is_refused_by_name(refused):
    refused(
        "parameter 2.weight is (11, 16) torch.float64 on rank 1, but (10, 16) torch.float64 on rank 0",
        net="nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 11 if worker.rank == 1 else 10))",
    )


def test_a_generator_of_the_data_sets_own_is_refused(refused):
    refused(
        "sample ",
        "is another one when it is read again",
        more="""
class Own(Samples):
    generator = torch.Generator()

    def __getitem__(self, index):
        return self.points[index] + torch.rand(6, generator=self.generator), int(self.labels[index])
""",
        data="Own(90)",
    )


def test_a_collate_function_that_draws_random_numbers_is_refused(refused):
    refused(
        "the collate function masked draws random numbers",
        more="""
def masked(samples):
    points, labels = torch.utils.data.default_collate(samples)
    return points * (torch.rand_like(points) > 0.1), labels
""",
        loader="collate=masked",
    )


def test_what_a_loaders_process_refuses_is_one_line_too(refused):
    refused(
        "error: the collate function masked draws random numbers",
        more="""
def masked(samples):
    points, labels = torch.utils.data.default_collate(samples)
    return points * (torch.rand_like(points) > 0.1), labels
""",
        loader="collate=masked, num_workers=1, multiprocessing_context='fork'",
    )


def test_a_data_set_without_numbers_is_refused(refused):
    refused(
        "Stream has no samples with numbers",
        more="""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 90
""",
        data="Stream()",
    )


def test_a_part_of_a_loss_over_the_global_batch_is_refused(refused):
    refused(
        "needs all 13 rows of this rank in one forward",
        gpus=(2, 1),
        wrapped_loss="lambda model, micro: model(micro[0]).sum()",
        loss="gather_rows(model(micro[0]), batches.plan, batch.step).sum()",
    )


def test_a_loss_that_needs_whole_parts_refuses_micro_batches(refused):
    refused("need this rank's whole part in one forward", wrap="no_micro_batches=True", micro_batch="4")


def test_views_that_are_gathered_together_are_refused(refused):
    both = "torch.cat([model(micro[0]), model(micro[0])])"
    refused(
        "gather each view of the samples by itself",
        wrapped_loss="lambda model, micro: model(micro[0]).sum()",
        loss=f"gather_rows({both}, batches.plan, batch.step).sum()",
        micro_batch="None",
    )


def test_a_batch_whose_tensors_differ_in_rows_is_refused(refused):
    refused(
        "the tensors of a batch must have the same number of rows",
        more="""
def short(samples):
    points, labels = torch.utils.data.default_collate(samples)
    return points, labels[:3]
""",
        loader="collate=short",
    )


def test_a_loss_that_is_no_number_for_an_empty_batch_is_refused(refused):
    refused(
        "the loss of an empty batch, which a rank with an empty part has, is nan",
        'return the sum over the samples (reduction="sum")',
        loss="cross_entropy(model(micro[0]), micro[1]) * len(micro[1])",
    )


# --- said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divided, is_said", [("", False), (" / max(1, len(micro[1]))", True)])
def test_a_loss_that_is_a_mean_already_is_seen_in_the_first_loss(outputs, divided, is_said):
    loss = f"cross_entropy(model(micro[0]), micro[1], reduction='sum'){divided}"
    said = "len(losses) == 1 and print(first_loss_problem(losses[0], math.log(10)))"
    imports = "\nimport math\nfrom common.uneven.guards.losses import first_loss_problem\n"
    results, _ = outputs((2, 1), loss=loss, micro_batch="None", after=said, more=imports)
    assert ("but an untrained model should begin near 2.303" in results[0].output) == is_said


# --- counts that only the batch knows, and what every rank must have the same -----------------------------------------


def test_a_count_that_only_the_batch_knows_is_summed_over_the_ranks_before_the_micro_batches(exact):
    kept = "micro[1].masked_fill(micro[1] > 6, -100)"
    ours = exact(
        begin="count = batch.sum_over_ranks(lambda micro: (micro[1] <= 6).sum())",
        loss=f"cross_entropy(model(micro[0]), {kept}, reduction='sum')",
        count="count",
    )
    assert ours[0] == pytest.approx(math.log(10), rel=0.3)


WAITS = "dist.all_reduce(torch.ones(1))"
LOSS = "cross_entropy(model(micro[0]), micro[1], reduction='sum')"
LOOP = "        with model.no_sync(enabled=not is_last):\n"
END_OF_LOOP = "        loss_sum += loss.detach()\n"


@pytest.mark.parametrize(("loss", "loop", "end", "shares"), [
    (f"{WAITS} or {LOSS}", "", "", (2, 1, 1)),
    (LOSS, f"        {WAITS}\n", "", (2, 1, 1)),
    (LOSS, "", f"        {WAITS}\n", (1, 1, 1)),  # with other shares it meets the exchange of the gradients
], ids=["in the loss", "before it", "after it"])  # fmt: skip
def test_a_collective_in_a_micro_batch_of_which_ranks_may_have_different_numbers_is_named(
    loss, loop, end, shares, refused, monkeypatch
):
    body = BODY.replace(LOOP, loop + LOOP).replace(END_OF_LOOP, END_OF_LOOP + end)
    monkeypatch.setitem(globals(), "BODY", body)
    refused(
        "has waited for other ranks, in forward, in the loss or beside them, but ranks have different numbers",
        "batch.sum_over_ranks",
        gpus=(2, 1),
        loader=f"shares={shares},",
        micro_batch="10",
        loss=loss,
    )


def test_a_collective_beside_the_loop_over_micro_batches_or_in_the_last_one_is_right(exact, monkeypatch):
    listed = "in list(batch.micro_batches()) or dist.all_reduce(torch.ones(1)):"
    body = BODY.replace("in batch.micro_batches():", listed).replace(
        END_OF_LOOP, f"{END_OF_LOOP}        is_last and {WAITS}\n"
    )
    monkeypatch.setitem(globals(), "BODY", body)
    exact()


CHOSEN = """
from torch.nn.functional import one_hot

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.route = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(6, 10) for _ in range(EXPERTS))

    def forward(self, points):
        probability, chosen = self.route(points).softmax(1).max(1)
        logits = points.new_zeros(len(points), 10)
        for number, expert in enumerate(self.experts):
            logits = logits.index_put((chosen == number,), expert(points[chosen == number]))
        return logits * probability[:, None]


part = torch.zeros(EXPERTS)


def balanced(loss_sum, net, points, part):
    PROBABILITIES
    BALANCE
    return loss_sum
"""


def test_experts_with_a_loss_that_balances_them_are_exact(exact):
    """With the lines that the chapter shows."""
    page = (ROOT / "docs" / "further-tasks.md").read_text()
    lines = [re.search(rf"^({begins} = .*?)(?:  #.*)?$", page, re.M)[1] for begins in ("routed", "probabilities")]
    balance = re.search(r"^loss_sum = loss_sum \+ .*$", page, re.M)[0]
    exact(
        more=CHOSEN.replace("PROBABILITIES", lines[1]).replace("BALANCE", balance.replace("0.01", "0.5")),
        net="Experts()",
        begin=f"global part; {lines[0]}; part = routed / batch.global_count",
        loss="balanced(cross_entropy(model(micro[0]), micro[1], reduction='sum'), net, micro[0], part)",
    )


def test_an_expert_that_gets_nothing_is_moved_by_adamw_alike_on_every_layout(exact):
    """By its weight decay, because its gradient is zeros, and not missing."""
    nobody = CHOSEN.replace(".max(1)", "[:, :3].max(1)").replace("PROBABILITIES", "").replace("BALANCE", "")
    moved = "net.experts[3].weight.abs().sum()"
    exact(more=nobody, net="Experts()", begin=f"before = {moved}", after=f"assert {moved} < before")


def test_other_data_of_the_same_length_on_one_rank_are_named(refused):
    other = "torch.utils.data.Subset(Samples(99), range(worker.rank, 90 + worker.rank))"
    refused("the data is ", "rank 0: every rank must read the same data, in the same order", data=other)


def test_data_that_machines_decode_differently_may_be_named(outputs):
    noisy = "[(point + 1e-12 * worker.rank, label) for point, label in Samples(90)]"
    results, losses = outputs((2, 1), data=noisy, wrap="layout_dependent=['the data']")
    assert [result.code for result in results] == [0, 0] and len(losses) == 9


PACKED = """
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, points, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(points, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])


class Rows(Samples):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point.expand(3, 6), label, 1 + index % 3
"""


def test_packed_sequences_take_a_row_of_length_1_for_an_empty_part(exact):
    exact(
        more=PACKED,
        data="Rows(82)",
        net="Packed()",
        optimizer="torch.optim.AdamW(net.parameters(), 0.2)",
        loss="cross_entropy(model(micro[0], micro[2]), micro[1], reduction='sum')",
        wrap="pad_empty_batch=True",
    )


def test_a_loss_that_fails_on_samples_too_shows_where_it_does(outputs):
    results, _ = outputs((1,), loss="model(micro[0][:, :, 0]).sum()")
    assert "too many indices" in results[0].output and "refuses an empty batch" not in results[0].output
