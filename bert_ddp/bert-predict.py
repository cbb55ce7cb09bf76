#!/usr/bin/env python3
"""Answer every line of a file with a BERT: masked words, entities, classes or sentence embeddings, on any layout.

    bert-predict.py --task ner --model runs/bert-ner-0001 --input lines.txt --output answers.jsonl
    bert-predict.py ... -n 2 -g 8,2 -i 0            # on the node with 8 GPUs; prints the next line
    bert-predict.py ... -n 2 -g 8,2 -i 1 --master-addr NODE0       # on the node with 2

One JSON object a line, in the order of the lines, on node 0. The same command goes on after an interruption.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, without being installed

from common.errors import UserError
from common.launch import cli, start
from common.launch.layout import Layout, Worker


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    task = parser.add_argument_group("task")
    names = ("fill-mask", "ner", "classify", "embed")
    task.add_argument("--task", choices=names, required=True, help="what to answer")
    task.add_argument("--model", required=True, metavar="MODEL", help="folder, run or hub name")
    task.add_argument(
        "--max-length", type=cli.positive_int, metavar="L", help="most tokens in a row (the model's most)"
    )
    task.add_argument("--top-k", type=cli.positive_int, default=5, metavar="K", help="words for each [MASK]")
    task.add_argument("--batch", type=cli.positive_int, default=32, metavar="B", help="rows in one forward on a rank")
    task.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="numbers to compute in")
    files = parser.add_argument_group("files")
    files.add_argument("--input", type=Path, required=True, metavar="FILE", help="lines of text, on every node")
    files.add_argument("--output", type=Path, required=True, metavar="FILE", help="answers, written by node 0")
    files.add_argument(
        "--shared-dir", type=Path, metavar="DIR", help="a folder all nodes see, for parts (else over the network)"
    )
    files.add_argument("--chunk", type=cli.positive_int, default=256, metavar="N", help="lines a rank takes at once")
    cli.may_differ(parser, "model", "input", "output", "shared_dir")  # between nodes
    return parser


def check(args: Namespace, layout: Layout) -> None:
    """Refuse what cannot work, before anything is started. Raises UserError."""
    if not args.input.is_file():
        raise UserError(f"--input {args.input}: there is no such file on this node")
    if args.output.exists():
        raise UserError(f"--output {args.output} is there already: name another file, or remove it")


if __name__ == "__main__":
    # A wrong flag is answered before torch is imported. `launch` then loads this file once more in every worker,
    # as a module, so that it goes on below this line, and calls train() there.
    start.main(flags(), check)

import hashlib

import torch.distributed as dist

from bert_ddp.model import pretrained
from bert_ddp.predict.answers import Answerer
from bert_ddp.predict.lines import Parts, open_lines
from common.join.process_group import process_group
from common.record.report import say
from common.uneven.precision import Precision


def train(worker: Worker, args: Namespace) -> None:
    """One process's whole life: join, load, answer chunk by chunk, bring the answers together. Every rank runs it."""
    with process_group(worker, args) as group:
        device, precision = group.device, Precision(args.precision, group.device)
        with group.first_on_node("loading the model"):
            source = pretrained.locate(args.model)
            config = pretrained.open_config(source, args.task)
            tokenizer = pretrained.open_tokenizer(source, config)
            net = pretrained.open_model(source, args.task, config).to(device)
            lines = open_lines(args.input, args.chunk)
        length = args.max_length or config.max_position_embeddings
        if not 8 <= length <= config.max_position_embeddings:
            raise UserError(
                f"--max-length is {length}, but --model {args.model} has positions for 8 to "
                f"{config.max_position_embeddings} tokens",
                same_on_every_rank=True,
            )
        weights = pretrained.fingerprint(net)
        group.agree(**{"--input, fingerprint": lines.fingerprint, "--model, fingerprint": weights})

        # Parts of other lines, other weights or another task are never taken for ours.
        what = f"{lines.fingerprint} {weights} {args.task} {length} {args.top_k} {args.precision} {args.chunk}"
        job = hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
        parts = Parts(group, (args.shared_dir or args.output.parent) / f"{args.output.name}.parts-{job}", lines.chunks)
        if worker.is_main:
            say(
                worker,
                f"{lines.lines:,} lines in {lines.chunks:,} chunks, {args.task} by {source}, {worker.world_size} ranks",
            )
        answerer = Answerer(args.task, net, tokenizer, precision, args.batch, length, args.top_k)
        before = parts.compute(lines, answerer.answer)
        sent = parts.join(args.output)
        if worker.is_main:
            how = f"{lines.chunks - before:,} chunks computed, {before:,} kept, {sent:,} sent over the network"
            say(worker, f"done     {args.output}: {lines.lines:,} answers; {how}")
        dist.barrier()
