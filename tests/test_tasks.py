"""Fine-tuning data: reading it, cutting it into rows and batches, and the messages about bad input."""

import itertools
import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from bert_ddp.finetune import data, scores
from bert_ddp.finetune.encoding import encode_sentences
from bert_ddp.finetune.examples import Sentence
from bert_ddp.finetune.files import read_conll
from bert_ddp.finetune.rows import IGNORE, of_labelled
from bert_ddp.finetune.sources import DataOptions, find_sources, read_sentences, read_texts
from bert_ddp.finetune.whole import odd as odd_as_a_whole
from bert_ddp.text.pieces import Pieces
from common.errors import RunError, UserError
from common.uneven.options.token_balance import (
    SortedShard,
    TokenBalancedSampler,
    cut_padded_parts,
    cut_parts,
    cut_passes,
)
from common.uneven.plan import plan_batches
from tests.harness import ROOT, SHARED, run
from tests.small_bert import save_classes, save_conll, save_model, save_ner, sentences


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_model(tmp_path_factory.mktemp("model")))


def write(path, text):
    path.write_text(text)
    return path


# --- reading -----------------------------------------------------------------------------------------------------


def test_conll_with_tabs_spaces_lone_tabs_and_docstart_lines(tmp_path):
    path = write(
        tmp_path / "a.conll", "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-org\nrejects VBZ B-VP O\n\t\nanna\tB-person\r\n"
    )
    found = list(read_conll(path))
    assert [sentence.words for sentence in found] == [["EU", "rejects"], ["anna"]]
    assert [sentence.tags for sentence in found] == [["B-org", "O"], ["B-person"]]
    assert found[1].places == [f"{path}, line 6"]


def test_conll_reads_back_what_was_written(tmp_path):
    found = read_conll(save_conll(tmp_path / "a.conll", 30, seed=3))
    assert [list(zip(one.words, one.tags, strict=True)) for one in found] == sentences(30, seed=3)


def test_wnut17_is_read_whole():
    path = SHARED / "wnut17" / "train.conll"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    found = list(read_conll(path))
    assert len(found) == 3394
    assert len({tag for sentence in found for tag in sentence.tags}) == 13


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_texts_and_pairs_from_csv_tsv_and_jsonl(name, tmp_path):
    table = [('it\'s "good", really', "second text", "yes"), ("two", "more", "no")]
    if name.endswith("jsonl"):
        lines = [json.dumps(dict(zip(("a", "b", "label"), row, strict=True))) for row in table]
    elif name.endswith("csv"):
        lines = ["a,b,label", '"it\'s ""good"", really",second text,yes', "two,more,no"]
    else:
        lines = ["a\tb\tlabel", *("\t".join(row) for row in table)]
    path = write(tmp_path / name, "\n".join(lines))
    found = read_texts(str(path), "train", ["a", "b"], None)
    assert [(text.text, text.pair, text.label) for text in found] == table


def test_a_datasets_folder_with_class_names_is_read_by_its_splits(tmp_path):
    import datasets

    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(datasets.ClassLabel(names=["O", "B-x"]))
    )
    rows = {"tokens": [["one", "two"], ["three"]], "ner_tags": [[0, 1], [1]]}
    for split in ("train", "validation"):
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / f"{split}.parquet")
    for role in ("train", "dev"):
        assert [one.tags for one in read_sentences(f"hf:{tmp_path}", role)] == [["O", "B-x"], ["B-x"]]
    with pytest.raises(UserError, match="but no test split: name a file with --test"):
        read_sentences(f"hf:{tmp_path}", "test")


def save_splits(folder, labels):
    """A folder that `datasets` reads, with the classes `labels` of each split."""
    import datasets

    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    for split, numbers in labels.items():
        rows = {"text": ["anna went"] * len(numbers), "label": numbers}
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{split}.parquet")
    return f"hf:{folder}"


def test_a_data_set_without_a_test_split_is_train_and_dev(tmp_path):
    source = save_splits(tmp_path, {"train": [0, 1], "validation": [1]})
    assert find_sources(DataOptions("classify", source, {"test": None})) == {"train": source, "dev": source}


def test_a_test_split_without_labels_is_left_out_with_a_line(tmp_path, tokenizer):
    source = save_splits(tmp_path, {"train": [0, 1], "validation": [1], "test": [-1, -1]})  # as GLUE has it
    found = data.load(DataOptions("classify", source), tokenizer, 32)
    assert list(found.held_out) == ["dev"]
    assert found.notes == [f"{source}: its test split has no labels and is left out: --test names another"]


