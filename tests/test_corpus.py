"""Token rows: packed full, held out by documents, cached whole, and one line for what cannot work."""

import itertools
import json
import re
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert_ddp.pretrain import prepare, rows
from bert_ddp.text import corpus, pairs, sources, tokens, vocabulary
from bert_ddp.text.flags import add_corpus_flags, corpus_options
from common.errors import UserError
from common.uneven.plan import plan_batches
from common.uneven.sampling import Indices, UnevenDistributedSampler
from tests.harness import BERT, losses, play, run

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
}
TEXT = "the quick brown fox jumps over a lazy dog and then it sleeps in warm sun all day long while birds sing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 documents of 10 to 40 words."""
    path = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    documents = [" ".join(random.choice(TEXT.split(), random.integers(10, 40))) for _ in range(300)]
    (path / "text.txt").write_text("\n\n".join(documents))
    (path / "config.json").write_text(json.dumps(SMALL))
    return path


def load(folder, *flags):
    parser = ArgumentParser()
    add_corpus_flags(parser)
    default = ("--corpus", folder / "text.txt", "--cache-dir", folder / "cache")
    return corpus.load(corpus_options(parser.parse_args([str(flag) for flag in (*default, *flags)])))


def table(part):
    return {name: np.asarray(values) for name, values in part.with_format("numpy")[:].items()}


def test_rows_are_packed_full_and_documents_are_apart(folder):
    text = load(folder, "--sequence-length", 16, "--vocab-size", 300)
    ids, special = table(text.train)["input_ids"], text.meta["special"]
    assert ids.shape[1] == 16 and not (ids == special["pad"]).any()
    assert (ids[:, 0] == special["cls"]).all() and (ids[:, -1] == special["sep"]).all()
    documents = round(300 * 0.95)
    assert documents - 20 < (ids[:, 1:-1] == special["sep"]).sum() < documents + 20


def test_a_tokenizer_folder_that_cuts_and_pads_still_gives_the_whole_text(folder, tmp_path):
    tokenizer = vocabulary.from_words([*vocabulary.SPECIAL, *sorted(set(TEXT.split()))], lowercase=True)
    found = []
    for name in ("plain", "cutting"):
        tokenizer.save_pretrained(tmp_path / name)
        found.append(load(folder, "--sequence-length", 16, "--vocab", tmp_path / name).fingerprint)
        tokenizer.backend_tokenizer.enable_truncation(12)
        tokenizer.backend_tokenizer.enable_padding(length=12)
    assert json.loads((tmp_path / "cutting" / "tokenizer.json").read_text())["truncation"]["max_length"] == 12
    assert found[0] == found[1]


def test_what_is_held_out_is_never_trained_on(folder, tmp_path):
    documents = [f"number {number} of many documents in this text" for number in range(400)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    text = load(tmp_path, "--sequence-length", 8, "--vocab-size", 2000, "--held-out", 0.2)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text.tokenizer_folder)
    found = []
    for part in (text.train, text.held_out):
        stream = " ".join(tokenizer.decode(row[1:-1]) for row in table(part)["input_ids"])
        found.append({number for number in range(400) if f"number {number} of" in stream})
    assert not found[0] & found[1]
    assert len(found[0] | found[1]) > 250 and len(found[1]) > 30


def test_pairs_are_full_and_half_of_the_second_parts_are_from_elsewhere(folder):
    text = load(folder, "--sequence-length", 32, "--vocab-size", 300, "--objective", "mlm+nsp")
    got, special = table(text.train), text.meta["special"]
    assert (got["length"] == 32).all()
    row = np.arange(len(got["second"]))
    assert (got["input_ids"][row, got["second"] - 1] == special["sep"]).all()
    assert (got["input_ids"][:, -1] == special["sep"]).all()
    assert ((got["input_ids"] == special["sep"]).sum(axis=1) == 2).all()
    assert 0.3 < got["next_label"].mean() < 0.7


def numbered_pairs(length=64):
    """(rows of pairs, how many tokens the documents have): every token of the text is a number of its own."""
    random = np.random.default_rng(0)
    ends = np.cumsum([0, *random.integers(20, 300, 400)])
    documents = (np.arange(*span, dtype=np.int32) for span in itertools.pairwise(ends))
    special = {"cls": -1, "sep": -2, "pad": -3, "mask": -4}
    pieces = list(pairs.pairs(documents, length, special))
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}, ends[-1]


