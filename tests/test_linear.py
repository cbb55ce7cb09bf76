"""Our linear layers on CPUs compute by oneDNN what torch's compute."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from bert_ddp.cpu.linear import ONEDNN, Linear, replace_linear


def a_layer_and_its_twin(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    torchs = nn.Sequential(nn.Linear(48, 80, bias=bias)).to(dtype)
    ours = nn.Sequential(nn.Linear(48, 80, bias=bias)).to(dtype)
    ours.load_state_dict(torchs.state_dict())
    replace_linear(ours)
    assert type(ours[0]) is Linear
    return torchs, ours


def results(net, states):
    """Output and all gradients of a loss that weighs each output differently."""
    states = states.clone().requires_grad_()
    output = net(states)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    return [output, states.grad, *(parameter.grad for parameter in net.parameters() if parameter.requires_grad)]


@pytest.mark.skipif(not ONEDNN, reason="this torch was built without oneDNN")
def test_in_fp32_the_product_is_onednn_s():
    _, ours = a_layer_and_its_twin()
    with torch.profiler.profile() as profile:
        ours(torch.randn(9, 48))
    assert "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}


def test_a_compiled_model_is_one_graph_and_torch_s_own():
    torchs, ours = a_layer_and_its_twin()
    states = torch.randn(9, 48)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert torch.equal(compiled(states), torchs(states))


@pytest.mark.parametrize("shape", [(33, 48), (5, 7, 48), (48,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_torch_s(bias, shape):
    torchs, ours = a_layer_and_its_twin(bias)
    states = torch.randn(shape)
    for expected, found in zip(results(torchs, states), results(ours, states), strict=True):
        assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4)


def test_a_frozen_weight_gets_no_gradient_and_its_input_does():
    torchs, ours = a_layer_and_its_twin()
    for net in (torchs, ours):
        net[0].weight.requires_grad_(False)
    states = torch.randn(9, 48)
    for expected, found in zip(results(torchs, states), results(ours, states), strict=True):
        assert torch.allclose(found, expected, atol=1e-4)
    assert ours[0].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_other_precisions_they_are_torch_s_to_the_bit(dtype):
    torchs, ours = a_layer_and_its_twin(dtype=dtype)
    states = torch.randn(33, 48, dtype=dtype)
    for expected, found in zip(results(torchs, states), results(ours, states), strict=True):
        assert torch.equal(found, expected)


def test_under_autocast_the_product_is_in_bfloat16():
    torchs, ours = a_layer_and_its_twin()
    states = torch.randn(33, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(states), torchs(states)) and ours(states).dtype == torch.bfloat16


def test_no_rows_give_no_rows_and_gradients_of_zeros():
    torchs, ours = a_layer_and_its_twin()
    for net in (torchs, ours):
        output, *gradients = results(net, torch.zeros(0, 48))
        assert output.shape == (0, 80) and not any(gradient.any() for gradient in gradients)


def test_tied_weights_stay_tied():
    net = BertForMaskedLM(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    replace_linear(net)
    assert type(net.cls.predictions.decoder) is Linear
    assert net.cls.predictions.decoder.weight is net.bert.embeddings.word_embeddings.weight