def test_a_test_split_with_labels_is_kept(tmp_path, tokenizer):
    source = save_splits(tmp_path, {"train": [0, 1], "validation": [1], "test": [0]})
    assert list(data.load(DataOptions("classify", source), tokenizer, 32).held_out) == ["dev", "test"]


def test_a_test_set_without_labels_that_is_named_itself_is_refused(tmp_path, tokenizer):
    source = save_splits(tmp_path, {"train": [0, 1], "validation": [1], "test": [-1, -1]})
    with pytest.raises(UserError, match="test row 0: the label is missing"):
        data.load(DataOptions("classify", source, {"test": source}), tokenizer, 32)


def test_a_folder_gives_the_files_of_each_role_and_named_files_win(tmp_path):
    save_ner(tmp_path, 3, 2, 2)
    found = find_sources(DataOptions("ner", str(tmp_path), {"test": "other.conll", "dev": None}))
    expected = {"train": str(tmp_path / "train.conll"), "dev": str(tmp_path / "dev.conll"), "test": "other.conll"}
    assert found == expected


# --- bad input ---------------------------------------------------------------------------------------------------

BAD = [
    ("a.conll", "anna B-person\nben\n", "a.conll, line 2: 'ben' has no label"),
    ("a.conll", "anna\t\n", "a.conll, line 1: 'anna' has no label"),
    ("a.conll", "anna B-person\n\nben person\n", "a.conll, line 3: the label 'person' is not an entity tag"),
    ("a.conll", "anna B-person\nb\0n O\n", "a.conll, line 2: this is not a text file"),
    ("a.conll", "\n\n", "a.conll holds no examples"),
    ("a.jsonl", '{"tokens": ["a"], "tags": ["O", "O"]}', "a.jsonl, line 1: words and tags are not two lists"),
    ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{"tok', "a.jsonl, line 2: this is not JSON"),
    ("a.jsonl", '{"tokens": [], "tags": []}', r"a.jsonl holds no labelled word \(train\)"),
    ("a.jsonl", '{"text": "a"}', "a.jsonl, line 1: there is no column tokens or words among text"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_what_is_wrong_with_tagged_words_is_said_with_file_and_line(name, text, message, tmp_path):
    path = write(tmp_path / name, text)
    with pytest.raises(UserError, match=message.replace("[", r"\[")) as error:
        read_sentences(str(path), "train")
    assert "\n" not in str(error.value)


BAD_TEXTS = [
    ("a.csv", "text,label\none,x\ntwo\n", "a.csv, line 3: fewer fields than the header's 2"),
    ("a.csv", "text,label\none,x,y\n", "a.csv, line 2: more fields than the header's 2"),
    ("a.csv", "text,label\none,\n", "a.csv, line 2: the label is missing"),
    (
        "a.csv",
        "words,label\none,x\n",
        "there is no column text or sentence or sentence1 among words, label.*--text-column",
    ),
    ("a.jsonl", '{"text": 3, "label": "x"}', "a.jsonl, line 1: column text is 3, which is not text"),
    ("a.txt", "one", "--task classify reads .csv, .tsv, .json and .jsonl"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_TEXTS)
def test_what_is_wrong_with_labelled_texts_is_said_with_file_and_line(name, text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_texts(str(write(tmp_path / name, text)), "train", None, None)


def test_a_file_that_is_no_utf8_text_is_named_with_its_line(tmp_path):
    (tmp_path / "a.conll").write_bytes(b"anna O\n\xff\xfe O\n")
    with pytest.raises(UserError, match=r"a\.conll, line 2: this is not UTF-8 text"):
        read_sentences(str(tmp_path / "a.conll"), "train")


def test_a_label_unseen_in_training_is_named_with_its_line(tmp_path, tokenizer):
    write(tmp_path / "train.conll", "anna B-person\nwent O\n")
    write(tmp_path / "dev.conll", "went O\nberlin B-place\n")
    with pytest.raises(UserError, match=r"dev\.conll, line 2: the label 'B-place' does not occur in the training data"):
        data.load(DataOptions("ner", str(tmp_path)), tokenizer, 32)


def test_a_hub_that_does_not_answer_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # answers at once what else takes 20 s
    with pytest.raises(RunError, match="hf:nobody/nothing") as error:
        read_sentences("hf:nobody/nothing", "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("second", ['a,x\n"b,y\n', "other\nb\n"])
def test_a_damaged_file_of_a_datasets_folder_is_said_in_one_line(second, tmp_path):
    write(tmp_path / "train.csv", "text,label\na,x\n")
    write(tmp_path / "validation.csv", second)
    with pytest.raises(UserError, match=f"hf:{tmp_path} cannot be read: ") as error:
        find_sources(DataOptions("classify", f"hf:{tmp_path}"))
    print(error.value)
    assert "\n" not in str(error.value)


# --- rows --------------------------------------------------------------------------------------------------------


def test_the_first_piece_of_each_word_has_its_label_and_no_word_is_lost(tokenizer):
    long = [("xylophonist", "B-person"), *[("berlin", "B-place"), ("went", "O")] * 20, ("\u200d", "O")]
    given = [Sentence(*zip(*pairs, strict=True), places=[""]) for pairs in ([("anna", "B-person")], long)]
    names = ["O", "B-person", "B-place"]
    found = encode_sentences(given, names, tokenizer, length=16)
    assert found.rows.lengths.max() <= 16 and len(found.rows) > 3
    kept = {}
    for row in range(len(found.rows)):
        batch = found.rows.batch(np.array([row]))
        assert batch.tokens[0, 0] == tokenizer.cls_token_id and batch.tokens[0, -1] == tokenizer.sep_token_id
        kept[row] = of_labelled(batch.labels[0].tolist(), batch.labels[0].tolist())
    assert found.answers(kept, dict(enumerate(names))) == [list(sentence.tags) for sentence in given]
    assert found.rows.counts.sum() == 1 + len(long)


def test_memory_of_pieces_is_bounded_and_forgotten_words_are_cut_as_before(tokenizer):
    pieces, words = Pieces(tokenizer, most=10), ["anna", *(f"word{number}" for number in range(50)), "anna"]
    found = [pieces.of([word, "berlin"]) for word in words]
    assert len(pieces.known) <= 12
    assert found == [Pieces(tokenizer).of([word, "berlin"]) for word in words]


def test_how_many_texts_are_cut_is_said_for_each_set(tokenizer, tmp_path):
    for role, lengths in (("train", (6, 7, 9)), ("dev", (6, 6)), ("test", (20, 2))):  # 6 words fit beside two marks
        write(tmp_path / f"{role}.csv", "\n".join(["text,label", *(f"{'anna ' * n},{n % 2}" for n in lengths)]))
    found = data.load(DataOptions("classify", str(tmp_path)), tokenizer, 8)
    expected = "texts cut to 8 tokens: 2 of 3 train, 1 of 2 test: a larger --max-length reads more of them"
    assert found.notes == [expected]


def test_a_batch_is_padded_to_its_longest_row_only(tokenizer, tmp_path):
    found = encode_sentences(list(read_conll(save_conll(tmp_path / "a", 9, 1))), NAMES, tokenizer, 32)
    batch = found.rows.batch(np.array([2, 5, 7]))
    lengths = found.rows.lengths[[2, 5, 7]]
    assert batch.tokens.shape == (3, lengths.max())
    assert batch.mask.sum(dim=1).tolist() == lengths.tolist()
    assert ((batch.labels == IGNORE) | (batch.mask == 1)).all()


NAMES = ["O", "B-person", "B-place", "I-place"]


# --- scores ------------------------------------------------------------------------------------------------------


def test_a_set_without_any_entity_has_scores_of_zero_and_a_report(tmp_path):
    found = scores.score_entities([["O", "O"], []], [["O", "O"], []])
    assert found.numbers == {"f1": 0, "precision": 0, "recall": 0, "tag_accuracy": 1}
    scores.write_report(tmp_path, {"dev": found}, step=1)
    assert "there are no entities, and none was predicted" in (tmp_path / "report.txt").read_text()
    assert (tmp_path / "confusion.png").stat().st_size > 0


def test_a_report_is_written_where_the_locale_knows_no_umlauts(tmp_path):
    code = (
        "from pathlib import Path; from bert_ddp.finetune import scores\n"
        "found = scores.score_classes(['gr\\xfcn', 'rot'], ['gr\\xfcn', 'rot'])\n"
        f"scores.write_report(Path({str(tmp_path)!r}), {{'dev': found}}, step=1)"
    )
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = run("python", "-X", "utf8=0", "-c", code, **variables)
    assert done.code == 0, done.output
    assert "gr\xfcn" in (tmp_path / "report.txt").read_text(encoding="utf-8")


# --- batches balanced by tokens ----------------------------------------------------------------------------------


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(3, 120, size=203)


def test_the_ranks_parts_of_every_step_are_the_global_batch_exactly(lengths):
    plan = plan_batches(203, 50, 4, (20, 0, 12, 18))
    samplers = [TokenBalancedSampler(plan, rank, 7, lengths, 96) for rank in range(4)]
    alone = TokenBalancedSampler(plan_batches(203, 50, 1), 0, 7, lengths, 96)
    sums = [one.sums_in_steps(lengths - 2) for one in (samplers[3], alone)]
    for step, (parts, whole) in enumerate(zip(zip(*samplers, strict=True), alone, strict=True)):
        assert sorted(row for part in parts for row in part) == sorted(whole)
        assert sums[0][step] == sum(lengths[whole] - 2) == sums[1][step]
        assert parts[1] == []


def test_tokens_with_padding_follow_the_shares_within_a_row(lengths):
    falling = np.sort(lengths)[::-1]
    shares = (3.0, 1.0, 2.0)
    borders = cut_parts(falling, shares, 96)
    cuts = cut_passes(falling, None, 96)
    padded = np.repeat(falling[cuts[:-1]], np.diff(cuts))
    for share, begin, end in zip(shares, borders[:-1], borders[1:], strict=True):
        assert abs(padded[begin:end].sum() - padded.sum() * share / 6) <= falling[0]


def test_no_other_cut_into_padded_parts_has_a_smaller_largest_part_beside_the_shares(lengths):
    for begin, shares in itertools.product(range(0, 60, 6), ((1.0, 1.0, 1.0), (3.0, 1.0, 2.0), (0.5, 0.0, 0.25))):
        falling = np.sort(lengths[begin : begin + 12])[::-1]

        def largest(borders, falling=falling, shares=shares):
            sizes = [(b - a) * falling[a] if b > a else 0 for a, b in pairwise(borders)]
            beside = zip(sizes, shares, strict=True)
            return max(size / share if share else math.inf if size else 0 for size, share in beside)

        every = itertools.combinations_with_replacement(range(13), 2)
        best = min(largest([0, *inner, 12]) for inner in every)
        found = cut_padded_parts(falling, shares)
        assert found[0] == 0 and found[-1] == 12 and largest(found) <= best + 1 / min(filter(None, shares))
    assert cut_padded_parts(lengths[:0], (1.0, 1.0)) == [0, 0, 0]


def test_passes_cost_no_more_than_any_cut_tried_by_hand():
    falling = np.array([30, 28, 12, 11, 10, 10, 9, 9])

    def cost(cuts):
        return sum((end - begin) * falling[begin] + 20 for begin, end in pairwise(cuts))

    found = cut_passes(falling, None, 20)
    every = [[0, *(place for place in range(1, 8) if bits >> place & 1), 8] for bits in range(0, 256, 2)]
    assert cost(found) == min(map(cost, every)) and found == [0, 2, 8]
    assert max(np.diff(cut_passes(falling, 3, 20))) <= 3
    assert cut_passes(np.array([]), None, 20) == [0, 0]


def test_evaluation_takes_each_row_once_on_any_number_of_ranks(lengths):
    for world_size in (1, 3, 7):
        shards = [SortedShard(lengths, rank, world_size, 16) for rank in range(world_size)]
        assert sorted(row for shard in shards for batch in shard for row in batch) == list(range(203))
        tokens = [sum(lengths[row] for batch in shard for row in batch) for shard in shards]
        assert max(tokens) - min(tokens) <= 2 * lengths.max()


def test_rows_that_ranks_take_in_turn_are_all_there_longest_first(lengths):
    count = itertools.count()
    shards = [iter(SortedShard(lengths, rank, 3, 16, lambda: count)) for rank in range(3)]
    batches = [next(shards[0]), next(shards[2]), *shards[1], *shards[0]]
    assert sorted(row for batch in batches for row in batch) == list(range(203))
    longest = [lengths[batch[0]] for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_the_global_batch_does_not_know_the_layout_when_shares_are_given(lengths):
    plans = [plan_batches(203, 32, 4, weights) for weights in (None, [5, 1, 1, 1])]
    for plan in plans:
        sampler = TokenBalancedSampler(plan, 0, 1, lengths, 96)
        sampler.set_epoch(2)
        order, steps = sampler.order().numpy(), range(2 * 7, 3 * 7)  # of the third epoch
        everyone = [sorted(row for rank in range(4) for row in sampler.part(step, rank)) for step in steps]
        assert everyone == [sorted(order[step * 32 : step * 32 + 32].tolist()) for step in range(7)]


def test_changed_shares_count_from_their_step_on(lengths):
    equal, uneven, changed = (plan_batches(203, 50, 2, weights) for weights in (None, [4, 1], None))
    changed.change_shares([4, 1], from_step=7)  # in the second epoch
    samplers = [TokenBalancedSampler(plan, 0, 7, lengths, 96) for plan in (equal, uneven, changed)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        before, after, found = (list(sampler) for sampler in samplers)
        assert before != after
        assert found == before[: 7 - 5 * epoch] + after[7 - 5 * epoch :]


# --- sets as a whole ---------------------------------------------------------------------------------------------


def conll(*sentences, columns="{word} {tag}"):
    """A CoNLL text of sentences such as "anna/B-person went/O"."""
    blocks = []
    for words in sentences:
        pairs = [pair.rpartition("/") for pair in words.split()]
        lines = [columns.format(number=n, word=word, tag=tag) for n, (word, _, tag) in enumerate(pairs, start=1)]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


SET = ("anna/B-person went/O to/O rome/B-place", "ben/B-person came/O")
WRONG_AS_A_WHOLE = [
    ("a.conll", conll(*SET, columns="{number}\t{word}\t{tag}"), "line 1: the first column numbers the words"),
    ("a.conll", conll(*SET, columns="s1 {word} {tag}"), "line 1: the first column is the same in all lines"),
    ("a.conll", conll(*SET, columns="0-{number} {word} {tag}"), "line 1: no word of the training data has a letter"),
    ("a.conll", conll("anna/O went/O", "ben/O"), "every word of the training data has the label O"),
    ("a.jsonl", '{"tokens": ["anna", "went"], "tags": ["O", "O"]}', "every word of the training data has the label O"),
    ("a.conll", "anna B-person\rwent O\r", "line 1: there is a CR within the line"),
    ("a.conll", "anna O\nben B-person\rwent O\n", "line 2: there is a CR within the line"),
    ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\r{"tokens": ["b"], "tags": ["O"]}', "line 1: there is a CR within"),
    ("a.jsonl", '{"tokens": [["a"]], "tags": ["O"]}', "line 1: the word ['a'] is not text"),
    ("a.jsonl", '{"tokens": [null], "tags": ["O"]}', "line 1: the word None is not text"),
    ("a.jsonl", '{"tokens": ["a"], "tags": [["O"]]}', "line 1: the label \"['O']\" is not an entity tag"),
    ("a.conll", "\tB-person\nwent\tO\n", "line 1: the label 'B-person' has no word"),
    ("a.jsonl", "[" * 100_000, "line 1: this is not JSON"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG_AS_A_WHOLE)
def test_tagged_words_that_are_wrong_as_a_whole_are_refused(name, text, said, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(UserError, match=re.escape(said)) as error:
        read_sentences(str(tmp_path / name), "train")
    assert name in str(error.value) and "\n" not in str(error.value)


def table(*rows, header="text,label"):
    return "\n".join([header, *rows]) + "\n"


def many(form, count=30):
    return [form.format(n=number, odd=number % 2) for number in range(count)]


WRONG_TEXTS = [
    ("a.jsonl", '{"text": "a", "label": ["x", "y"]}', "line 1: the label ['x', 'y'] is not one class (column label)"),
    ("a.jsonl", '{"text": "a", "label": {"x": 1}}', "line 1: the label {'x': 1} is not one class"),
    ("a.jsonl", '{"text": "a", "label": 3.8}', "line 1: the label 3.8 is not one class"),
    ("a.jsonl", '{"text": "a", "label": NaN}', "line 1: the label is missing"),
    ("a.csv", table("a, "), "line 2: the label is missing"),
    ("a.csv", table(*many("text {n},{n}")), "each of the 30 examples has a label of its own (column label)"),
    ("a.csv", table(*many("same,{odd}")), "all 30 texts are the same (column text)"),
    ("a.csv", table(" ,x", ",y"), "every text is blank (column text)"),
    ("a.csv", table("a;x", header="text;label"), "among text;label: a .csv has commas between its columns"),
    ("a.tsv", table("a,x"), "among text,label: a .csv has commas between its columns, a .tsv tabs"),
    ("a.csv", table("a, b;x", header="text;label"), "more fields than the header's 1: a .csv has commas between"),
    ("a.tsv", '"text"\t"label"\n"a"\t"x"\n', "line 1: a quote is a character like any other in a .tsv"),
    (
        "a.csv",
        table('"he said \\"no\\", twice",x'),
        "line 2: after the closing quote of a text there must be a comma, and a quote",
    ),
    ("a.csv", table("a,x", "b\rc,y"), "line 3: there is a CR within the line"),
    ("a.csv", table("a,x", "\ufefftext,label", "b,y"), "line 3: the header once more"),
    ("a.csv", table("a,x", "label,text", "y,b"), "line 3: the header once more"),
    (
        "a.jsonl",
        json.dumps('{"text": "a", "label": 1}'),
        "it is a text that holds JSON: unpack it with `jq -c fromjson`",
    ),
    ("a.csv", table("one,x", header="a film,good"), "the first line of a table names its columns"),
    ("a.csv", table("a,b,x", header="text,text,label"), "line 1: two columns are called 'text': rename one"),
    ("a.csv", "text,label\ra,x\rb,y\r", "there is a CR within the line"),
    ("a.jsonl", '{"text": "a", "label": 1}\r{"text": "b", "label": 0}\r', "line 1: there is a CR within the line"),
    ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG_TEXTS)
def test_labelled_texts_that_are_wrong_as_a_whole_are_refused(name, text, said, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(UserError, match=re.escape(said)) as error:
        read_texts(str(tmp_path / name), "train", None, None)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["a.conll", "a.csv", "a.jsonl"])
def test_line_ends_trailing_blank_lines_and_a_byte_order_mark_change_no_example(name, mark, end, tmp_path):
    text = {"a.conll": conll(*SET), "a.csv": table("a,x", "b,y"), "a.jsonl": '{"text": "a", "label": "x"}\n'}[name]
    text, read = text + "\n\n", read_sentences if name == "a.conll" else read_texts
    flags = () if name == "a.conll" else (None, None)
    found = []
    for content in (text, mark + text.replace("\n", end)):
        (tmp_path / name).write_bytes(content.encode())
        found.append(read(str(tmp_path / name), "train", *flags))
    assert found[0] == found[1]


ODD_BUT_RIGHT = [
    ("dev", conll("anna/O went/O", "ben/O")),  # no entity, where none is to be learnt
    ("dev", conll("1/O 2/O 4/O")),
    ("train", conll("7/O anna/I-person 8/O", "9/O")),
    ("train", conll(*SET, columns="{word} x y {tag}")),
    ("test", conll("2020/O")),
]


@pytest.mark.parametrize(("role", "text"), ODD_BUT_RIGHT)
def test_tagged_words_that_are_odd_but_right_are_read(role, text, tmp_path):
    assert read_sentences(str(write(tmp_path / "a.conll", text)), role)


def test_a_text_longer_than_csv_allows_by_itself_is_read(tmp_path):
    path = write(tmp_path / "a.csv", table(f"{'word ' * 100_000},x", "b,y"))
    assert len(read_texts(str(path), "train", None, None)[0].text) == 500_000


def test_labels_and_names_of_columns_have_no_spaces_around_them(tmp_path):
    path = write(tmp_path / "a.csv", table("a, x", "b,x ", "c,y", header="text , label"))
    assert [text.label for text in read_texts(str(path), "train", None, None)] == ["x", "x", "y"]


def test_a_data_file_that_is_a_folder_is_one_line(tmp_path):
    for name, read in (("a.conll", read_sentences), ("a.csv", lambda *given: read_texts(*given, None, None))):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=f"{name} cannot be read: Is a directory"):
            read(str(tmp_path / name), "train")


def test_a_name_longer_than_the_system_takes_is_one_line():
    with pytest.raises(UserError, match=r"--data x+ cannot be read: File name too long"):
        find_sources(DataOptions("ner", "x" * 300))


def notes(tmp_path, tokenizer, task, **files):
    for name, text in files.items():
        write(tmp_path / name.replace("__", "."), text)
    return data.load(DataOptions(task, str(tmp_path)), tokenizer, 32).notes


def test_nothing_is_odd_about_usual_sets(tmp_path, tokenizer):
    assert data.load(DataOptions("ner", str(save_ner(tmp_path / "ner"))), tokenizer, 32).notes == []
    assert data.load(DataOptions("classify", str(save_classes(tmp_path / "texts"))), tokenizer, 64).notes == []


TWELVE = conll(*["anna/B-person went/O to/O rome/B-place"] * 12)
ODD_WORDS = [
    (TWELVE, TWELVE, "all 12 dev examples are in the training data too"),
    (TWELVE, TWELVE + "\nben O\n", "12 of 13 dev examples are in the training data too"),
    (TWELVE, conll("anna/B-person went/O", *["ben/O"] * 3).replace("\n", "\n\n"), ""),
    (TWELVE, conll(*["ben/O went/O"] * 11), "every dev label is O"),
    (conll(" ".join(SET * 15)), conll("ben/O"), "train.conll is one sentence of 90 words"),
    (TWELVE.replace("\n", "\n\n"), conll("ben/O"), "train.conll: every sentence has one word"),
    (TWELVE + "\nnew york B-place\n", conll("ben/O"), "line 61 has 3 columns, most lines have 2"),
    (TWELVE + "\nben B-Person\n", conll("ben/O"), "labels differ in case, spaces or marks alone: B-person, B-Person"),
    (TWELVE, conll("\u4e2d\u6587/O \u4e2d/O"), "100% of its tokens are not in the vocabulary"),
    (conll("anna/I-person went/O", "ben/I-person"), conll("ben/O"), ""),
    (conll("anna/I-person ben/B-person"), conll("ben/O"), ""),  # IOB1: B- separates
    (TWELVE, conll(" ".join(["ben/O"] * 21)), ""),
    (TWELVE + "\n" + TWELVE, conll("ben/O"), "24 of 24 train examples are the same: 'anna went to rome'"),
    (TWELVE + "\nben I-person\n", conll("ben/O"), "line 61: 1 entities begin with I-, 24 with B-"),
]


@pytest.mark.parametrize(("train", "dev", "said"), ODD_WORDS)
def test_what_is_odd_about_tagged_words_as_a_whole_is_said_in_one_line(train, dev, said, tmp_path, tokenizer):
    found = notes(tmp_path, tokenizer, "ner", train__conll=train, dev__conll=dev)
    assert [said in note for note in found] == [True] * bool(said), found


ODD_TEXTS = [
    (table(*many("text {n},{odd}"), ",1"), "line 32: the text is blank, as in 1 of 31 examples"),
    ("sentence1,sentence2,label\n" + "".join(f"text {n},,{n % 2}\n" for n in range(12)), "the second text of each"),
    (table(*many("text {n},{odd}", 20), *many("same,1", 21)), "21 of 41 train examples are the same: 'same'"),
    (table(*many("text {n},x{odd}"), "a,x1\u200b"), "case, spaces or marks alone: x1, 'x1\\u200b'"),
    (table(*many("text {n},caf\u00e9{odd}"), "a,cafe\u03011"), "marks alone: 'caf\\xe91', 'cafe\\u03011'"),
    (table(*many("text {n},{n}"), "a,1"), "has 30 classes in 31 examples"),
    (table(*many("text {n},x{odd}"), "a,X1"), "labels differ in case, spaces or marks alone: x1, X1"),
    (table(*many("text {n},x {odd}"), "a,x  1"), "labels differ in case, spaces or marks alone: x 1, x  1"),
    (table(*many("text {n},{odd}"), *many("text {n},1")), "15 of 30 texts have several labels: can they be learnt?"),
    (
        table(*many("text {n},{odd}"), '"a\n' + "b\n" * 20 + 'c",1'),
        "line 53: a text of 22 lines: is a quote never closed",
    ),
    (
        "sentence1,sentence2,label\n" + "".join(f"text {n},same,{n % 2}\n" for n in range(12)),
        "all 12 examples is the same",
    ),
    (table(*many("text {n},x{odd}"), "a,['x1']"), "a label is ['x1']: a list of labels counts as one class"),
    (table(*many("text {n},x{odd}"), "a,NaN"), "a label is NaN, as pandas writes one that is missing"),
    (table(*many("text {n},{odd}"), "a,0.25"), "a label is 0.25: each number counts as a class, whatever its size"),
    (table(*many("text {n},{odd}"), "a,1.0"), "one number is written in several ways, each a class: 1, 1.0"),
    ("text,more,label\na,b c d,1\nb,e f g,2\n", "column more holds text too, and is not read: --text-column text,more"),
]


@pytest.mark.parametrize(("train", "said"), ODD_TEXTS)
def test_what_is_odd_about_labelled_texts_as_a_whole_is_said_in_one_line(train, said, tmp_path, tokenizer):
    dev = "\n".join(train.splitlines()[:2])
    (note,) = notes(tmp_path, tokenizer, "classify", train__csv=train, dev__csv=dev)
    assert said in note


NO_WORDS = [
    ("ner", conll(*["anna/B-person went/O ##to/O"] * 3), "words such as ##to are pieces of a tokenizer"),
    ("ner", conll(*["[CLS]/O anna/B-person"] * 3), "words such as [CLS] are pieces of a tokenizer"),
    ("ner", conll(*["a/B-x n/I-x"] * 19, *["b/O c/O"] * 19), "every word is one character"),
    ("classify", table(*many("! {n},{odd}")), "no text has a letter, as '! 0': see --text-column"),
    ("classify", table(*many('"""anna went to {n}""",{odd}')), 'between quotes, which are a part of them: "anna went'),
]


@pytest.mark.parametrize(("task", "text", "said"), NO_WORDS)
def test_what_stands_in_place_of_words_is_said(task, text, said, tmp_path):
    path = str(write(tmp_path / f"train.{'conll' if task == 'ner' else 'csv'}", text))
    some = read_sentences(path, "train") if task == "ner" else read_texts(path, "train", None, None)
    assert any(said in line for line in odd_as_a_whole({"train": some}, {"train": path}))


def test_a_label_that_looks_like_another_is_named_with_its_marks(tmp_path, tokenizer):
    train, dev = table(*many("text {n},caf\u00e9{odd}")), table("text,cafe\u03011")
    said = r"dev.csv, line 2: the label 'cafe\\u03011' occurs in the training data with other case"
    with pytest.raises(UserError, match=said):
        notes(tmp_path, tokenizer, "classify", train__csv=train, dev__csv=dev)


def test_a_dev_set_with_one_example_of_each_class_is_usual(tmp_path, tokenizer):
    train = table(*(f"text {number},x{number % 12}" for number in range(60)))
    dev = table(*(f"more {number},x{number}" for number in range(12)))
    assert notes(tmp_path, tokenizer, "classify", train__csv=train, dev__csv=dev) == []


@pytest.mark.parametrize("names", [["neg", "pos"], ["pos", "neg"]])
def test_a_parquet_file_with_its_classes_in_another_order_is_refused(names, tmp_path):
    for split, own in (("train", ["neg", "pos"]), ("validation", names)):
        features = Features({"text": Value("string"), "label": ClassLabel(names=own)})
        rows = {"text": ["bad film", "good film"], "label": [own.index("neg"), own.index("pos")]}
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    if names == ["neg", "pos"]:
        assert [text.label for text in read_texts(f"hf:{tmp_path}", "dev", None, None)] == ["neg", "pos"]
    else:
        with pytest.raises(UserError, match=r"validation.parquet: its column label has the classes pos, neg, but"):
            read_texts(f"hf:{tmp_path}", "dev", None, None)


def test_a_folder_of_pointers_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"train.parquet is a git-lfs pointer"):
        read_texts(f"hf:{tmp_path}", "train", None, None)


def test_a_word_that_datasets_takes_for_a_missing_value_is_said(tmp_path):
    write(tmp_path / "train.csv", table("None,x", "b,y"))
    with pytest.raises(UserError, match=r"is None, which is not text: in a .csv, `datasets` takes words such as None"):
        read_texts(f"hf:{tmp_path}", "train", None, None)
    assert read_texts(str(tmp_path / "train.csv"), "train", None, None)[0].text == "None"


def test_a_test_set_that_is_the_dev_set_is_said(tmp_path, tokenizer):
    dev = conll(*["ben/B-person went/O"] * 12)
    (note,) = notes(tmp_path, tokenizer, "ner", train__conll=TWELVE, dev__conll=dev, test__conll=dev)
    assert "test.conll: the test examples are the dev examples" in note


def test_a_set_in_a_language_that_the_model_lacks_is_refused(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"train.conll: the vocabulary of --model has no word of it"):
        notes(tmp_path, tokenizer, "ner", train__conll=conll("\u4e2d/O \u6587/B-x"), dev__conll=conll("a/O"))


def test_a_file_of_a_role_that_is_not_read_is_named(tmp_path, tokenizer):
    other = '{"tokens": ["ben"], "tags": ["O"]}'
    found = notes(tmp_path, tokenizer, "ner", train__conll=TWELVE, train__jsonl=other, dev__conll=conll("ben/O"))
    unread = f"{tmp_path / 'train.conll'} is the train data, and {tmp_path / 'train.jsonl'} is not read"
    assert found == [f"{unread}: --train names another"]


def test_of_two_files_of_a_role_the_one_that_the_task_reads_is_taken(tmp_path):
    write(tmp_path / "train.conll", "")
    write(tmp_path / "train.csv", "")
    for task, name in (("ner", "train.conll"), ("classify", "train.csv")):
        assert find_sources(DataOptions(task, str(tmp_path)))["train"] == str(tmp_path / name)


def test_one_file_for_two_roles_is_said_once(tmp_path, tokenizer):
    path = str(write(tmp_path / "a.conll", TWELVE))
    (note,) = data.load(DataOptions("ner", None, {"train": path, "dev": path}), tokenizer, 32).notes
    assert note == f"{path}: all 12 dev examples are in the training data too: the scores say little"