def test_pairs_leave_out_less_than_two_rows_of_the_text():
    got, total = numbered_pairs(length=64)
    assert np.setdiff1d(np.arange(total), got["input_ids"]).size < 2 * 64


def test_a_label_says_whether_the_second_part_follows_the_first():
    got, _ = numbered_pairs()
    row = np.arange(len(got["second"]))
    follows = got["input_ids"][row, got["second"]] == got["input_ids"][row, got["second"] - 2] + 1
    assert (follows == (got["next_label"] == 0)).all()


def test_a_second_part_from_elsewhere_shares_no_text_with_the_first():
    got, _ = numbered_pairs()
    for ids in got["input_ids"][got["next_label"] == 1]:
        assert len(np.unique(ids[ids >= 0])) == 64 - 3


def test_a_second_start_reads_nothing_again_and_a_changed_file_is_read_anew(folder, tmp_path):
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text())
    flags = ("--sequence-length", 16, "--vocab-size", 300)
    first = load(tmp_path, *flags)
    stamp = (first.folder / "train.arrow").stat().st_mtime_ns
    again = load(tmp_path, *flags)
    assert again.folder == first.folder and (again.folder / "train.arrow").stat().st_mtime_ns == stamp
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text() + "\n\none more " * 30)
    assert load(tmp_path, *flags).fingerprint != first.fingerprint


def test_the_same_text_elsewhere_has_the_same_fingerprint(folder, tmp_path):
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text())
    flags = ("--sequence-length", 16, "--vocab-size", 300)
    assert load(tmp_path, *flags).fingerprint == load(folder, *flags).fingerprint


def test_a_data_set_by_name_gives_the_rows_of_the_same_text(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text((folder / "text.txt").read_text())
    flags = ("--sequence-length", 16, "--vocab-size", 300)
    by_name = load(folder, *flags, "--corpus", f"hf:{tmp_path / 'data'}")
    assert by_name.fingerprint == load(folder, *flags).fingerprint


def test_a_changed_folder_of_a_data_set_is_read_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "data").mkdir()
    flags = ("--sequence-length", 16, "--vocab-size", 300, "--corpus", f"hf:{tmp_path / 'data'}")
    found = []
    for text in ((folder / "text.txt").read_text(), "another text of a few words\n\n" * 300):
        (tmp_path / "data" / "train.txt").write_text(text)
        found.append(load(tmp_path, *flags).fingerprint)
    assert found[0] != found[1]


def test_a_corpus_that_breaks_half_way_leaves_the_cache_whole(folder, tmp_path):
    (tmp_path / "text.txt").write_bytes((folder / "text.txt").read_bytes() + b"\n\n\xff\xfe not text")
    with pytest.raises(UserError, match=r"text.txt, line \d+ is not UTF-8"):
        load(tmp_path, "--sequence-length", 16, "--vocab-size", 300)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_is_tokenised_at_once_is_bounded_in_characters():
    long = "x" * sources.LONGEST_DOCUMENT
    sizes = [sum(map(len, together)) for together in tokens.batches(iter([long] * 10 + ["short"] * 1000))]
    assert max(sizes) <= tokens.TOGETHER_CHARACTERS + sources.LONGEST_DOCUMENT
    assert sum(sizes) == 10 * len(long) + 5000


def test_a_line_longer_than_the_limit_comes_in_pieces_that_cut_no_character(tmp_path):
    text = "\u4e2d\u6587" * 250_000 + "\nend"  # 1.5 MB in UTF-8, 3 bytes a character
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    pieces = list(sources._lines(tmp_path / "text.txt", lambda size: None))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= sources.LONGEST_DOCUMENT + 3


def test_a_character_cut_by_the_end_of_the_file_is_named_with_its_line(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"one\ntwo \xe4\xb8")
    with pytest.raises(UserError, match=r"text.txt, line 2 is not UTF-8"):
        list(sources.documents([str(tmp_path / "text.txt")]))


# --- masks --------------------------------------------------------------------------------------------------------


def masked(folder, *flags, whole_words=False, probability=0.15, seed=0):
    text = load(folder, "--sequence-length", 32, "--vocab-size", 120, *flags)
    return text, rows.of_corpus(text, probability, whole_words, seed)


