"""Random foreign input for every parser: each must take it, or refuse it with an error that a person can read.

`TARGETS` holds, by name, a hypothesis strategy and what reads its values. tests/test_fuzz.py gives each some hundred
values, benchmarks/fuzz.py a hundred thousand.
"""

import argparse
import atexit
import contextlib
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from bert_ddp.finetune import files
from bert_ddp.text import shards, vocabulary
from common.compare import __main__ as comparison
from common.compare.run import read_run
from common.elastic.standby import Standby
from common.errors import ExplainedError, UserError
from common.join.leader import Leader
from common.join.secret import seal
from common.launch import cli, values
from common.launch.detect import layout_from
from common.launch.layout import Layout
from common.predict import figures
from common.record import checkpoint
from common.record.metrics import read_metrics
from mnist_ddp import data

FOLDER = Path(tempfile.mkdtemp(prefix="uneven-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
REFUSALS = (ExplainedError, argparse.ArgumentTypeError)


@dataclass(frozen=True)
class Target:
    strategy: st.SearchStrategy
    read: Callable[[Any], object]

    def is_taken(self, value: Any) -> bool:
        """True if the value is taken, False if it is refused in words. Anything else is an error."""
        try:
            self.read(value)
        except REFUSALS as error:
            assert str(error).strip(), "an error without words"
            return False
        return True


# --- strategies ----------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: Any, valid: bytes) -> bytes:
    """`valid` with up to four bytes changed, cut out, put in, or repeated."""
    found = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(found)))
        kind = draw(st.sampled_from(("change", "cut", "put", "repeat", "end")))
        if kind == "change" and at < len(found):
            found[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del found[at : at + draw(st.integers(1, 9))]
        elif kind == "put":
            found[at:at] = draw(st.binary(max_size=8))
        elif kind == "repeat":
            found[at:at] = found[at : at + draw(st.integers(1, 40))]
        elif kind == "end":
            del found[at:]
    return bytes(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def like(draw: Any, valid: Any) -> Any:
    """JSON like `valid`, with some of its parts missing or replaced by anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(valid, dict):
        return {key: draw(like(value)) for key, value in valid.items() if draw(st.integers(0, 19))}
    if isinstance(valid, list):
        return [draw(like(value)) for value in valid]
    return valid


def written(name: str, content: bytes) -> Path:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- flags and variables --------------------------------------------------------------------------------------------

KINDS = [
    *(values.positive_int, values.natural_int, values.port, values.positive_float, values.non_negative_float),
    *(values.probability, values.percent, values.save_every, values.steps_or_percent, values.gpus_per_node),
    *(values.shares, values.micro_batch, values.slow_ranks, figures.size),
    figures.link,
]
WORDS = [
    "8,2",
    "1",
    "0",
    "-1",
    "2x8,1x2",
    "99999999999x1",
    "auto",
    "10m",
    "1e400",
    "nan",
    "inf",
    "bf16",
    "1Gbit,0.1ms",
    "٣",
]
TYPED = st.sampled_from(WORDS) | st.text(max_size=12) | st.text("0123456789,x.-e:", max_size=12)


def flags() -> argparse.ArgumentParser:
    parser = cli.parser("")
    cli.add_batch_flags(parser, 256)
    cli.add_link_flags(parser)
    cli.add_training_flags(parser, epochs=1, lr=0.1)
    cli.add_output_flags(parser)
    return parser


PARSER = flags()
NAMES = [name for action in PARSER._actions for name in action.option_strings]


SOME = st.tuples(st.sampled_from(NAMES), TYPED) | st.tuples(st.sampled_from(NAMES)) | st.tuples(TYPED)
COMMAND_LINES = st.lists(SOME, max_size=4).map(lambda parts: [word for part in parts for word in part])


def parse(words: list[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = PARSER.parse_args(words)
    except SystemExit as end:
        if end.code == 2:
            raise UserError(said.getvalue().partition("error:")[2]) from None
        assert end.code == 0, said.getvalue()
        return
    cli.check_training(args, layout_from(cli.layout_flags(args), {}))


VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_GTIDS", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"),
    *("SLURM_HET_SIZE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURMD_NODENAME", "SLURM_STEP_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "TORCHELASTIC_RUN_ID", "PMIX_RANK"),
]
SET = st.sampled_from(["0", "1", "2", "3", "-1", "n[0-3]", "a,b", "2(x2)", "0,1", "n[9-0]", "x[1-]", ""]) | st.text(
    "0123456789[]-,nx()", max_size=10
)
NO_FLAGS = PARSER.parse_args(["--device", "cpu"])


def variables(environ: dict[str, str]) -> None:
    layout_from(cli.layout_flags(NO_FLAGS), environ)


# --- files ----------------------------------------------------------------------------------------------------------


def saved() -> dict[str, bytes]:
    """The files of a small checkpoint, by name."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = checkpoint.save(FOLDER / "valid", 7, net, {"seed": 0, "data": "x"}, optimizer=optimizer)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


VALID = saved()
STATE = json.loads(VALID["state.json"])


def resume(contents: dict[str, bytes]) -> None:
    """Read a checkpoint whose checksums are right, as a stranger could make them."""
    folder = FOLDER / "run" / "checkpoints" / "step-00000007"
    for name, content in contents.items():
        written(str(folder.relative_to(FOLDER) / name), content)
    state = contents["state.json"]
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        known = json.loads(state)
        known["checksums"] = {name: checkpoint._checksum(folder / name) for name in contents if name != "state.json"}
        written(str((folder / "state.json").relative_to(FOLDER)), json.dumps(known).encode())
    with contextlib.redirect_stdout(io.StringIO()):
        found = checkpoint.find(FOLDER / "run")
    assert found is not None
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    found.require({"data": "x"})
    found.load_model(net)
    found.load_training(optimizer=optimizer)
    assert isinstance(found.state["step"], int)


@st.composite
def checkpoints(draw: Any) -> dict[str, bytes]:
    contents = dict(VALID)
    which = draw(st.sampled_from(sorted(contents)))
    contents[which] = draw(mutated(contents[which]))
    if which == "state.json":
        contents[which] = json.dumps(draw(like(STATE))).encode() if draw(st.booleans()) else contents[which]
    return contents


IDX = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 3, *range(18)])
CONLL = b"-DOCSTART- O\n\nAnna B-PER\nsaw O\n\nBerlin\tx\tB-LOC\r\n\n"
TABLE = b'text,label\n"good, very",1\nbad,0\n'
LINES = b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n'
VOCABULARY = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n\xc3\xa4\n"
METRICS = b"".join(
    json.dumps({"kind": "train", "step": step, "loss": 2.0 / step, "lr": 0.1, "grad_norm": 1.0, "epoch": 0}).encode()
    + b"\n"
    for step in (1, 2, 3)
)
RUN = {
    "starts": [
        {
            **{"first_step": 0, "versions": {"torch": "2"}, "commit": "x", "facts": {"data": "y"}, "shares": [2, 1]},
            **{"flags": {"precision": "fp64", "lr": 0.1}, "layout": {"source": "-g 2", "world_size": 2}},
        }
    ]
}
DOCTOR = {
    "layout": {"gpus_per_node": [2, 1]},
    "links": [{"mbit_per_second": 100.0, "latency_ms": 0.1}],
    "all_reduce": [{"bytes": 4, "ms": 1.0}, {"bytes": 1024, "ms": 2.0}],
}
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def table(content: bytes) -> None:
    list(files.read_records(written("table.csv", content)))


