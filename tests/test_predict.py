"""Prediction: every line answered once, in order, the same on every layout, and nothing done twice."""

import json
import os
import random
import re

import pytest
import torch

from bert_ddp.model import pretrained
from bert_ddp.predict.answers import Answerer
from bert_ddp.predict.lines import odd, open_lines
from common.errors import RunError, UserError
from common.run.precision import Precision
from tests.harness import FINETUNE, PREDICT, Node, nodes_of, play, playing, wait_until
from tests.small_bert import save_classes, save_model, save_ner, sentences

LINES = 1001


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """1,001 lines, some empty, some with a [MASK], some longer than the model reads, with characters that end lines."""
    draw = random.Random(0)
    lines = [" ".join(word for word, _ in pairs) for pairs in sentences(LINES, seed=9)]
    for index in draw.sample(range(LINES), 100):
        lines[index] = draw.choice(
            ["", "anna went to [MASK] .", "late " * 90, "rome\u2028rio \x0b \x85 ben", "[SEP] paris"]
        )
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_bytes("\n".join(lines).encode())  # the last line has no end
    return path, lines


def nodes(gpus, folder, model, text, task, *flags):
    """bert-predict.py's flags on each node, each node with a folder of its own, as on two machines."""
    folder.mkdir(parents=True, exist_ok=True)
    result = []
    for number, node in enumerate(nodes_of(gpus, folder)):
        own = node.flags[: node.flags.index("--out-dir")]
        files = ["--input", text[0], "--output", folder / f"node{number}" / "answers.jsonl"]
        result.append(Node([*own, "--task", task, "--model", model, *files, "--chunk", 32, *flags]))
    return result


def predict(gpus, folder, model, text, task="embed", *flags):
    """(rows of the answers, what node 0 said)."""
    results = playing(PREDICT, nodes(gpus, folder, model, text, task, *flags), folder).results()
    for result in results:
        assert result.code == 0, result.output
    rows = [json.loads(line) for line in (folder / "node0" / "answers.jsonl").open(encoding="utf-8")]
    assert [row["line"] for row in rows] == list(range(1, LINES + 1))
    assert not list(folder.glob("node*/*.parts-*"))
    return rows, results[0].output


def test_uneven_ranks_without_a_shared_folder_answer_as_one_process_does(model, text, tmp_path):
    alone, _ = predict((1,), tmp_path / "one", model, text)
    together, output = predict((3, 1), tmp_path / "four", model, text)
    assert together == alone
    assert ", 0 sent over the network" not in output


@pytest.mark.parametrize("task", ["embed", "fill-mask"])
def test_answers_that_are_no_numbers_are_refused(task, model):
    found = pretrained.open_pretrained(str(model), task)
    net = pretrained.open_model(found.source, task, found.config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1e30)
    answerer = Answerer(task, net, found.tokenizer, Precision("fp32", torch.device("cpu")), 4, 16, 2)
    with pytest.raises(RunError, match="the model's answers are NaN or infinity in fp32: are its weights damaged"):
        answerer.answer(["anna went to [MASK] ."])


def test_through_a_shared_folder_nothing_is_sent(model, text, tmp_path):
    rows, output = predict(
        (2, 1), tmp_path, model, text, "fill-mask", "--shared-dir", tmp_path / "shared", "--top-k", 3
    )
    assert ", 0 sent over the network" in output
    for row, line in zip(rows, text[1], strict=True):
        assert [len(mask) for mask in row["masks"]] == [3] * line.count("[MASK]")
        assert row.get("cut", False) == (line == "late " * 90)


HOLDS = f"""
import runpy, time
from bert_ddp.predict.parts import Parts

write = Parts._write

def write_and_hold(self, number, text):
    write(self, number, text)
    while number >= 50:  # of 126: until it is killed
        time.sleep(1)

Parts._write = write_and_hold
runpy.run_path({str(PREDICT)!r}, run_name="__main__")
"""