def test_masks_do_not_know_the_batch_they_are_drawn_in(folder):
    _, (train, _) = masked(folder)
    together, alone = train.get_batch(Indices([5, 2, 9], epoch=3)), train.get_batch(Indices([9], epoch=3))
    assert (together.input_ids[2] == alone.input_ids[0]).all() and (together.labels[2] == alone.labels[0]).all()


def test_masks_change_with_the_epoch_and_stay_in_evaluation(folder):
    _, (train, held_out) = masked(folder)
    drawn = []
    for part in (train, held_out):
        for epoch in (0, 1):
            drawn.append(part.get_batch(Indices(range(4), epoch)).positions)
    assert (drawn[0] != drawn[1]).any() and (drawn[2] == drawn[3]).all()


def test_eight_of_ten_chosen_tokens_are_masked_and_one_is_kept(folder):
    text, (train, _) = masked(folder, probability=0.5)
    batch = train.get_batch(range(len(train)))
    listed = batch.labels >= 0
    now = batch.input_ids.gather(1, batch.positions)[listed]
    was = batch.labels[listed]
    assert listed.sum().item() == pytest.approx(0.5 * np.asarray(text.train["maskable"][:]).sum(), rel=0.05)
    assert (now == text.meta["special"]["mask"]).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (now == was).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_the_count_of_every_step_is_known_without_looking_at_masks(folder):
    _, (train, _) = masked(folder)
    sampler = UnevenDistributedSampler(plan_batches(len(train), 50, 4), 0, seed=5)
    order = sampler.order()
    counted = [
        int((train.get_batch(order[start : start + 50].tolist()).labels >= 0).sum())
        for start in range(0, len(train), 50)
    ]
    sums = sampler.sums_in_steps(train.counts)
    assert [sums[step] for step in range(len(counted))] == counted


def test_whole_words_are_masked_together(folder):
    _, (train, _) = masked(folder, "--vocab-size", 64, whole_words=True)
    batch = train.get_batch(range(200))
    original = batch.input_ids.clone()
    listed = batch.labels >= 0
    original[listed.nonzero()[:, 0], batch.positions[listed]] = batch.labels[listed]
    cut = 0
    for row in range(200):
        chosen = set(batch.positions[row][listed[row]].tolist())
        cut += sum(
            train.continues[original[row, place]] and (place in chosen) != (place - 1 in chosen)
            for place in range(2, 31)
        )
    assert train.continues[original.numpy()].mean() > 0.1  # such a small vocabulary has words of several tokens
    assert cut <= 200  # at most the last word of each row


# --- HDF5 ---------------------------------------------------------------------------------------------------------

FLAGS = ("--dropout", 0, "--global-batch", 16, "--max-steps", 4, "--precision", "fp64", "--lr", "1e-3")


@pytest.fixture(scope="module")
def shards(folder):
    done = run(
        *("python", BERT.with_name("prepare-corpus.py"), "--corpus", folder / "text.txt", "--objective", "mlm+nsp"),
        *("--cache-dir", folder / "cache", "--sequence-length", 32, "--vocab-size", 300),
        *("--hdf5-dir", folder / "shards", "--rows-per-shard", 60),
    )
    assert done.code == 0, done.output
    return folder / "shards"


def pretrain(folder, out, *flags):
    vocab_size = len((folder / "shards" / "vocab.txt").read_text().splitlines())
    config = out.with_suffix(".json")
    config.write_text(json.dumps({**SMALL, "vocab_size": vocab_size}))
    common = (*FLAGS, "--config-file", config, "--cache-dir", folder / "cache", "--objective", "mlm+nsp")
    play(BERT, (2,), out, *common, *flags)
    return losses(out)


def of_shards(shards, part="train"):
    return ("--corpus", shards / part, "--held-out-corpus", shards / "held_out", "--vocab", shards / "vocab.txt")


@pytest.mark.long
def test_our_own_shards_give_the_loss_of_the_same_rows_from_arrow(folder, shards, tmp_path):
    flags = ("--corpus", folder / "text.txt", "--sequence-length", 32, "--vocab-size", 300)
    from_arrow = pretrain(folder, tmp_path / "arrow", *flags)
    assert pretrain(folder, tmp_path / "shards", *of_shards(shards)) == pytest.approx(from_arrow, abs=1e-12)