def compared(value: tuple[bytes, Any]) -> None:
    metrics, run = value
    written("a/metrics.jsonl", metrics)
    written("a/run.json", json.dumps(run).encode())
    written("b/metrics.jsonl", METRICS)
    read_run(FOLDER / "a")
    with contextlib.redirect_stdout(io.StringIO()):
        comparison.report(argparse.Namespace(a=FOLDER / "a", b=FOLDER / "b", tolerance=None))


@st.composite
def hdf5(draw: Any) -> dict[str, np.ndarray]:
    """Arrays of a shard, some of another shape, type or range."""
    rows, length, most = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 2))
    matrices, masks = {key: [rows, length] for key in shards.MATRICES}, {key: [rows, most] for key in shards.MASKS}
    found = {}
    for name, usual in (matrices | masks | {shards.LABELS: [rows]}).items():  # of another shape now and then
        if draw(st.integers(0, 19)) == 0:
            continue
        shape = draw(st.lists(st.integers(0, 3), max_size=3)) if draw(st.integers(0, 9)) == 0 else usual
        kind = draw(st.sampled_from(["int32", "int8", "int64", "float32", "S3", "bool"] + 9 * ["int32"]))
        numbers = draw(st.lists(st.integers(-2, 7), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        if name == "input_mask" and draw(st.booleans()):
            numbers = [1] * len(numbers)
        found[name] = np.array(numbers).reshape(shape).astype(kind)
    return found


def shard(arrays: dict[str, np.ndarray]) -> None:
    path = FOLDER / "shard.hdf5"
    with h5py.File(path, "w") as file:
        for name, values_ in arrays.items():
            file.create_dataset(name, data=values_)
    length, most = shards._shape(path)
    list(shards._read(path, length, 6, SPECIAL, most))


# --- the store ------------------------------------------------------------------------------------------------------

LAYOUT = Layout("-g 2", world_size=2, first_rank=0, local_world_size=2, init_method="tcp://127.0.0.1:1")
VIEW = {
    **{"rank": 1, "local_rank": 1, "original": 1, "nodes": 1, "node_rank": 0, "host": "a", "pid": 1, "pid_space": "x"},
    **{"device": "cpu", "gpu": "", "source": "-g 2", "addresses": {"own": "", "master": ""}, "problem": ""},
    **{"layout": {"world size": "2"}, "versions": {"torch": "2"}, "backend": {}, "flags": {}, "entry": 1, "nonce": "n"},
    "process": "a x 1",
}


def joined(view: Any) -> None:
    """Rank 0 reads the view that a stranger has posted."""
    store = dist.HashStore()
    leader = Leader(LAYOUT.workers()[0], store, VIEW | {"rank": 0, "local_rank": 0})
    store.set("1/view", view.decode("latin-1") if isinstance(view, bytes) else json.dumps(view))
    store.add("entries", 1)
    with contextlib.redirect_stdout(io.StringIO()):
        leader.advance()
    posted = store.get("1/view").decode()
    store.set(f"{leader.token}/answer/1", f"1 {seal(b'', leader.token, '1', posted)}")
    store.add(f"{leader.token}/answers", 1)
    leader.advance()
    assert all(rank < 2 for rank in leader.alive)
    if 1 not in leader.alive:
        raise UserError("ignored")


GUEST: dict = {
    "standby": "127.0.0.1 29500",
    "original": 1,
    "node_rank": 1,
    "host": "nodeb",
    "predecessor": "",
    "late": False,
    "local_rank": 0,
    "launch": "",
    "gpu": "",
    "stop": False,
}
GUEST["claim"] = {**{name: VIEW[name] for name in ("layout", "versions", "flags")}, "data": {}}


@functools.cache
def standby() -> Standby:
    return Standby("127.0.0.1")


def came(guest: Any) -> None:
    """The rank that leads reads what a stranger has written at its standby."""
    content, store = guest.decode("latin-1") if isinstance(guest, bytes) else json.dumps(guest), standby().store
    number = store.add("present", 1)
    store.set(f"present/{number}", f"{seal(b'', 'present', str(number), content)} {content}")
    with contextlib.redirect_stdout(io.StringIO()):
        standby().look()
    if not standby().waiting:
        raise UserError("ignored")
    standby().answer(number, {})


TARGETS = {
    "values of flags": Target(st.tuples(st.sampled_from(KINDS), TYPED), lambda value: value[0](value[1])),
    "command lines": Target(COMMAND_LINES, parse),
    "variables": Target(st.dictionaries(st.sampled_from(VARIABLES), SET, max_size=10), variables),
    "checkpoints": Target(checkpoints(), resume),
    "IDX": Target(mutated(IDX), lambda content: data._read_idx(written("idx", content), (2, 3, 3))),
    "CoNLL": Target(mutated(CONLL), lambda content: list(files.read_conll(written("a.conll", content)))),
    "tables": Target(mutated(TABLE), table),
    "JSON lines": Target(mutated(LINES), lambda content: list(files.read_records(written("a.jsonl", content)))),
    "HDF5": Target(hdf5(), shard),
    "vocabularies": Target(mutated(VOCABULARY), lambda content: vocabulary._read_words(written("vocab", content))),
    "metrics.jsonl": Target(mutated(METRICS), lambda content: read_metrics(written("metrics.jsonl", content))),
    "runs to compare": Target(st.tuples(mutated(METRICS), like(RUN)), compared),
    "the doctor's JSON": Target(
        like(DOCTOR), lambda value: figures.of_doctor(written("doctor.json", json.dumps(value).encode()))
    ),
    "views in the store": Target(like(VIEW) | mutated(json.dumps(VIEW).encode()), joined),
    "guests of the standby": Target(like(GUEST) | mutated(json.dumps(GUEST).encode()), came),
}