@pytest.mark.long
def test_killed_half_way_it_goes_on_without_doing_the_first_half_twice(model, text, tmp_path):
    alone, _ = predict((1,), tmp_path / "one", model, text)
    folder = tmp_path / "two"
    holding = tmp_path / "holding.py"
    holding.write_text(HOLDS)
    run = playing(holding, nodes((2, 1), folder, model, text, "embed", "--chunk", 8), folder)
    wait_until(lambda: len(list(folder.glob("node*/*.parts-*/chunk-*"))) >= 40, run)
    run.kill()
    done = list(folder.glob("node*/*.parts-*/chunk-*"))
    assert len(done) < -(-LINES // 8) and not (folder / "node0" / "answers.jsonl").exists()
    links = {path: folder / f"kept-{number}" for number, path in enumerate(done)}
    before = {path: path.stat().st_ino for path in done}
    for path, link in links.items():
        os.link(path, link)  # keeps the inode from being given to another file
    rows, output = predict((2, 1), folder, model, text, "embed", "--chunk", 8)
    assert f"{len(done)} of 126 chunks were done before, and are kept" in output
    assert f"{126 - len(done)} chunks computed, {len(done)} kept" in output
    assert len(before) == len(set(before.values()))
    for row, expected in zip(rows, alone, strict=True):  # other chunks: other batches, other last bits
        assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-4)


def test_a_tagger_of_ours_tags_as_transformers_does(model, text, tmp_path):
    data = save_ner(tmp_path / "data", train=200)
    flags = ("--task", "ner", "--model", model, "--data", data, "--lr", 3e-3, "--epochs", 4)
    play(FINETUNE, (2,), tmp_path / "run", *flags)
    rows, _ = predict((2,), tmp_path / "answers", tmp_path / "run", text, "ner")
    found = [(entity["type"], entity["text"]) for row in rows for entity in row["entities"]]
    assert found.count(("person", "anna")) > 50
    for row, line in zip(rows, text[1], strict=True):
        assert len(row["words"]) == len(row["tags"])
        assert all(line[entity["start"] : entity["end"]] == entity["text"] for entity in row["entities"])

    from transformers import pipeline

    tagger = pipeline("token-classification", str(tmp_path / "run" / "best" / "latest"))
    plain = [index for index in range(60) if set(text[1][index]) <= set("abcdefghijklmnopqrstuvwxyz .")]
    plain = [index for index in plain if text[1][index] and len(text[1][index]) < 200]
    assert len(plain) > 30
    for index in plain:
        tags = {part["start"]: part["entity"] for part in tagger(text[1][index])}
        places = {0, *(place + 1 for place, sign in enumerate(text[1][index]) if sign == " ")}
        expected = [tags.get(place, "O") for place in sorted(places)]
        assert rows[index]["tags"] == expected


def test_classes_are_those_of_the_training_data_and_a_tab_separates_a_pair(model, text, tmp_path):
    data = save_classes(tmp_path / "data")
    flags = ("--task", "classify", "--model", model, "--data", data, "--lr", 3e-3, "--epochs", 1)
    play(FINETUNE, (1,), tmp_path / "run", *flags)
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("".join(f"{line}\t{line}\n" for line in text[1]))
    rows, _ = predict((2,), tmp_path / "answers", tmp_path / "run", (pairs, text[1]), "classify")
    for row in rows:
        assert set(row["scores"]) == {"none", "place"} and sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(row["scores"], key=row["scores"].get)


def test_a_folder_for_parts_that_one_node_cannot_make_is_one_line_on_every_node(model, text, tmp_path):
    first, second = nodes((2, 2), tmp_path, model, text, "embed")
    (tmp_path / "file").write_text("")
    second.flags += ["--shared-dir", tmp_path / "file"]
    for result in playing(PREDICT, [first, second], tmp_path).results():
        assert result.code == 2
        (error,) = result.lines
        assert "name another folder with --shared-dir" in error