def test_shards_made_by_hand_train_and_padding_counts_for_nothing(folder, shards, tmp_path):
    """NVIDIA's layout with h5py alone: our rows once as they are, and once with 8 columns of padding."""
    text = load(folder, "--sequence-length", 32, "--vocab-size", 300, "--objective", "mlm+nsp")
    got = table(text.train)
    found = []
    for padding in (0, 8):
        (tmp_path / f"by-hand-{padding}").mkdir()
        with h5py.File(tmp_path / f"by-hand-{padding}" / "a.hdf5", "w") as shard:
            ids = got["input_ids"].astype("i4")
            places = np.arange(32)
            arrays = {
                "input_ids": ids,
                "input_mask": np.ones_like(ids),
                "segment_ids": (places >= got["second"][:, None]).astype("i4"),
                "masked_lm_positions": np.tile(np.array([3, 7, 0, 0], "i4"), (len(ids), 1)),
                "masked_lm_ids": np.concatenate([ids[:, [3, 7]], np.zeros((len(ids), 2), "i4")], axis=1),
            }
            arrays["input_ids"] = ids.copy()
            arrays["input_ids"][:, [3, 7]] = text.meta["special"]["mask"]
            for name, values in arrays.items():
                wide = name in ("input_ids", "input_mask", "segment_ids")
                shard[name] = np.pad(values, ((0, 0), (0, padding * wide)))
            shard["next_sentence_labels"] = got["next_label"]
        files = ("--corpus", tmp_path / f"by-hand-{padding}", "--held-out-corpus", tmp_path / f"by-hand-{padding}")
        vocab = ("--vocab", shards / "vocab.txt")
        found.append(pretrain(folder, tmp_path / f"stored-{padding}", *files, *vocab, "--masking", "stored"))
        if not padding:
            restored = pretrain(folder, tmp_path / "dynamic", *files, *vocab)
    flags = ("--corpus", folder / "text.txt", "--sequence-length", 32, "--vocab-size", 300)
    assert restored == pytest.approx(pretrain(folder, tmp_path / "arrow", *flags), abs=1e-12)
    assert found[0] == pytest.approx(found[1], abs=1e-12) and found[0] != pytest.approx(restored, abs=1e-3)


def write_shards(text, out):
    prepare.write_shards(text, prepare.ShardOptions(out, 100, 0.15, whole_words=False, seed=0))


def test_shards_of_two_runs_never_mix(folder, shards):
    before = sorted(shards.rglob("*"))
    text = load(folder, "--sequence-length", 32, "--vocab-size", 300)
    with pytest.raises(UserError, match=r"--hdf5-dir .*shards holds train already.*name a new folder"):
        write_shards(text, shards)
    assert sorted(shards.rglob("*")) == before


@pytest.mark.long
def test_a_full_disk_is_one_line_and_leaves_no_shards(folder, shards, tmp_path):
    command = (
        *(sys.executable, BERT.with_name("prepare-corpus.py"), "--corpus", folder / "text.txt"),
        *("--objective", "mlm+nsp", "--cache-dir", folder / "cache", "--sequence-length", 32, "--vocab-size", 300),
        *("--hdf5-dir", tmp_path / "out"),
    )
    # a limit of 8 KiB for each file stands for the full disk: the system refuses to write on, in the same way
    done = run("bash", "-c", f"ulimit -f 8; exec {shlex.join(str(part) for part in command)}")
    assert done.code == 1 and "Traceback" not in done.output
    assert re.search(r"error: --hdf5-dir .*out cannot be written \(.*\): make room", done.output), done.output
    assert list(tmp_path.iterdir()) == []


