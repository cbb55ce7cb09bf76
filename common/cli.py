"""The flags that all trainers share, in groups. Light to import: `--help` must not wait for torch."""

import argparse
import math
from pathlib import Path

from common.errors import UserError
from common.layout import Layout, Worker

# Flags that may differ between the nodes of one job; all others must agree, and the join checks that they do.
# A trainer adds its own with `may_differ`.
NODE_FLAGS = {
    *("node_rank", "master_addr", "master_port", "interface", "join_timeout"),
    *("distributed_init_method", "distributed_gpus", "distributed_rank", "distributed_no_spawn", "device_id"),
    *("out_dir", "device", "oversubscribe", "tensorboard"),
}
JOIN_TIMEOUT_SECONDS = 300.0


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written; defaults shown where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str:
        silent = action.default in (None, False, argparse.SUPPRESS)
        return action.help if silent else super()._get_help_string(action)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the layout flags. Abbreviations are off: `--step` must not come to mean `--max-steps`."""
    result = argparse.ArgumentParser(description=description, formatter_class=Formatter, allow_abbrev=False)
    add_layout_flags(result)
    result.set_defaults(node_flags=NODE_FLAGS)
    return result


def may_differ(parser: argparse.ArgumentParser, *names: str) -> None:
    """Let these flags differ between nodes, such as paths; what they lead to is better compared with `Group.agree`."""
    parser.set_defaults(node_flags=parser.get_default("node_flags") | set(names))


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout: which processes, where (leave out under torchrun)")
    group.add_argument("-n", "--nodes", type=positive_int, metavar="N", help="number of nodes")
    group.add_argument("-g", "--gpus", type=gpus_per_node, metavar="A,B,...", help="GPUs of each node, such as 8,2")
    group.add_argument("-i", "--node-rank", type=natural_int, metavar="K", help="this node's number; 0 is the master")
    group.add_argument("--master-addr", metavar="HOST", help="where node 0 is; node 0 finds its own address")
    group.add_argument("--master-port", type=port, metavar="PORT", help="port of node 0 (29500)")
    group.add_argument("--interface", metavar="NAME", help="network interface; found by itself when left out")
    group.add_argument(
        "--join-timeout", type=positive_float, default=JOIN_TIMEOUT_SECONDS, metavar="S", help="wait for missing nodes"
    )
    group.add_argument(
        "--timeout", type=positive_float, default=600.0, metavar="S", help="limit of a collective and of silence"
    )
    group.add_argument(
        "--work-timeout",
        type=positive_float,
        default=7200.0,
        metavar="S",
        help="limit of one rank's own work, such as a download, that the others wait for",
    )
    group.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto takes GPUs if there are")
    group.add_argument(
        "--backend",
        "--distributed-backend",
        choices=("auto", "nccl", "gloo", "mpi", "ucc"),
        default="auto",
        help="collectives",
    )
    group.add_argument("--oversubscribe", action="store_true", help="let ranks share GPUs over gloo, for study")
    _add_hetseq_flags(parser)


def _add_hetseq_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout, in HetSeq's and fairseq's words (instead of -n, -g and -i)")
    group.add_argument(
        "--distributed-init-method", metavar="URL", help="where all meet: tcp://HOST:PORT, file:///PATH or env://"
    )
    group.add_argument("--distributed-world-size", type=positive_int, metavar="W", help="processes of all nodes")
    group.add_argument("--distributed-gpus", type=positive_int, metavar="G", help="processes to start here")
    group.add_argument("--distributed-rank", type=natural_int, metavar="R", help="rank of the first process here")
    group.add_argument("--distributed-no-spawn", action="store_true", help="this process is the one of that rank")
    group.add_argument(
        *("--device-id", "--local-rank", "--local_rank"), type=natural_int, metavar="D", help="GPU of this one process"
    )


def add_batch_flags(parser: argparse.ArgumentParser, global_batch: int) -> None:
    group = parser.add_argument_group("batches (samples per optimizer step; the result does not depend on the layout)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--global-batch", type=positive_int, default=global_batch, metavar="B", help="over all ranks")
    size.add_argument("--batch-per-gpu", type=positive_int, metavar="B", help="instead: global batch = B x ranks")
    group.add_argument("--micro-batch", type=positive_int, metavar="B", help="most samples in one forward on a rank")
    group.add_argument("--shares", type=shares, metavar="A,B,...", help="each rank's weight in the global batch")
    group.add_argument(
        "--eval-batch", type=positive_int, default=1000, metavar="B", help="samples a rank evaluates at once"
    )


def add_training_flags(parser: argparse.ArgumentParser, epochs: int, lr: float) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=positive_int, default=epochs, help="passes over the training data")
    group.add_argument("--max-steps", type=positive_int, metavar="S", help="stop after so many optimizer steps")
    group.add_argument("--lr", type=positive_float, default=lr, help="peak learning rate")
    group.add_argument("--weight-decay", type=non_negative_float, default=0.01, help="AdamW's, on matrices")
    group.add_argument(
        "--clip-norm", type=positive_float, default=math.inf, metavar="X", help="clip the gradient's norm"
    )
    group.add_argument("--seed", type=natural_int, default=0, help="weights, order, masks and dropout follow from it")
    group.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="fp64 is for proofs"
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    return group


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "--out-dir", type=Path, metavar="DIR", help="runs/NAME-0001, the next free number, when left out"
    )
    group.add_argument(
        "--resume", nargs="?", const="auto", metavar="auto|PATH", help="go on from a checkpoint, any layout"
    )
    group.add_argument("--save-every", type=positive_int, metavar="S", help="steps between checkpoints (each epoch)")
    group.add_argument("--keep", type=positive_int, default=3, metavar="K", help="checkpoints to keep")
    group.add_argument("--eval-only", action="store_true", help="evaluate the checkpoint of --resume and end")
    group.add_argument(
        "--log-every", type=positive_int, default=1, metavar="S", help="steps between rows of metrics.jsonl"
    )
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard files too")


# --- what follows from several flags -----------------------------------------------------------------------------


def check_training(args: argparse.Namespace, layout: Layout) -> None:
    """Refuse combinations of flags that cannot work, before anything is started. Raises UserError."""
    if args.eval_only and args.resume is None:
        raise UserError(
            "--eval-only has nothing to evaluate: name a checkpoint with --resume PATH, or --resume for the last"
        )
    if args.shares and len(args.shares) != layout.world_size:
        raise UserError(
            f"--shares has {len(args.shares)} weights, but the job has {layout.world_size} ranks: give each rank one"
        )


def global_batch(args: argparse.Namespace, worker: Worker) -> int:
    """Samples per optimizer step over all ranks, from --global-batch or --batch-per-gpu."""
    return args.batch_per_gpu * worker.world_size if args.batch_per_gpu else args.global_batch


def values(args: argparse.Namespace, *names: str) -> dict[str, object]:
    """These flags' values, such as those that a resumed run must share with the one before."""
    return {name: getattr(args, name) for name in names}


