#!/usr/bin/env python3
"""Fine-tune a BERT to tag entities or to classify texts, on nodes with different numbers of GPUs.

    bert-finetune.py --task ner --model MODEL --data FOLDER             # train, dev and test files in it
    bert-finetune.py --task classify --model MODEL --data hf:glue,sst2  # a data set by name
    bert-finetune.py ... -n 2 -g 8,2 -i 0           # on the node with 8 GPUs; prints the next line
    bert-finetune.py ... -n 2 -g 8,2 -i 1 --master-addr NODE0      # on the node with 2

MODEL is a folder that transformers has saved, a run of bert-distributed.py, or a hub name. The loss of every step
and the scores do not depend on the layout. The weights with the best dev F1 or accuracy are in OUT_DIR/best/latest.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

if not __package__:  # started by its path: runs from any folder, without being installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import UserError
from common.launch import cli, start, values
from common.launch.layout import Layout

ROLES = ("train", "dev", "test")


def flags() -> ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_batch_flags(parser, global_batch=32)
    cli.add_link_flags(parser)
    training = cli.add_training_flags(parser, epochs=3, lr=5e-5, decayed="matrices")
    cli.add_warmup_flag(training, default="10%")
    training.add_argument("--dropout", type=values.probability, metavar="P", help="instead of the model's own")
    task = parser.add_argument_group("task, model and data (SOURCE: a file, or hf:NAME or hf:NAME,CONFIG)")
    task.add_argument("--task", choices=("ner", "classify"), required=True, help="tag entities, or classify texts")
    task.add_argument("--model", required=True, metavar="MODEL", help="folder, run or hub name to begin from")
    task.add_argument("--max-length", type=values.positive_int, metavar="L", help="most tokens in a row (128)")
    task.add_argument("--data", metavar="SOURCE", help="a folder with train, dev and test files, or hf:NAME")
    for role in ROLES:
        task.add_argument(f"--{role}", metavar="SOURCE", help=f"{role} data, if not those of --data")
    task.add_argument(
        "--text-column", type=columns, metavar="A[,B]", help="column of texts; two for pairs (found if left out)"
    )
    task.add_argument("--label-column", metavar="NAME", help="column of labels (found if left out)")
    cli.add_output_flags(parser)
    cli.may_differ(parser, "model", "data", *ROLES)  # between nodes
    # in a resumed run: the fingerprint of the data covers what these flags lead to
    cli.may_change(parser, "max_length", "text_column", "label_column")
    parser.set_defaults(clip_norm=1.0, eval_batch=64)
    return parser


def columns(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names) or len(names) > 2:
        raise ArgumentTypeError(f"{text!r} is not allowed: name one column, or two for pairs, such as premise,claim")
    return names


def check(args: Namespace, layout: Layout) -> None:
    """Refuse what cannot work, before anything is started. Raises UserError."""
    cli.check_training(args, layout)
    if not args.data and not (args.train and args.dev):
        raise UserError("there is no data: name --data FOLDER or hf:NAME, or --train and --dev")


def main() -> None:
    start.main(flags(), "bert_ddp.finetune.train:train", check)


if __name__ == "__main__":
    main()