def test_shards_keep_the_case_and_the_added_words_of_their_tokenizer(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = vocabulary.from_words([*vocabulary.SPECIAL, *sorted(set(TEXT.split())), "The"], lowercase=False)
    tokenizer.add_tokens(["<url>"])
    tokenizer.save_pretrained(tmp_path / "cased")
    text = load(folder, "--sequence-length", 32, "--vocab", tmp_path / "cased")
    write_shards(text, tmp_path / "out")
    flags = ("--corpus", tmp_path / "out" / "train", "--cache-dir", tmp_path / "cache")
    read = load(tmp_path, *flags, "--vocab", tmp_path / "out" / "tokenizer")
    kept = AutoTokenizer.from_pretrained(read.tokenizer_folder)
    assert kept.tokenize("The <url> the") == ["The", "<url>", "the"]
    by_words = load(tmp_path, *flags, "--vocab", tmp_path / "out" / "vocab.txt")
    assert by_words.meta["vocab_size"] == text.meta["vocab_size"] == len(kept)


# --- bad input ----------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_that_names_file_and_line(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    (tmp_path / "twice.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthe\n")
    (tmp_path / "broken.hdf5").write_bytes(b"no shard")
    with h5py.File(tmp_path / "lacking.hdf5", "w") as shard:
        shard["input_ids"] = np.zeros((2, 8), "i4")
    cases = {
        ("--corpus", tmp_path / "empty.txt"): r"empty.txt is empty",
        ("--corpus", tmp_path / "nowhere"): r"nowhere names no file",
        ("--vocab", tmp_path / "vocab.txt"): r"vocab.txt has no \[MASK\] on any of its 5 lines",
        ("--vocab", tmp_path / "twice.txt"): r"twice.txt, line 7: 'the' is on line 6",
        ("--corpus", tmp_path / "broken.hdf5", "--vocab", tmp_path / "vocab.txt"): r"broken.hdf5|no \[MASK\]",
        ("--corpus", tmp_path / "lacking.hdf5"): r"give the --vocab",
        ("--masking", "stored"): r"--masking stored takes its masks from HDF5",
        ("--sequence-length", 4): r"--sequence-length is 4: give 8 or more",
        ("--sequence-length", 20_000): r"does not fill one row of 20000 tokens",
    }
    for flags, message in cases.items():
        with pytest.raises(UserError, match=message):
            load(folder, *flags)


def test_a_row_that_does_not_follow_the_layout_is_named(folder, shards, tmp_path):
    with h5py.File(next((shards / "train").iterdir())) as good, h5py.File(tmp_path / "bad.hdf5", "w") as bad:
        for name in good:
            bad[name] = good[name][:]
        bad["input_ids"][7, 3] = 10_000
    with pytest.raises(UserError, match=r"bad.hdf5, row 7: a number in input_ids is not in a vocabulary"):
        load(folder, "--corpus", tmp_path / "bad.hdf5", "--vocab", shards / "vocab.txt")


def test_a_model_that_does_not_fit_the_corpus_is_refused(tmp_path):
    from bert_ddp.pretrain import model

    meta = {"vocab_size": 300, "sequence_length": 64, "special": {"pad": 0}}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 32}))
    (tmp_path / "gpt.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "text.json").write_text("{")

    def build(name, **changes):
        options = model.ModelOptions("mlm", "tiny", tmp_path / name, dropout=None, checkpoint_activations=False)
        return model.build(options, {**meta, **changes})

    for name, changes, message in (
        ("config.json", {}, r"--sequence-length is 64, but .*config.json has 32 positions"),
        ("config.json", {"vocab_size": 299}, r"config.json has vocab_size 300, but the vocabulary has 299 words"),
        ("gpt.json", {}, r"another architecture: model_type is gpt2"),
        ("text.json", {}, r"text.json is not JSON"),
    ):
        with pytest.raises(UserError, match=message):
            build(name, **changes)


def test_text_that_cannot_be_divided_says_how_to_divide_it(tmp_path):
    (tmp_path / "text.txt").write_text("a line of a book without blank lines\n" * 300)
    flags = ("--sequence-length", 16, "--vocab-size", 300)
    for fraction in (0.05, 0.999):
        with pytest.raises(UserError, match=r"text.txt has no blank lines.*--held-out-corpus"):
            load(tmp_path, *flags, "--held-out", fraction)
    (tmp_path / "text.txt").write_text("a few words\n\n" * 100)
    with pytest.raises(UserError, match=r"--held-out 0.9999 .* leaves no row to train on: lower it"):
        load(tmp_path, *flags, "--held-out", 0.9999)


def test_a_missing_file_is_named_with_the_flag_that_names_it(folder):
    with pytest.raises(UserError, match=r"^--held-out-corpus nowhere names no file"):
        load(folder, "--held-out-corpus", "nowhere")


def test_shards_beside_text_that_is_no_file_are_refused(folder, shards):
    for flags in (("--corpus", "python-docs"), ("--corpus", "python-docs", "--vocab", shards / "vocab.txt")):
        with pytest.raises(UserError, match=r"--corpus is python-docs, which is text, but .*hdf5 is an HDF5 shard"):
            load(folder, *flags, "--held-out-corpus", shards / "held_out")


def write_shard(path, rows=4, places=3, **changes):
    """A shard by hand: rows of 16 tokens, the third one masked, with `places` places for masks in a row."""
    ids, masks = np.full((rows, 16), 6, "i4"), np.zeros((rows, places), "i4")
    ids[:, 2], masks[:, 0] = 4, 2
    arrays = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    arrays |= {"masked_lm_positions": masks, "masked_lm_ids": np.where(masks, 5, 0)}
    arrays |= {"next_sentence_labels": np.zeros(rows, "i4"), **changes}
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as shard:
        for name, values in arrays.items():
            shard[name] = values


def load_shards(folder, *flags):
    (folder / "vocab.txt").write_text("\n".join([*vocabulary.SPECIAL, "the", "fox"]))
    both = ("--corpus", folder / "shards", "--held-out-corpus", folder / "shards")
    return load(folder, *both, "--vocab", folder / "vocab.txt", *flags)


def test_shards_with_room_for_different_numbers_of_masks_go_together(tmp_path):
    write_shard(tmp_path / "shards" / "a.hdf5", places=2)
    write_shard(tmp_path / "shards" / "b.hdf5", places=5)
    train, _ = rows.of_corpus(load_shards(tmp_path, "--masking", "stored"), 0.15, False, 0)
    assert train.get_batch([0, 4]).positions.tolist() == [[2, 0, 0, 0, 0]] * 2


def test_a_shard_with_an_array_of_another_shape_is_named(tmp_path):
    write_shard(tmp_path / "shards" / "flat.hdf5", input_ids=np.zeros(16, "i4"))
    with pytest.raises(UserError, match=r"flat.hdf5: input_ids has the shape \(16,\), not \(rows, tokens"):
        load_shards(tmp_path)


def test_a_row_without_stored_masks_is_named(tmp_path):
    write_shard(tmp_path / "shards" / "bare.hdf5", masked_lm_positions=np.zeros((4, 3), "i4"))
    with pytest.raises(UserError, match=r"bare.hdf5, row 0: no token is masked: .*--masking dynamic"):
        load_shards(tmp_path, "--masking", "stored")


def test_a_data_set_may_hold_rows_without_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "data").mkdir()
    texts = ["first document", None, "second document"]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(sources.documents([f"hf:{tmp_path / 'data'}"])) == ["first document", "second document"]


@pytest.mark.parametrize(("texts", "documents"), [
    (["one\n", "line\n", "", "another\n"], ["one\nline", "another"]),
    (["one", "line\n \n", "", "another"], ["one\nline", "another"]),
    (["one\nwith two lines", "another", "", "the last"], ["one\nwith two lines", "another", "the last"]),
])  # fmt: skip
def test_rows_of_a_data_set_are_lines_where_some_are_blank_and_none_has_several_lines(
    texts, documents, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(sources.documents([f"hf:{tmp_path / 'data'}"])) == documents


# --- files as they are found ----------------------------------------------------------------------------------------

WORDS = "\n".join([*vocabulary.SPECIAL, "the", "fox"])


def vocab(tmp_path, content):
    (tmp_path / "vocab.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return vocabulary.load(str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize(
    "content", [f"\ufeff{WORDS}", f"{WORDS}\n\n\n", WORDS.replace("\n", "\r\n"), WORDS.replace("\n", "\r")]
)
def test_a_vocabulary_with_odd_ends_or_a_byte_order_mark_gives_every_word_its_line_s_number(content, tmp_path):
    assert vocabulary.words_of(vocab(tmp_path, content)) == WORDS.split("\n")


BAD_WORDS = [
    (f"{WORDS}\nthe\nlast", "line 8: 'the' is on line 6 already: write another word there"),
    (WORDS.replace("[PAD]\n", ""), "has no \\[PAD\\] .*a new line anywhere but at the end would give other words"),
    ("\n".join(f"{word}\t{number}" for number, word in enumerate(WORDS.split())), "line 1 has several columns"),
    (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    (b"\x1f\x8b\x08packed", "is packed with gzip"),
]


@pytest.mark.parametrize("content, said", BAD_WORDS)
def test_no_advice_about_a_vocabulary_moves_its_words(content, said, tmp_path):
    with pytest.raises(UserError, match=f"vocab.txt.*{said}"):
        vocab(tmp_path, content)


def test_a_tokenizer_json_is_not_read_as_words(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json is one file of a tokenizer: give its folder"):
        vocabulary.load(str(tmp_path / "tokenizer.json"))


def test_a_vocabulary_that_is_a_pointer_in_a_folder_is_said(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"tokenizer.json is a git-lfs pointer"):
        vocabulary.load(str(tmp_path))


def read(tmp_path, content):
    (tmp_path / "text.txt").write_bytes(content)
    return list(sources.documents([str(tmp_path / "text.txt")]))


@pytest.mark.parametrize(
    "content", [b"a\nb\n\nc\n", b"a\r\nb\r\n\r\nc", b"a\rb\r\rc\r", b"a\r\r\nb\r\r\n\r\r\nc\n\n\n"]
)
def test_text_has_the_same_documents_whatever_ends_its_lines(content, tmp_path):
    assert read(tmp_path, content) == ["a\nb", "c"]


def test_a_text_that_is_only_a_pointer_is_not_trained_on(tmp_path):
    with pytest.raises(UserError, match=r"--corpus .*text.txt is a git-lfs pointer"):
        read(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def test_a_name_longer_than_the_system_takes_is_one_line():
    with pytest.raises(UserError, match=r"--corpus x+ cannot be read: File name too long"):
        sources.find_files(["x" * 300])
    with pytest.raises(UserError, match=r"--vocab x+ cannot be read: File name too long"):
        load(Path(), "--vocab", "x" * 300, "--corpus", sources.PYTHON_DOCS)


def test_text_in_a_language_that_the_vocabulary_lacks_is_refused(folder, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*vocabulary.SPECIAL, "\u4e2d", "\u6587"]))
    with pytest.raises(UserError, match=r"--vocab .*vocab.txt has no word of --corpus .*text.txt"):
        load(folder, "--sequence-length", 16, "--vocab", tmp_path / "vocab.txt")


def said_of(capsys):
    return [line.removeprefix("note: ") for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


def test_what_is_odd_about_text_as_a_whole_is_said_in_one_line_each(folder, tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join([*vocabulary.SPECIAL, *TEXT.split()[:6]]))
    (tmp_path / "text.csv").write_text((folder / "text.txt").read_text())
    both = ("--corpus", tmp_path / "text.csv", "--held-out-corpus", tmp_path / "text.csv")
    load(tmp_path, *both, "--sequence-length", 16, "--vocab", tmp_path / "vocab.txt")
    first, second, *words = said_of(capsys)
    assert "text.csv is trained on and held out" in first
    assert "text.csv is read as plain text, with all its marks" in second
    for flag, line in zip(("--corpus", "--held-out-corpus"), words, strict=True):
        assert re.search(rf"\d\d% of the words of {flag} .*text.csv are not in the vocabulary", line)


def test_a_file_that_is_named_twice_is_said(folder, tmp_path, capsys):
    twice = ("--corpus", folder / "text.txt", folder / "text.txt", "--cache-dir", tmp_path)
    load(folder, *twice, "--sequence-length", 16, "--vocab-size", 300)
    assert said_of(capsys) == [f"{folder / 'text.txt'} is named twice: what is held out of it is trained on too"]


def test_text_that_is_there_twice_is_said(folder, tmp_path, capsys):
    text = (folder / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(f"{text}\n\n{text}")
    load(tmp_path, "--sequence-length", 16, "--vocab-size", 300)
    (line,) = said_of(capsys)
    assert re.search(r"\d\d% of the text that is held out is trained on too: is it twice in .*text.txt\?", line)


def test_nothing_is_odd_about_usual_text(folder, tmp_path, capsys):
    load(folder, "--sequence-length", 16, "--vocab-size", 300, "--cache-dir", tmp_path)
    assert said_of(capsys) == []


def test_shards_of_another_vocabulary_and_labels_that_teach_nothing_are_said(tmp_path, capsys):
    write_shard(tmp_path / "shards" / "a.hdf5")
    load_shards(tmp_path, "--objective", "mlm+nsp")
    _, first, second, _ = said_of(capsys)
    assert first.startswith(f"8 rows of {tmp_path / 'shards'} do not begin with [CLS]: is --vocab the one")
    assert second.startswith(f"every row of {tmp_path / 'shards'} has the same next_sentence_labels: ")


NOTHING_TO_PREDICT = [
    ({"masked_lm_ids": np.zeros((4, 3), "i4")}, r"masked_lm_ids holds \[PAD\], which is no word to predict"),
    (
        {"masked_lm_positions": np.array([[2, 2, 0]] * 4), "masked_lm_ids": np.array([[5, 6, 0]] * 4)},
        "a position twice",
    ),
]


@pytest.mark.parametrize(("change", "said"), NOTHING_TO_PREDICT)
def test_masks_that_cannot_be_are_named(change, said, tmp_path):
    write_shard(tmp_path / "shards" / "a.hdf5", **change)
    with pytest.raises(UserError, match=rf"a.hdf5, row 0: .*{said}"):
        load_shards(tmp_path, "--masking", "stored")


def test_padding_that_counts_as_text_is_named(tmp_path):
    ids = np.full((4, 16), 5, "i4")
    ids[:, 12:] = 0
    write_shard(tmp_path / "shards" / "a.hdf5", input_ids=ids)
    with pytest.raises(UserError, match=r"a.hdf5, row 0: input_mask is 1 for a \[PAD\]"):
        load_shards(tmp_path)


def test_shards_without_masks_or_second_segments_are_said(tmp_path, capsys):
    write_shard(tmp_path / "shards" / "a.hdf5", input_ids=np.full((4, 16), 6, "i4"))
    load_shards(tmp_path, "--masking", "stored", "--objective", "mlm+nsp")
    said = "\n".join(said_of(capsys))
    assert "has a [MASK], so the model sees what it is to predict" in said and "has a second segment" in said


def test_numbers_of_words_in_place_of_text_are_said(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"101 {number} 2003 102 7" for number in range(300)))
    load(tmp_path, "--sequence-length", 16, "--vocab-size", 300)
    assert any("has hardly a word with a letter" in line for line in said_of(capsys))


def test_a_tokenizer_that_leaves_text_as_it_is_is_read(folder, tmp_path):
    tokenizer = vocabulary.from_words([*vocabulary.SPECIAL, *dict.fromkeys(TEXT.split())], lowercase=False)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.save_pretrained(tmp_path / "plain")
    content = json.loads((tmp_path / "plain" / "tokenizer.json").read_text())
    assert content["normalizer"] is None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{word[1:-1].lower()}_token": word for word in vocabulary.SPECIAL}
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(settings))
    load(folder, "--sequence-length", 16, "--vocab", tmp_path / "plain", "--cache-dir", tmp_path / "cache")


def test_a_vocabulary_with_capitals_that_nothing_reaches_is_said(folder, tmp_path, capsys):
    words = [*vocabulary.SPECIAL, *dict.fromkeys(TEXT.split()), *dict.fromkeys(TEXT.title().split())]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    for flags, said in (((), 1), (("--cased",), 0)):
        load(folder, "--sequence-length", 16, "--vocab", tmp_path / "vocab.txt", "--cache-dir", tmp_path, *flags)
        assert sum("but text is lower-cased: --cased?" in line for line in said_of(capsys)) == said


def test_a_data_set_that_is_trained_on_and_held_out_is_said(tmp_path, capsys):
    both = ("--corpus", "python-docs", "--held-out-corpus", "python-docs", "--cache-dir", tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*vocabulary.SPECIAL, *"abcdefghijklmnopqrstuvwxyz"]))
    load(tmp_path, *both, "--sequence-length", 16, "--vocab", tmp_path / "vocab.txt")
    assert said_of(capsys)[0].startswith("python-docs is trained on and held out")


def test_a_row_without_a_token_is_named(tmp_path):
    empty = {"input_mask": np.zeros((4, 16), "i4"), "masked_lm_positions": np.zeros((4, 3), "i4")}
    write_shard(tmp_path / "shards" / "a.hdf5", **empty)
    with pytest.raises(UserError, match=r"a.hdf5, row 0: input_mask says that it holds no token"):
        load_shards(tmp_path)


def test_a_shard_with_damaged_rows_is_one_line(tmp_path):
    write_shard(tmp_path / "shards" / "a.hdf5", rows=400)
    with h5py.File(tmp_path / "shards" / "a.hdf5", "r+") as shard:
        del shard["segment_ids"]
        shard.create_dataset("segment_ids", data=np.zeros((400, 16), "i4"), compression="gzip", chunks=(400, 16))
        at = shard["segment_ids"].id.get_chunk_info(0).byte_offset
    content = bytearray((tmp_path / "shards" / "a.hdf5").read_bytes())
    content[at : at + 8] = b"damaged!"
    (tmp_path / "shards" / "a.hdf5").write_bytes(content)
    with pytest.raises(UserError, match=r"a.hdf5 is not a whole HDF5 file"):
        load_shards(tmp_path)