# --- types: each says what is allowed ----------------------------------------------------------------------------


def _number(kind: type, text: str, allowed: str, condition) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not condition(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give {allowed}")
    return value


def positive_int(text: str) -> int:
    return _number(int, text, "a whole number of 1 or more", lambda value: value >= 1)


def natural_int(text: str) -> int:
    return _number(int, text, "a whole number of 0 or more", lambda value: value >= 0)


def port(text: str) -> int:
    return _number(int, text, "a port from 1 to 65535", lambda value: 1 <= value <= 65535)


def positive_float(text: str) -> float:
    return _number(float, text, "a number above 0", lambda value: value > 0)


def non_negative_float(text: str) -> float:
    return _number(float, text, "a number of 0 or more", lambda value: value >= 0)


def probability(text: str) -> float:
    return _number(float, text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def percent(text: str) -> float:
    """A percentage as a fraction: 99 -> 0.99."""
    return _number(float, text, "a percentage above 0 and up to 100, such as 99", lambda value: 0 < value <= 100) / 100


def gpus_per_node(text: str) -> tuple[int, ...]:
    try:
        gpus = tuple(int(part) for part in text.split(","))
    except ValueError:
        gpus = ()
    if not gpus or min(gpus) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: name the GPUs of each node, 1 or more, such as 8,2")
    return gpus


def shares(text: str) -> tuple[float, ...]:
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: name a weight of 0 or more for each rank, such as 4,4,1"
        )
    return weights
