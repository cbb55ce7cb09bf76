"""The model computes less than `transformers` does, and the same numbers; checkpoints are `transformers`' folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert_ddp.model import pretrained, speed
from bert_ddp.pretrain import model as bert
from common.errors import UserError
from common.uneven.options.empty_batches import EmptyPartsApart
from tests.harness import BERT, Node, nodes_of, play, playing, weights
from tests.small_bert import save_model

CONFIG = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
META = {"vocab_size": 90, "sequence_length": 16, "special": {"pad": 0}}


def options(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 90}))
    values = {"objective": "mlm", "dropout": 0.0, "config_file": tmp_path / "config.json"}
    return bert.ModelOptions(**{**values, "preset": "tiny", "checkpoint_activations": False, **changes})


@pytest.fixture(params=[False, True], ids=["plain", "tuned"])
def build(request):
    """Builds a model, as it is or tuned for CPUs."""

    def build(options):
        net = bert.build(options, META)
        if request.param:
            speed.tune(net, torch.device("cpu"), same_sizes=True)
        return net

    return build


def inputs(rows):
    ids = torch.randint(5, 90, (rows, 16))
    positions = torch.stack([torch.randperm(16)[:3] for _ in range(rows)]) if rows else ids[:, :3]
    return {"input_ids": ids, "token_type_ids": (ids > 40).long(), "attention_mask": None, "positions": positions}


@pytest.mark.parametrize("objective", ["mlm", "mlm+nsp"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_at_masked_positions_are_those_of_transformers(objective, padded, build, tmp_path):
    net = build(options(tmp_path, objective=objective)).double()
    given = inputs(4)
    if padded:
        given["attention_mask"] = torch.arange(16) < torch.tensor([16, 9, 12, 16])[:, None]
    stock = type(net).__bases__[1](net.config).double()
    stock.load_state_dict(net.state_dict())
    words, follows = net(**given)
    full = stock(**{name: value for name, value in given.items() if name != "positions"})
    expected = full.logits if objective == "mlm" else full.prediction_logits
    rows = torch.arange(4)[:, None]
    assert torch.allclose(words, expected[rows, given["positions"]].flatten(0, 1), atol=1e-12)
    assert (follows is None) == (objective == "mlm")
    if follows is not None:
        assert torch.allclose(follows, full.seq_relationship_logits, atol=1e-12)


def sum_of(outputs):
    """A scalar that depends on all outputs."""
    return torch.stack([output.sum() for output in outputs if output is not None]).sum()


@pytest.mark.parametrize("objective", ["mlm", "mlm+nsp"])
def test_zero_rows_give_zero_gradients_to_every_weight(objective, build, tmp_path):
    net = build(options(tmp_path, objective=objective))
    sum_of(EmptyPartsApart(net, compiled=False, pad_empty_batch=True)(**inputs(0))).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


def test_zero_rows_go_through_a_language_model_of_transformers_as_it_is():
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    ids = torch.empty(0, 12, dtype=torch.int64)
    output = EmptyPartsApart(net, compiled=False, pad_empty_batch=True)(
        input_ids=ids, labels=ids
    )  # it keeps a cache too
    assert output.loss == 0 and output.logits.shape == (0, 12, 50)
    (output.loss + output.logits.sum()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


def test_checkpointed_activations_give_the_same_gradients(build, tmp_path):
    given, found = inputs(4), []
    for again in (False, True):
        torch.manual_seed(0)
        net = build(options(tmp_path, checkpoint_activations=again, dropout=0.1))
        sum_of(net(**given)).backward()
        found.append(net.bert.embeddings.word_embeddings.weight.grad)
    assert torch.allclose(*found, atol=1e-6)


def test_weight_tying_survives(build, tmp_path):
    net = build(options(tmp_path))
    assert net.cls.predictions.decoder.weight is net.bert.embeddings.word_embeddings.weight


# --- checkpoints --------------------------------------------------------------------------------------------------

FLAGS = ("--dropout", 0, "--vocab-size", 300, "--global-batch", 32)


@pytest.fixture(scope="module")
def phase_1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phase-1")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    play(
        *(BERT, (2,), folder / "run", *FLAGS, "--config-file", folder / "config.json", "--cache-dir", folder / "cache"),
        *("--max-steps", 2, "--sequence-length", 32),
    )
    return folder


def test_a_checkpoint_is_a_folder_that_transformers_loads_as_it_is(phase_1):
    folder = phase_1 / "run" / "checkpoints" / "latest"
    loaded, info = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved = weights(phase_1 / "run")
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight, saved["bert.embeddings.word_embeddings.weight"])
    fill_mask = transformers.pipeline("fill-mask", model=str(folder), device="cpu")
    assert len(fill_mask("the [MASK] statement")) == 5


def test_phase_2_begins_with_the_weights_and_the_words_of_phase_1_at_another_length(phase_1):
    start = phase_1 / "run"
    play(
        *(BERT, (1,), phase_1 / "run-2", *FLAGS, "--cache-dir", phase_1 / "cache", "--init-from", start),
        *("--sequence-length", 64, "--max-steps", 1, "--lr", "1e-12"),
    )
    before, after = weights(phase_1 / "run"), weights(phase_1 / "run-2")
    assert max((before[name] - after[name]).abs().max().item() for name in before) < 1e-6
    assert json.loads((phase_1 / "run-2/checkpoints/latest/config.json").read_text())["vocab_size"] == 300


def test_a_wrong_corpus_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "empty.txt").touch()
    flags = ["-g", 1, "--device", "cpu", "--corpus", tmp_path / "empty.txt", "--cache-dir", tmp_path]
    (done,) = playing(BERT, [Node(flags)], tmp_path).results()
    assert done.code == 2
    assert f"error: --corpus {tmp_path / 'empty.txt'} is empty" in done.output and "Traceback" not in done.output


def refused_start(phase_1, start, tmp_path) -> str:
    """What a run that begins from `start` says as it ends with exit code 2."""
    words = phase_1 / "run/checkpoints/latest"
    flags = (*FLAGS, "--cache-dir", phase_1 / "cache", "--sequence-length", 32, "--vocab", words)
    (node,) = playing(BERT, nodes_of((2,), tmp_path, *flags, "--init-from", start), tmp_path).results()
    assert node.code == 2 and "Traceback" not in node.output, node.output
    assert node.output.count("error:") == 1, node.output
    return node.output


def test_weights_of_another_architecture_or_cut_in_half_are_refused_in_one_line(phase_1, tmp_path):
    latest = (phase_1 / "run/checkpoints/latest").resolve()
    for name in ("other", "half"):
        shutil.copytree(latest, tmp_path / name)
    file = "model.safetensors"
    other = {key.replace("bert.", "distilbert."): value for key, value in load_file(latest / file).items()}
    save_file(other, tmp_path / "other" / file, metadata={"format": "pt"})
    (tmp_path / "half" / file).write_bytes((latest / file).read_bytes()[:1000])
    said = refused_start(phase_1, tmp_path / "other", tmp_path)
    assert f"--init-from {tmp_path / 'other'}: its weights belong to another model: it has no bert." in said
    said = refused_start(phase_1, tmp_path / "half", tmp_path)
    assert f"--init-from {tmp_path / 'half'} cannot be loaded" in said


# --- a model's files as they are found ------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DAMAGED = [
    ("pytorch_model.bin", POINTER, "pytorch_model.bin is a git-lfs pointer .*`git lfs pull`"),
    ("pytorch_model.bin", b"\x80\x02damaged", "cannot be loaded: its weights are not whole"),
    ("model.safetensors", POINTER, "model.safetensors is a git-lfs pointer .*`git lfs pull`"),
    ("tokenizer.json", POINTER, "tokenizer.json is a git-lfs pointer .*`git lfs pull`"),
    ("tokenizer.json", b'{"a": 1}', "cannot be loaded: KeyError: 'added_tokens'"),
    ("config.json", b'{"model_type": "bert", "hidden_size": "x"}', "hidden_size.*expected int, got str"),
    ("config.json", b"[1]", "should have a `model_type` key"),
]


@pytest.mark.parametrize("name, content, said", DAMAGED)
def test_what_is_wrong_with_a_model_s_file_is_one_line_without_advice_to_run_it(name, content, said, tmp_path):
    folder = save_model(tmp_path)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"(?i){said}") as error:
        config = pretrained.open_config(str(folder))
        pretrained.open_tokenizer(str(folder), config)
        pretrained.open_model(str(folder), "fill-mask", config)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


@pytest.mark.parametrize("layout", ["a folder", "a file", "missing"])
def test_a_run_whose_links_were_not_copied_is_still_a_model(layout, tmp_path):
    step = save_model(tmp_path / "run" / "best" / "step-00000007")
    latest = step.with_name("latest")
    if layout == "a folder":
        step.rename(latest)
    elif layout == "a file":
        latest.write_text(step.name)
    assert (Path(pretrained.locate(str(tmp_path / "run"))) / "config.json").is_file()


CONFIGS = [
    '{"num_hidden_layers": 0}',
    '{"intermediate_size": 0}',
    '{"hidden_act": "gleu"}',
    '{"layer_norm_eps": -1}',
    '{"hidden_dropout_prob": NaN}',
    '{"type_vocab_size": 0}',
    '{"num_attention_heads": 0}',
    '{"hidden_size": null}',
    '{"vocab_size": 1e400}',
    '{"is_decoder": true}',
    '{"initializer_range": 1e9}',
    '{"intermediate_size": 10000000000000}',
    '{"num_hidden_layers": 10000000000000}',
    "[" * 100_000,
    "\ufeff[1]",
]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_file_that_makes_no_bert_is_one_line(text, tmp_path):
    wanted = options(tmp_path, dropout=None)
    whole = json.loads((tmp_path / "config.json").read_text())
    text = json.dumps(whole | json.loads(text)) if text.startswith("{") else text
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json") as error:
        bert.build(wanted, META)
    assert "\n" not in str(error.value)


def test_a_size_that_a_config_file_lacks_is_not_that_of_another_model(tmp_path):
    wanted = options(tmp_path)
    text = (tmp_path / "config.json").read_text().replace("num_hidden_layers", "num_hiden_layers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json has no num_hidden_layers"):
        bert.build(wanted, META)


def test_a_config_file_that_has_a_size_twice_is_refused(tmp_path):
    wanted = options(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"hidden_size": 64, ', 1))
    with pytest.raises(UserError, match=r"config\.json is not JSON: an object has 'hidden_size' twice"):
        bert.build(wanted, META)


def test_a_name_longer_than_the_system_takes_is_one_line():
    with pytest.raises(UserError, match=r"--model .* cannot be read: File name too long"):
        pretrained.locate("x" * 300)
