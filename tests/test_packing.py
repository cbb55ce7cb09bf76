"""Rows packed one after the other, without padding, give what they give in a padded batch."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer, BertForTokenClassification

from bert_ddp.cpu.dropout import replace_dropout, use_own_attention
from bert_ddp.cpu.packing import PackedBatch, Packing, choose_packed_passes, packed_passes
from bert_ddp.finetune.passes import choose_passes
from bert_ddp.finetune.rows import IGNORE, Rows
from bert_ddp.model.pretrained import files_of
from tests.small_bert import save_model

LENGTHS = [3, 17, 9, 9, 17, 4, 1, 16, 12]


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    net = BertForTokenClassification.from_pretrained(save_model(tmp_path_factory.mktemp("model")), num_labels=4)
    choose_packed_passes(net)
    replace_dropout(net)
    use_own_attention(net)
    return net.double()


@pytest.fixture(scope="module", params=[False, True], ids=["one-text", "pairs"])
def rows(request):
    draw = np.random.default_rng(0)
    tokens = [draw.integers(5, 50, length).tolist() for length in LENGTHS]
    labels = [draw.integers(0, 4, length).tolist() for length in LENGTHS]
    labels[1][3] = labels[2][0] = labels[6][0] = IGNORE  # the whole of a row of one token
    segments = [[0] * 1 + [1] * (length - 1) for length in LENGTHS] if request.param else None
    return Rows(tokens, labels, segments, 0, [2, 3])


def gradients(net, passes):
    """Summed loss and all gradients of some passes."""
    net.zero_grad()
    total = 0.0
    for batch, _ in passes:
        logits = net(**batch.inputs()).logits
        loss = cross_entropy(logits.flatten(0, -2), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_loss_and_gradients_are_those_of_padded_rows(micro_batch, net, rows):
    net.eval()  # without dropout
    part = rows.get_batch(range(len(LENGTHS)))
    loss, found = gradients(net, packed_passes(part, micro_batch))
    expected_loss, expected = gradients(net, ((rows.batch(np.array([row])), True) for row in range(len(LENGTHS))))
    assert loss == pytest.approx(expected_loss, abs=1e-10)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_every_row_is_in_one_pass_and_the_last_is_marked(rows):
    passes = list(packed_passes(rows.get_batch(range(len(LENGTHS))), 4))
    assert sorted(row for batch, _ in passes for row in batch.rows.tolist()) == list(range(len(LENGTHS)))
    assert [is_last for _, is_last in passes] == [False, False, True]
    assert sum(batch.tokens.numel() for batch, _ in passes) == sum(LENGTHS)


def test_an_empty_part_is_the_stand_in(rows):
    ((batch, is_last),) = packed_passes(rows.get_batch([]), None)
    assert is_last and not isinstance(batch, PackedBatch) and batch.labels.eq(IGNORE).all()


def test_groups_hold_every_token_once():
    lengths = np.sort(np.array(LENGTHS))[::-1]
    groups = Packing.of(lengths, np.ones(lengths.sum(), dtype=bool)).groups
    for group in groups:
        assert group.places[group.tokens].tolist() == list(range(group.size))
    assert sum(group.size for group in groups) == lengths.sum()


def test_packed_rows_have_dropout_too(net, rows):
    net.train()
    part = rows.get_batch(range(len(LENGTHS)))
    torch.manual_seed(0)
    assert gradients(net, packed_passes(part, None))[0] != gradients(net, packed_passes(part, None))[0]


@pytest.mark.parametrize(("device_type", "compiled"), [("cuda", False), ("cpu", True)])
def test_on_a_gpu_and_in_compiled_models_nothing_is_packed(device_type, compiled, rows, tmp_path):
    net = BertForTokenClassification.from_pretrained(save_model(tmp_path), num_labels=4)
    cut = choose_passes(net, rows, torch.device(device_type), compiled)
    assert type(net) is BertForTokenClassification
    assert not any(isinstance(batch, PackedBatch) for batch, _ in cut(rows.get_batch(range(len(LENGTHS))), None))


def test_a_model_that_takes_packed_rows_is_saved_as_transformers_own(net, tmp_path):
    files_of(net, AutoTokenizer.from_pretrained(save_model(tmp_path / "model")))(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["BertForTokenClassification"]