BAD = [
    (("--task", "ner"), "is a BertForMaskedLM, but --task ner needs a BertForTokenClassification"),
    (("--task", "embed", "--max-length", 65), "--max-length is 65, but"),
    (("--task", "embed", "--input", "BINARY"), "line 2: this is not UTF-8 text"),
]


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_bad_input_is_one_line_and_code_2(flags, message, model, text, tmp_path):
    (tmp_path / "binary").write_bytes(b"anna\n\xff\xfe\n")
    flags = [tmp_path / "binary" if flag == "BINARY" else flag for flag in flags]
    (result,) = playing(PREDICT, nodes((2,), tmp_path, model, text, "embed", *flags), tmp_path).results()
    assert result.code == 2
    (error,) = result.lines
    assert message in error


def test_a_checkpoint_of_another_architecture_is_named(text, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (result,) = playing(PREDICT, nodes((1,), tmp_path, tmp_path / "other", text, "embed"), tmp_path).results()
    assert result.code == 2 and "has the architecture gpt2: a BERT is needed" in result.output


# --- the lines as a whole -------------------------------------------------------------------------------------------


def opened(tmp_path, content, name="lines.txt"):
    (tmp_path / name).write_bytes(content)
    return open_lines(tmp_path / name, 2)


@pytest.mark.parametrize("content", [b"one\rtwo\rthree\r", b"one\rtwo\rthree\r\n", b"one\rtwo", b"a\rb\rc\r\nd\re\rf"])
def test_lines_that_end_with_cr_alone_are_refused_and_not_answered_as_one(content, tmp_path):
    with pytest.raises(UserError, match=r"its lines end with CR alone, so \d would be read as \d: convert it with `tr"):
        opened(tmp_path, content)


@pytest.mark.parametrize("content", [b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\ntwo", b"one\ntwo\n", b"one\r\r\ntwo\r\r\n"])
def test_odd_line_ends_and_a_byte_order_mark_change_no_line(content, tmp_path):
    lines = opened(tmp_path, content)
    assert lines.chunk(0) == ["one", "two"] and not list(odd(lines, "embed"))


ODD = [
    ("embed", "a.jsonl", b'{"text": "one"}\n', "read as plain lines, with all its marks"),
    ("embed", "a.txt", b"\n \n", "blank lines alone"),
    ("fill-mask", "a.txt", b"anna went to <mask>\n", "no \\[MASK\\] in any line"),
    ("classify", "a.txt", b"one\ttwo\nthree\n", "a tab, .* in 1 of 2 lines alone"),
    ("ner", "a.txt", b"one\rtwo\nthree\n", "1 CR within lines, which end no line"),
]


@pytest.mark.parametrize("task, name, content, said", ODD)
def test_what_is_odd_about_the_lines_as_a_whole_is_said_in_one_line(task, name, content, said, tmp_path):
    (note,) = odd(opened(tmp_path, content, name), task)
    assert re.search(said, note) and name in note


def test_a_file_of_lines_that_is_only_a_pointer_is_not_answered(tmp_path):
    with pytest.raises(UserError, match=r"lines.txt is a git-lfs pointer"):
        opened(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


@pytest.mark.parametrize("change", [lambda path: path.write_text("one\ntwo and more\n"), lambda path: path.unlink()])
def test_a_file_of_lines_that_changes_while_it_is_answered_is_one_line(change, tmp_path):
    lines = opened(tmp_path, b"one\ntwo\n")
    change(lines.path)
    with pytest.raises(UserError, match=r"lines.txt (has changed while|cannot be read: No such file)"):
        lines.chunk(0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_lines_in_utf_16_are_told_to_be_converted(encoding, tmp_path):
    with pytest.raises(UserError, match=r"line 1: this is not a text file, or one in UTF-16: convert it to UTF-8"):
        opened(tmp_path, "one\ntwo\n".encode(encoding))
