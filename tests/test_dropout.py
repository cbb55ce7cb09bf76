"""Our dropout on CPUs draws four elements at once and must be dropout all the same."""

import pytest
import torch
from torch.nn.functional import dropout, softmax
from transformers import BertForTokenClassification

from bert_ddp.cpu.dropout import NAME, Dropout, attention, drop, replace_dropout, use_own_attention
from tests.small_bert import save_model


def ones(count, **options):
    torch.manual_seed(0)
    return torch.ones(count, dtype=torch.float64, **options)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_each_of_the_four_elements_of_a_draw_is_zeroed_with_the_probability(probability):
    zeroed = (drop(ones(400_000), probability) == 0).view(-1, 4).double().mean(dim=0)
    deviation = (probability * (1 - probability) / 100_000) ** 0.5
    assert (zeroed - probability).abs().max() < 5 * deviation


def test_the_elements_of_a_draw_are_zeroed_independently():
    zeroed = (drop(ones(400_000), 0.5) == 0).view(-1, 4).double()
    assert (torch.corrcoef(zeroed.T) - torch.eye(4)).abs().max() < 5 / 100_000**0.5


def test_the_mean_stays():
    assert drop(ones(400_000), 0.1).mean().item() == pytest.approx(1, abs=5 * (0.1 / 0.9 / 400_000) ** 0.5)


def test_what_is_zeroed_has_no_gradient_and_the_rest_the_scale():
    states = ones(10_001, requires_grad=True)  # no multiple of four
    dropped = drop(states, 0.3)
    dropped.sum().backward()
    assert torch.equal(states.grad, dropped.detach())


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_all_or_nothing_is_torch_s(probability):
    assert torch.equal(drop(ones(10), probability), dropout(ones(10), probability))


def test_zero_rows_stay_zero_rows():
    assert drop(torch.ones(0, 7), 0.1).shape == (0, 7)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_drops_from_the_softmax_and_sees_nothing_masked(masked):
    torch.manual_seed(1)
    query, key = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in "qk")
    mask = torch.arange(8) < torch.tensor([8, 5])[:, None, None, None] if masked else None
    identity = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)  # as values, it shows the weights
    weights = attention(query, key, identity, mask, 0.25)
    scores = query @ key.transpose(-1, -2) / 2  # sqrt(D) is 2
    full = softmax(scores if mask is None else scores.masked_fill(~mask, float("-inf")), dim=-1)
    kept = weights != 0
    assert torch.allclose(weights[kept], full[kept] / 0.75)
    seen = full > 0
    assert 0.6 < kept[seen].double().mean() < 0.9
    assert torch.allclose(attention(query, key, identity, mask, 0.0), full)


def test_a_model_of_transformers_computes_the_same_with_it_and_is_saved_without_it(tmp_path):
    net = BertForTokenClassification.from_pretrained(save_model(tmp_path / "model")).eval()
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    before = net(ids, attention_mask=mask).logits
    use_own_attention(net)
    assert torch.allclose(net(ids, attention_mask=mask).logits, before, atol=1e-6)
    torch.manual_seed(0)
    assert not torch.allclose(net.train()(ids, attention_mask=mask).logits, before, atol=1e-3)
    net.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()


def test_every_dropout_of_a_model_is_replaced_and_silent_in_evaluation():
    net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Sequential(torch.nn.Dropout(0.3)))
    replace_dropout(net)
    assert [type(net[0]), type(net[1][0])] == [Dropout, Dropout]
    assert torch.equal(net.eval()(ones(9)), ones(9))
