"""Prediction: every rank takes chunks of lines from a shared counter and answers them; rank 0 joins the answers."""

import hashlib
from argparse import Namespace
from typing import Any

import torch.distributed as dist

from bert_ddp.model import pretrained
from bert_ddp.predict.answers import Answerer
from bert_ddp.predict.lines import odd, open_lines
from bert_ddp.predict.parts import Parts
from common.console import say
from common.join.process_group import process_group
from common.launch import cli
from common.launch.layout import Worker
from common.run.precision import Precision


def predict(worker: Worker, args: Namespace) -> None:
    """Run one process from start to end: join, load, answer chunks, join the answers. Every rank must call this."""
    with process_group(worker, cli.join_options(args)) as group:
        device, precision = group.device, Precision(args.precision, group.device)
        with group.first_on_node("the model and the lines"):
            found = pretrained.open_pretrained(args.model, args.task)
            length = pretrained.row_length(args.max_length, found.config, args.model)
            net: Any = pretrained.open_model(
                found.source, args.task, found.config
            )  # mypy cannot read the types of its `to`
            lines = open_lines(args.input, args.chunk, found.tokenizer.mask_token)
        net.to(device)
        weights = pretrained.fingerprint(net)
        group.agree(**{"--input, fingerprint": lines.fingerprint, "--model, fingerprint": weights})

        # The folder's name is a digest, so that parts of other lines, other weights or another task are never used.
        what = f"{lines.fingerprint} {weights} {args.task} {length} {args.top_k} {args.precision} {args.chunk}"
        job = hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
        folder = (args.shared_dir or args.output.parent) / f"{args.output.name}.parts-{job}"
        parts = Parts(group, folder, lines.chunks)
        if worker.is_main:
            ranks = f"{worker.world_size} ranks"
            say(f"{lines.lines:,} lines in {lines.chunks:,} chunks, {args.task} by {found.source}, {ranks}", rank=0)
            for note in odd(lines, args.task, found.tokenizer.mask_token):
                say(f"note: {note}", rank=0)
            pieces = [piece for row in found.tokenizer(lines.chunk(0)).input_ids for piece in row]
            if {*pieces} <= {*found.tokenizer.all_special_ids}:
                say(f"note: --input {args.input}: the vocabulary of --model has no word of its first chunk", rank=0)
        answerer = Answerer(args.task, net, found.tokenizer, precision, args.batch, length, args.top_k)
        kept = parts.compute(lines, answerer.answer)
        sent = parts.join(args.output)
        if worker.is_main:
            how = f"{lines.chunks - kept:,} chunks computed, {kept:,} kept, {sent:,} sent over the network"
            say(f"done     {args.output}: {lines.lines:,} answers; {how}", rank=0)
        dist.barrier()
