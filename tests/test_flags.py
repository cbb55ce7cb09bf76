"""Flags are compared between nodes and with the run that is resumed, unless they are named as free."""

import argparse
import runpy

import pytest

from common.launch import cli, values
from tests.harness import BERT, FINETUNE, MNIST

# What a checkpoint compares. A new flag must be added here, or be named by cli.may_change or cli.may_differ.
TRAINING = {
    "epochs",
    "lr",
    "weight_decay",
    "clip_norm",
    "seed",
    "sync_every",
    "outer_lr",
    "outer_momentum",
}
RECIPES = {
    MNIST: TRAINING | {"label_smoothing"},
    BERT: TRAINING | {"warmup_steps", "decay_power", "mask_probability", "whole_words", "dropout"},
    FINETUNE: TRAINING | {"warmup_steps", "dropout", "task"},
}
REQUIRED = {FINETUNE: ["--task", "ner", "--model", "m", "--data", "d"]}


def parser_of(script):
    return runpy.run_path(str(script), run_name="not main")["flags"]()


def test_a_new_flag_is_compared_on_every_node_and_in_a_resumed_run():
    parser = cli.parser("")
    parser.add_argument("--momentum", type=float, default=0.9)
    args = parser.parse_args(["--momentum", "0.5"])
    assert cli.config(args) == {"momentum": 0.5}
    assert cli.join_options(args).agreed_flags["--momentum"] == "0.5"


def test_a_flag_that_may_change_is_still_compared_between_nodes_and_one_that_may_differ_is_not():
    parser = cli.parser("")
    for name in ("--patience", "--folder"):
        parser.add_argument(name, default="x")
    cli.may_change(parser, "patience")
    cli.may_differ(parser, "folder")
    args = parser.parse_args([])
    assert cli.config(args) == {}
    agreed = cli.join_options(args).agreed_flags
    assert "--patience" in agreed and "--folder" not in agreed


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.name)
def test_a_checkpoint_compares_what_changes_the_optimisation(script):
    assert set(cli.config(parser_of(script).parse_args(REQUIRED.get(script, [])))) == RECIPES[script]


@pytest.mark.parametrize("script, names", [(BERT, "matrices"), (FINETUNE, "matrices"), (MNIST, "all weights")])
def test_help_says_which_weights_decay(script, names):
    assert f"AdamW's, on {names} (default: 0.01)" in " ".join(parser_of(script).format_help().split())


def test_help_shows_a_default_of_0():
    assert "of weights, order, masks and dropout (default: 0)" in " ".join(parser_of(MNIST).format_help().split())


@pytest.mark.parametrize("script", [BERT, FINETUNE], ids=lambda path: path.name)
@pytest.mark.parametrize("given, steps", [("0", 0), ("30", 30), ("10%", 20), ("2.5%", 5), ("100%", 200)])
def test_the_warm_up_is_given_in_steps_or_as_a_part_of_all_steps(script, given, steps):
    args = parser_of(script).parse_args([*REQUIRED.get(script, []), "--warmup-steps", given])
    assert cli.steps_of(args.warmup_steps, 200) == steps


@pytest.mark.parametrize("given", ["0.1", "-1", "101%", "-1%", "%", "10%%", "nan%", "ten"])
def test_any_other_warm_up_is_refused(given):
    with pytest.raises(argparse.ArgumentTypeError, match="give steps, such as 500, or a part of all, such as 10%"):
        values.steps_or_percent(given)


@pytest.mark.parametrize("text, weights", [
    ("4,4,1", (4, 4, 1)),
    ("8x1.0,2x0.5", (1.0,) * 8 + (0.5,) * 2),
    ("1,2x3", (1, 3, 3)),
    ("2x0,1", (0, 0, 1)),
])  # fmt: skip
def test_shares_are_a_weight_a_rank_or_how_many_ranks_have_it(text, weights):
    assert values.shares(text) == weights


NO_SHARES = ["", "a", "0,0", "1,-1", "nan", "inf", "2x", "x2", "1.5x1", "-1x2", "4,-1x2", "1,,2", "9" * 11 + "x1"]


@pytest.mark.parametrize("text", NO_SHARES)
def test_shares_that_are_not_weights_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not allowed: name a weight of 0 or more for each rank"):
        values.shares(text)


@pytest.mark.parametrize("text, sizes", [("32", 32), ("32,32,16", (32, 32, 16)), ("2x32,16", (32, 32, 16))])
def test_a_micro_batch_is_one_number_or_one_a_rank(text, sizes):
    assert values.micro_batch(text) == sizes
    args = argparse.Namespace(micro_batch=sizes)
    assert cli.micro_batches(args, 3) == ([32] * 3 if text == "32" else [32, 32, 16])


@pytest.mark.parametrize("text", ["0", "", "1,0", "1.5", "-3", "2x", "auto,3", "9" * 11 + "x1"])
def test_a_micro_batch_that_is_no_number_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not allowed: give a whole number of 1 or more"):
        values.micro_batch(text)
