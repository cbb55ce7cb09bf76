"""Files of others that are wrong as a whole: one line that names the file. Odd ones that are right: read."""

import json
import os
import re
import shutil
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_ddp.finetune import files
from bert_ddp.finetune.data import load as load_task
from bert_ddp.finetune.examples import Text, label_names
from bert_ddp.finetune.sources import DataOptions
from bert_ddp.model.pretrained import open_model, open_pretrained
from bert_ddp.predict.answers import entities
from bert_ddp.text import corpus
from bert_ddp.text.flags import add_corpus_flags, corpus_options
from bert_ddp.text.sources import documents, find_files, odd_files
from bert_ddp.text.vocabulary import SPECIAL
from bert_ddp.text.vocabulary import load as load_vocabulary
from common.compare.run import read_run
from common.errors import LONGEST_MESSAGE, UserError
from common.launch.cli import secret
from common.predict import figures
from common.record import checkpoint
from mnist_ddp import data as mnist
from tests.small_bert import save_model
from tests.test_corpus import folder, load  # noqa: F401


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def without(model, into, *names):
    shutil.copytree(model, into)
    for name in names:
        (into / name).unlink(missing_ok=True)
    return into


# --- a model's folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened_by", [lambda at: open_pretrained(str(at)), lambda at: load_vocabulary(str(at))])
def test_a_folder_without_a_tokenizer_is_refused(opened_by, model, tmp_path):
    bare = without(model, tmp_path / "bare", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(UserError, match=r"bare has no tokenizer: copy tokenizer.json or vocab.txt into it"):
        opened_by(bare)


def test_a_vocabulary_alone_is_a_tokenizer(model, tmp_path):
    whole = open_pretrained(str(model)).tokenizer
    (tmp_path / "words").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, tmp_path / "words" / name)
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(sorted(whole.vocab, key=whole.vocab.get)) + "\n")
    assert open_pretrained(str(tmp_path / "words")).tokenizer("see anna").input_ids == whole("see anna").input_ids


