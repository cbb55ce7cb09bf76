#!/usr/bin/env python3
"""Answer every line of a file with a BERT: masked words, entities, classes or sentence embeddings, on any layout.

    bert-predict.py --task ner --model runs/bert-ner-0001 --input lines.txt --output answers.jsonl
    bert-predict.py ... -n 2 -g 8,2 -i 0            # on the node with 8 GPUs; prints the next line
    bert-predict.py ... -n 2 -g 8,2 -i 1 --master-addr NODE0       # on the node with 2

Node 0 writes one JSON object for each line, in the order of the lines. After an interruption the same command keeps
what is done and computes the rest.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

if not __package__:  # started by its path: runs from any folder, without being installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import UserError
from common.files import reading
from common.launch import cli, start, values
from common.launch.layout import Layout


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    task = parser.add_argument_group("task")
    names = ("fill-mask", "ner", "classify", "embed")
    task.add_argument("--task", choices=names, required=True, help="what to answer")
    task.add_argument("--model", required=True, metavar="MODEL", help="folder, run or hub name")
    task.add_argument(
        "--max-length", type=values.positive_int, metavar="L", help="most tokens in a row (the model's most)"
    )
    task.add_argument("--top-k", type=values.positive_int, default=5, metavar="K", help="words for each [MASK]")
    task.add_argument(
        "--batch", type=values.positive_int, default=32, metavar="B", help="rows in one forward on a rank"
    )
    task.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the forward pass")
    files = parser.add_argument_group("files")
    files.add_argument("--input", type=Path, required=True, metavar="FILE", help="lines of text, on every node")
    files.add_argument("--output", type=Path, required=True, metavar="FILE", help="answers, written by node 0")
    files.add_argument(
        "--shared-dir",
        type=Path,
        metavar="DIR",
        help="folder that all nodes share, for the parts (else sent over the network)",
    )
    files.add_argument("--chunk", type=values.positive_int, default=256, metavar="N", help="lines a rank takes at once")
    cli.may_differ(parser, "model", "input", "output", "shared_dir")  # between nodes
    return parser


def check(args: Namespace, layout: Layout) -> None:
    """Refuse what cannot work, before anything is started. Raises UserError."""
    with reading(args.input, f"--input {args.input}"):
        if not args.input.is_file():
            what = "is a folder: name one file" if args.input.is_dir() else "there is no such file on this node"
            raise UserError(f"--input {args.input}: {what}")
    with reading(args.output, f"--output {args.output}"):
        is_there = args.output.exists()
    if is_there:
        raise UserError(f"--output {args.output} is there already: name another file, or remove it")


def main() -> None:
    start.main(flags(), "bert_ddp.predict.run:predict", check)


if __name__ == "__main__":
    main()