def test_a_vocabulary_without_a_special_word_is_refused_and_not_renumbered(model, tmp_path):
    whole = open_pretrained(str(model)).tokenizer
    words = [word for word in sorted(whole.vocab, key=whole.vocab.get) if word != "[MASK]"]
    lacking = without(model, tmp_path / "lacking", "tokenizer.json")
    (lacking / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(UserError, match=r"lacking: its vocabulary has no \[MASK\]"):
        open_pretrained(str(lacking))


def test_a_tokenizer_without_a_special_word_is_refused(model, tmp_path):
    lacking = without(model, tmp_path / "lacking")
    content = json.loads((lacking / "tokenizer.json").read_text())
    del content["model"]["vocab"]["[MASK]"]
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] != "[MASK]"]
    (lacking / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacking: its vocabulary has no \[MASK\]"):
        open_pretrained(str(lacking))


def test_special_words_may_have_other_names(model, tmp_path):
    at = without(model, tmp_path / "other")
    text = (at / "tokenizer.json").read_text()
    names = {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[UNK]": "<unk>", "[MASK]": "<mask>"}
    settings = json.loads((at / "tokenizer_config.json").read_text())
    for old, new in names.items():
        text = text.replace(old, new)
        settings[f"{old[1:-1].lower()}_token"] = new
    (at / "tokenizer.json").write_text(text)
    (at / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_pretrained(str(at)).tokenizer.mask_token == "<mask>"


def test_a_model_whose_vocabulary_has_a_word_twice_is_read(model, tmp_path):
    whole = open_pretrained(str(model)).tokenizer
    at = without(model, tmp_path / "twice", "tokenizer.json")
    words = sorted(whole.vocab, key=whole.vocab.get)
    (at / "vocab.txt").write_text("\n".join([*words[:-1], words[10]]) + "\n")
    assert open_pretrained(str(at)).tokenizer.mask_token_id == whole.mask_token_id


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number, model, tmp_path):
    start = open_pretrained(str(model))
    net = open_model(str(model), "fill-mask", start.config)
    torch.nn.init.constant_(net.bert.encoder.layer[1].output.dense.bias, number)
    net.save_pretrained(without(model, tmp_path / "failed"))
    with pytest.raises(UserError, match=r"failed: its bert.encoder.layer.1.output.dense.bias holds NaN or infinity"):
        open_model(str(tmp_path / "failed"), "fill-mask", start.config)


def test_a_config_with_fewer_layers_than_the_weights_is_refused(model, tmp_path):
    fewer = without(model, tmp_path / "fewer")
    config = json.loads((fewer / "config.json").read_text()) | {"num_hidden_layers": 1}
    (fewer / "config.json").write_text(json.dumps(config))
    opened = open_pretrained(str(fewer))
    with pytest.raises(UserError, match=r"another model: its config has no place for bert.encoder.layer.1.attention"):
        open_model(opened.source, "fill-mask", opened.config)


HEADS = [
    ({"id2label": {"1": "a", "2": "b"}}, "id2label in its config.json must give each number from 0 on a name"),
    ({"id2label": {"0": "a", "1": "a"}}, "id2label in its config.json must give each number from 0 on a name"),
    ({"id2label": {"0": "a"}}, "has a head for regression: --task classify needs one that chooses"),
    ({"problem_type": "multi_label_classification"}, "has a head for multi_label_classification"),
]


@pytest.mark.parametrize(("values", "said"), HEADS)
def test_a_head_that_chooses_no_class_is_refused(values, said, model, tmp_path):
    at = without(model, tmp_path / "head")
    config = json.loads((at / "config.json").read_text()) | {"architectures": ["BertForSequenceClassification"]}
    (at / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(UserError, match=said):
        open_pretrained(str(at), "classify")


@pytest.mark.parametrize(
    ("tags", "found"),
    [("NOUN NOUN O VERB", ["NOUN", "VERB"]), ("LABEL_2 O LABEL_2", ["LABEL_2"] * 2), ("B-x I-x E-x S-x", ["x"] * 2)],
)
def test_a_tag_without_a_letter_is_a_type_by_itself(tags, found):
    line = "one two three four"[: 13 if tags.count(" ") == 2 else None]
    assert [one["type"] for one in entities(line, list(re.finditer(r"\S+", line)), tags.split())] == found


def with_weights(model, into, change):
    """A copy of the model whose weights `change(weights)` has changed."""
    at = without(model, into)
    weights = load_file(at / "model.safetensors")
    change(weights)
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
    return at


WRONG_WEIGHTS = [
    (lambda at: at["bert.embeddings.LayerNorm.weight"].zero_(), "bert.embeddings.LayerNorm.weight is zero throughout"),
    (lambda at: at["bert.embeddings.word_embeddings.weight"].zero_(), "word_embeddings.weight is zero throughout"),
    (
        lambda at: at.update({"bert.embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.int8)}),
        "bert.embeddings.LayerNorm.bias is of type I8: give weights of floating-point numbers",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG_WEIGHTS)
def test_weights_that_cannot_be_a_models_are_refused_by_name(change, said, model, tmp_path):
    start = open_pretrained(str(model))
    with pytest.raises(UserError, match=rf"--model .*wrong: its .*{said}"):
        open_model(str(with_weights(model, tmp_path / "wrong", change)), "fill-mask", start.config)


def test_weights_of_16_bits_are_read(model, tmp_path):
    at = with_weights(
        model, tmp_path / "half", lambda weights: weights.update({k: v.half() for k, v in weights.items()})
    )
    assert open_model(str(at), "fill-mask", open_pretrained(str(model)).config).dtype == torch.float32


def test_a_vocabulary_with_a_byte_order_mark_is_refused_and_not_renumbered(model, tmp_path):
    at = without(model, tmp_path / "marked", "tokenizer.json", "tokenizer_config.json")
    (at / "vocab.txt").write_bytes(b"\xef\xbb\xbf" + (at / "vocab.txt").read_bytes())
    with pytest.raises(UserError, match=r"marked: vocab.txt begins with a byte order mark"):
        open_pretrained(str(at))


def test_a_word_whose_number_the_model_has_no_place_for_is_refused(model, tmp_path):
    at = without(model, tmp_path / "gap")
    content = json.loads((at / "tokenizer.json").read_text())
    content["model"]["vocab"]["anna"] = 1000
    (at / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"gap: its vocabulary has 1,001 words, but its config says"):
        open_pretrained(str(at))


def test_a_folder_with_one_file_of_a_tokenizer_is_a_vocabulary(model, tmp_path):
    whole = load_vocabulary(str(model)).get_vocab()
    for name in ("vocab.txt", "tokenizer.json"):
        (tmp_path / name).mkdir()
        shutil.copy(model / name, tmp_path / name / name)
        found = load_vocabulary(str(tmp_path / name))
        assert found.get_vocab() == whole and found.mask_token == "[MASK]"


def test_words_that_are_spaces_to_unicode_only_are_words(tmp_path):
    words = [*SPECIAL, "the", "\u3000", "\u2028", "fox"]
    (tmp_path / "vocab.txt").write_bytes("\n".join(words).encode())
    assert sorted(load_vocabulary(str(tmp_path / "vocab.txt")).get_vocab()) == sorted(words)


def test_another_vocabulary_than_that_of_the_model_to_begin_with_is_refused(model, folder, tmp_path):  # noqa: F811
    words = (model / "vocab.txt").read_text().split()
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    flags = ["--corpus", folder / "text.txt", "--cache-dir", tmp_path / "cache", "--sequence-length", 16, "--vocab"]

    def made_with(vocab):
        parser = ArgumentParser()
        add_corpus_flags(parser)
        return corpus.load(corpus_options(parser.parse_args(list(map(str, [*flags, vocab])))), str(model))

    assert made_with(model / "vocab.txt").meta["vocab_size"] == len(words)
    with pytest.raises(
        UserError, match=rf"vocab.txt: word {len(words) - 2} is '{words[-1]}', but '{words[-2]}' in --init"
    ):
        made_with(tmp_path / "vocab.txt")


# --- checkpoints -------------------------------------------------------------------------------------------------


def save(into, net):
    checkpoint.save(into, 7, net, {})
    return checkpoint.find(into)


def test_a_checkpoint_that_is_not_finite_is_refused_by_name(tmp_path):
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.bias, float("nan"))
    with pytest.raises(UserError, match=r"step-00000007.*its bias holds NaN or infinity: the run had failed by then"):
        save(tmp_path, net).load_model(net)


def test_a_checkpoint_whose_weights_are_whole_numbers_is_refused_by_name(tmp_path):
    net = torch.nn.Linear(2, 2)
    at = save(tmp_path, net).path
    save_file({"weight": net.weight.detach(), "bias": torch.zeros(2, dtype=torch.int8)}, at / "model.safetensors")
    with pytest.raises(UserError, match=r"step-00000007.*its bias is of type I8, which loses the digits of weights"):
        checkpoint.Checkpoint(at, {}).load_model(net)


@pytest.mark.parametrize("rate", [-5.0, "fast"])
def test_a_learning_rate_that_cannot_be_is_refused(rate, tmp_path):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    changed = SimpleNamespace(state_dict=lambda: {"state": {}, "param_groups": [{"lr": rate, "params": [0, 1]}]})
    checkpoint.save(tmp_path, 7, torch.nn.Linear(2, 2), {}, optimizer=changed)
    with pytest.raises(UserError, match=r"step-00000007: the part optimizer does not take the state that was saved"):
        checkpoint.find(tmp_path).load_training(optimizer=optimizer)


def test_a_run_may_be_called_as_a_checkpoint_is(tmp_path):
    run = tmp_path / "step-12345678"
    assert checkpoint.find(tmp_path / "step-3") is None
    assert save(run / "checkpoints", torch.nn.Linear(2, 2)) and checkpoint.find(run).state["step"] == 7


@pytest.mark.parametrize(
    ("change", "said"), [({"step": 5}, "gives step 5"), ({"checksums": {}}, "has no checksum of model.safetensors")]
)
def test_a_state_that_was_edited_is_refused(change, said, tmp_path):
    at = save(tmp_path, torch.nn.Linear(2, 2)).path
    (at / "state.json").write_text(json.dumps(json.loads((at / "state.json").read_text()) | change))
    with pytest.raises(UserError, match=rf"step-00000007: state.json {said}"):
        checkpoint.find(at)


# --- texts -------------------------------------------------------------------------------------------------------


def test_labels_that_are_numbers_to_unicode_only_are_names():
    texts = [Text("a", None, label, "x") for label in ("②", "10", "①", "²", "9", "1" * 5000)]
    assert label_names(texts) == ["9", "10", "1" * 5000, "²", "①", "②"]


@pytest.mark.parametrize("field", ["text", "label"])
def test_half_a_character_is_refused_with_its_line(field, tmp_path):
    row = {"text": "the", "label": "x"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {field: chr(0xD83D)})}\n")
    with pytest.raises(UserError, match=r"a.jsonl, line 2: half a character"):
        list(files.read_records(tmp_path / "a.jsonl"))


def test_both_halves_are_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\U0001f600"}))
    assert [row for _, row in files.read_records(tmp_path / "a.jsonl")] == [{"text": "\U0001f600"}]


WRONG_ROWS = [
    ("a.jsonl", '[\n{"text": "the"}\n]', r"line 1: this is not JSON: .*: write one object for each line"),
    ("a.jsonl", '[{"text": "the"}]', r"line 1: this is not a JSON object: write one object for each line"),
    ("a.jsonl", '{"text": "the"}\n{"text": "a", "text": "b"}', r"line 2: this is not JSON: an object has 'text' twice"),
    ("a.jsonl", '{"a": {"b": 1, "b": 1}}', r"line 1: this is not JSON: an object has 'b' twice"),
    ("a.jsonl", "<html></html>", r"line 1: this is not JSON: .*: it is HTML"),
    ("a.csv", 'text,label\nthe,x\n"fox,x\nthe,x\n', r"line 3: a quote that begins in this row is never closed"),
    ("a.csv", 'text,label\n"fox,x\nthe,x\n', r"line 2: a quote that begins in this row is never closed"),
    ("a.tsv", "text\tlabel\nthe\tx\ntext\tlabel\nfox\ty\n", r"line 3: the header once more: remove it"),
]


@pytest.mark.parametrize(("name", "content", "said"), WRONG_ROWS)
def test_what_is_no_table_and_no_json_lines_is_said_with_its_line_and_what_to_do(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}, {said}"):
        list(files.read_records(tmp_path / name))


def test_a_pipe_that_nobody_writes_into_is_refused_where_a_file_is_read_more_than_once(tmp_path):
    for name in (*mnist.FILES, "text.txt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte is a pipe: give a file, which can be read again"):
        mnist._read(tmp_path)
    with pytest.raises(UserError, match=r"--corpus .*text.txt is a pipe: give a file"):
        find_files([str(tmp_path / "text.txt")])


def test_a_pipe_that_nobody_writes_into_is_refused_after_a_while_where_it_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("common.files.PIPE_SECONDS", 0.01)
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(UserError, match=r"a.csv is a pipe into which nobody has written for 0 s: give a file"):
        list(files.read_records(tmp_path / "a.csv"))
    with pytest.raises(UserError, match=r"--secret-file .*a.csv is a pipe into which nobody has written"):
        secret(tmp_path / "a.csv")


def test_labels_may_come_from_a_pipe(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"anna B-person\n")
    os.close(writing)
    assert [one.words for one in files.read_conll(Path(f"/dev/fd/{reading}"))] == [["anna"]]
    os.close(reading)


def test_a_folder_without_data_files_is_named_and_not_the_hub(tmp_path):
    with pytest.raises(UserError, match=rf"hf:{tmp_path} cannot be read: .*: put files such as train.csv"):
        load_task(DataOptions("classify", f"hf:{tmp_path}"), None, 16)
    with pytest.raises(UserError, match=rf"--corpus hf:{tmp_path} could not be loaded .*: put files such as"):
        next(documents([f"hf:{tmp_path}"]))


def test_test_images_that_are_a_part_of_the_training_images_are_refused(tmp_path, monkeypatch):
    images, labels = torch.randint(256, (40, 8, 8), dtype=torch.uint8), torch.arange(40) % 10
    parts = {"split": [(images, labels), (images[:20], labels[:20])], "own": [(images, labels), (255 - images, labels)]}
    monkeypatch.setattr(mnist, "_from_torchvision", lambda name, where: parts[name])
    mnist.load("own", tmp_path, torch.float32)
    with pytest.raises(UserError, match=rf"--data-dir {tmp_path}: the test images are among the training images"):
        mnist.load("split", tmp_path, torch.float32)


@pytest.mark.parametrize("what", ["training", "test"])
def test_labels_that_belong_to_other_images_are_said_in_the_header(what, tmp_path, monkeypatch):
    train, test = mnist._digits()
    mixed = {"training": [(train[0].flip(0), train[1]), test], "test": [train, (test[0], test[1].roll(1))]}
    monkeypatch.setattr(mnist, "_from_torchvision", lambda name, where: mixed[what])
    assert f"; note: do the {what} labels belong to these images?" in mnist.load(what, tmp_path, torch.float32)[0].odd
    assert mnist.load("digits", tmp_path, torch.float32)[0].odd == ""


@pytest.mark.parametrize("suffix", [".txt", ""])
@pytest.mark.parametrize(
    "content", ['\ufeff{ "text": "a"}', "<!DOCTYPE html>", '  <?xml version="1.0"?>', '[\n {"a": 1}]']
)
def test_text_that_is_structured_by_its_content_is_said_to_be_read_as_plain(suffix, content, tmp_path):
    (tmp_path / f"a{suffix}").write_text(content)
    (said,) = odd_files([tmp_path / f"a{suffix}"], [])
    assert "is read as plain text, with all its marks" in said


@pytest.mark.parametrize("inside", ["", "best/step-00000001"])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_of_a_model_is_named(name, inside, model, tmp_path):
    (tmp_path / "piped" / inside).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(without(model, tmp_path / "piped" / inside, name) / name)
    with pytest.raises(UserError, match=rf"--model .*piped/.*{name} is a pipe: give a file"):
        open_pretrained(str(tmp_path / "piped"))


def test_a_pipe_beside_the_files_of_a_model_is_left_alone(model, tmp_path):
    os.mkfifo(without(model, tmp_path / "beside") / "log.pipe")
    assert open_pretrained(str(tmp_path / "beside")).config.model_type == "bert"


@pytest.mark.parametrize("wrong", ["NaN", "-3", "Infinity"])
def test_figures_that_cannot_be_are_refused(wrong, tmp_path):
    links = f'[{{"mbit_per_second": {wrong}, "latency_ms": 1}}]'
    (tmp_path / "a.json").write_text(f'{{"layout": {{"gpus_per_node": [1, 1]}}, "links": {links}, "all_reduce": []}}')
    with pytest.raises(UserError, match=r"--doctor .*a.json: it says that .* was measured: give what"):
        figures.of_doctor(tmp_path / "a.json")


def test_a_folder_without_the_data_of_a_role_is_named_with_what_it_holds(tmp_path):
    (tmp_path / "train.csv.gz").write_text("")
    options = DataOptions("classify", str(tmp_path))
    with pytest.raises(UserError, match=rf"no train data in --data {tmp_path}, which holds train.csv.gz: name a file"):
        load_task(options, None, 16)


@pytest.mark.parametrize("loss", ['"text"', "[1]"])
def test_a_loss_that_is_no_number_is_refused_by_step(loss, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 3, "loss": {loss}}}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: the loss of step 3 is .*, and no number"):
        read_run(tmp_path)


TWICE = '{"kind": "train", "step": 3, "loss": 2.0}\n{"kind": "train", "step": 3, "loss": 1.0}\n'
ENDED = '{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "summary", "step": 1}\n'
NOT_OF_A_RUN = [
    (TWICE, "the train row of step 3 is there twice, with losses 2.0 and 1.0: is it of two runs?"),
    ('{"kind": "train", "step": -3, "loss": 2.0}\n', "the train row of step -3 has a number that no run writes"),
    ('{"kind": "train", "step": 3, "loss": 1' + "0" * 400 + "}\n", "step 3 has a number that no run writes"),
    ('{"kind": "train", "step": 3, "loss": null}\n', "has no losses of training steps"),
    ('{"kind": ["train"], "step": 3}\n', "line 1 is no row of a run"),
    ('{"kind": "ranks", "step": 3, "training_seconds": []}\n', "line 1 is no row of a run"),
    ("version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    (ENDED + ENDED, "begins again at step 1 after a run has ended in it: is it of two runs?"),
]


@pytest.mark.parametrize(("content", "said"), NOT_OF_A_RUN)
def test_rows_that_no_run_has_written_are_refused(content, said, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"metrics.jsonl.*{re.escape(said)}"):
        read_run(tmp_path)


def test_a_last_row_without_a_line_end_is_read_where_it_is_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('\ufeff{"kind": "train", "step": 3, "loss": 2.0}')
    assert read_run(tmp_path).train[3]["loss"] == 2.0


@pytest.mark.parametrize("gpus", ['"11"', "[1.0, 1.0]", "[3, -1]", "[1000000000]", "[[1]]"])
def test_processes_of_nodes_that_cannot_be_are_refused(gpus, tmp_path):
    (tmp_path / "a.json").write_text(f'{{"layout": {{"gpus_per_node": {gpus}}}, "links": [], "all_reduce": []}}')
    with pytest.raises(UserError, match=r"--doctor .*a.json: it says that the nodes have .* processes: give what"):
        figures.of_doctor(tmp_path / "a.json")


@pytest.mark.parametrize("size", [-4, "NaN"])
def test_an_all_reduce_of_no_size_is_refused(size, tmp_path):
    row = f'{{"bytes": {size}, "ms": 1}}'
    (tmp_path / "a.json").write_text(f'{{"layout": {{"gpus_per_node": [1]}}, "links": [], "all_reduce": [{row}]}}')
    with pytest.raises(UserError, match=r"--doctor .*a.json: it says that .* was measured"):
        figures.of_doctor(tmp_path / "a.json")


def test_other_spaces_of_unicode_are_within_a_word(tmp_path):
    (tmp_path / "a.conll").write_text("10\u00a0000 B-sum\nof\tO\n\u2028\n\nrice\u2009 O\n")
    assert [one.words for one in files.read_conll(tmp_path / "a.conll")] == [["10\u00a0000", "of"], ["rice\u2009"]]


def test_a_line_of_a_data_set_ends_where_a_line_of_a_file_does(tmp_path):
    rows = ["one\u2028two\r\nthree\n", "", "four\n\nfive"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert list(documents([f"hf:{tmp_path}"])) == ["one\u2028two\nthree", "four", "five"]


def test_a_copy_of_a_file_is_found_by_its_content(tmp_path):
    first, copy, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    for path, text in ((first, "the fox"), (copy, "the fox"), (other, "the dog")):
        path.write_text(text)
    assert list(odd_files([first], [other])) == []
    assert "b.txt, which has the content of" in next(odd_files([copy], [first]))
    assert "is in --corpus too: what is held out of the one is trained on" in next(odd_files([first, other, copy], []))


def test_a_suffix_may_be_in_capitals(tmp_path):
    (tmp_path / "a.CSV").write_text("text,label\nthe,x\n")
    assert [row for _, row in files.read_records(tmp_path / "a.CSV")] == [{"text": "the", "label": "x"}]


def test_a_corpus_folder_stands_for_all_files_below_it_through_links_too(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for file in ("corpus/a.txt", "corpus/b.TXT", "corpus/c.md", "elsewhere/d.txt"):
        (tmp_path / file).write_text("words")
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    found = find_files([str(tmp_path / "corpus")])
    assert [file.name for file in found] == ["a.txt", "b.TXT", "d.txt"]


def test_a_link_to_a_text_that_is_gone_is_not_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    assert tmp_path / "b.txt" in find_files([str(tmp_path)])


@pytest.mark.parametrize("part", ["meta.json", "train.arrow", "continues.npy", "tokenizer"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_cache_is_one_line_that_says_what_to_remove(part, damage, folder, tmp_path):  # noqa: F811
    flags = ("--sequence-length", 16, "--vocab-size", 300, "--cache-dir", tmp_path)
    at = load(folder, *flags).folder
    if (at / part).is_dir():
        shutil.rmtree(at / part)
    elif damage == "missing" and part != "meta.json":  # without it, the cache is made again
        (at / part).unlink()
    else:
        (at / part).write_bytes((at / part).read_bytes()[:20])
    with pytest.raises(UserError, match=rf"{at} of --cache-dir is damaged .*: remove it, and it is made again"):
        load(folder, *flags)


def test_a_message_that_quotes_a_whole_file_is_cut_in_its_middle():
    message = str(UserError(f"a.txt, line 1: {'x' * 100_000} is not a label"))
    assert len(message) < LONGEST_MESSAGE + 10
    assert message.startswith("a.txt, line 1: xx") and message.endswith("xx is not a label")
