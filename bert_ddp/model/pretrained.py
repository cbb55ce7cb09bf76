"""Open an existing BERT: a folder that transformers has saved, a run of ours, or a hub name.

An error is one line that names the flag.
"""

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from bert_ddp.model.words import require_words
from common.errors import RunError, UserError
from common.files import reading
from common.record.latest import latest_folder
from common.state import not_finite, not_floating

Model = TypeVar("Model", bound=PreTrainedModel)
# the name of each task's model in a config's `architectures`
ARCHITECTURES = {
    "ner": ("BertForTokenClassification",),
    "classify": ("BertForSequenceClassification",),
    "fill-mask": ("BertForMaskedLM", "BertForPreTraining"),
    "embed": (),  # any BERT
}
CLASSES = {
    "ner": transformers.BertForTokenClassification,
    "classify": transformers.BertForSequenceClassification,
    "fill-mask": transformers.BertForMaskedLM,
    "embed": transformers.BertModel,
}
FILES_OF_MODELS = (".json", ".txt", ".safetensors", ".bin")
NEW_HEADS = ("classifier.", "bert.pooler.")  # weights that fine-tuning may lack at its start

transformers.logging.set_verbosity_error()  # `load_weights` reports missing weights in one line
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Pretrained:
    """A BERT to start from: where it is, and what comes with its weights."""

    source: str  # a folder, or a name on the hub
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


def open_pretrained(name: str, task: str | None = None) -> Pretrained:
    """What --model names, without its weights. Raises UserError unless it is a BERT with a tokenizer of its own, with
    `task` one that was fine-tuned for that task; RunError where the hub does not answer."""
    source = locate(name)
    config = open_config(source, task)
    return Pretrained(source, config, open_tokenizer(source, config))


def locate(name: str, flag: str = "--model") -> str:
    """The folder or hub name to load from. In a run's --out-dir these are its best weights, or else its latest.

    Raises UserError where a folder holds no model.
    """
    path = Path(name)
    with reading(path, f"{flag} {name}"):
        for inside in (path, latest_folder(path / "best"), latest_folder(path / "checkpoints")):
            files = [file for file in inside.glob("*") if file.suffix in FILES_OF_MODELS]
            if pipes := [file for file in files if file.is_fifo()]:
                raise UserError(f"{flag} {pipes[0]} is a pipe: give a file, which can be read again")
            if (inside / "config.json").is_file():
                return str(inside)
        there = path.exists()
    if there:
        raise UserError(
            f"{flag} {name} has no config.json: give a folder that transformers has saved, or a run's --out-dir"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{flag} {name}: there is no such folder")
    return name


def open_config(name: str, task: str | None = None, flag: str = "--model") -> PretrainedConfig:
    """The model's config. Raises UserError unless it is a BERT, with `task` one that was fine-tuned for that task."""
    with one_line(name, flag):
        config = AutoConfig.from_pretrained(name)
    if config.model_type != "bert":
        raise UserError(f"{flag} {name} has the architecture {config.model_type}: a BERT is needed (model_type bert)")
    allowed = ARCHITECTURES[task] if task else ()
    found = config.architectures or ["no architecture"]
    if allowed and not set(allowed) & set(found):
        raise UserError(
            f"--model {name} is a {found[0]}, but --task {task} needs a {allowed[0]}: fine-tune it "
            "first, or choose another task"
        )
    if task in ("ner", "classify"):
        _require_names(config, task, f"{flag} {name}")
    return config


def _require_names(config: PretrainedConfig, task: str, name: str) -> None:
    """Raise UserError unless each output of a fine-tuned head has a name of its own, and stands for a class."""
    names: dict[Any, str] = config.id2label or {}
    if sorted(names) != list(range(len(names))) or len(set(names.values())) < len(names):
        raise UserError(f"{name}: id2label in its config.json must give each number from 0 on a name of its own")
    if task == "classify" and (len(names) < 2 or config.problem_type not in (None, "single_label_classification")):
        kind = config.problem_type or "regression"
        raise UserError(f"{name} has a head for {kind}: --task classify needs one that chooses one of several classes")


def open_tokenizer(name: str, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises UserError where it has words that the model lacks, or lacks special words."""
    with one_line(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    require_words(tokenizer, name, "--model")
    words = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # the numbers may have gaps
    if words > config.vocab_size:
        raise UserError(
            f"--model {name}: its vocabulary has {words:,} words, but its config says {config.vocab_size:,}"
        )
    # saved with the checkpoint, so that a pipeline cuts texts that are too long for the position table
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    return tokenizer


def row_length(wanted: int | None, config: PretrainedConfig, name: str, default: int | None = None) -> int:
    """The most tokens of a row: `wanted` (--max-length), or else `default`, or as many as the model has positions for.

    Raises UserError where the model has fewer positions than `wanted`.
    """
    positions = config.max_position_embeddings
    length = wanted or min(default or positions, positions)
    if not 8 <= length <= positions:
        raise UserError(f"--max-length is {length}, but --model {name} has positions for 8 to {positions} tokens")
    return length


def open_model(name: str, task: str, config: PretrainedConfig, new_heads: bool = False) -> PreTrainedModel:
    """The model of `task` with its weights in float32; with `new_heads` a missing head is drawn from torch's seed."""
    unpooled: dict[str, Any] = {"add_pooling_layer": False} if task == "embed" else {}
    return load_weights(CLASSES[task], name, config, NEW_HEADS if new_heads else (), **unpooled)


def load_weights(
    kind: type[Model],
    name: str,
    config: PretrainedConfig,
    may_lack: tuple[str, ...],
    flag: str = "--model",
    **options: Any,
) -> Model:
    """A model with the weights at `name` in float32.

    Weights whose names begin with one of `may_lack` may be missing or have another size, and are then drawn from
    torch's seed. Raises UserError where other weights are missing or have another size, are of layers that the config
    does not have, or are not finite.
    """
    loader: Any = kind  # from_pretrained returns two values with output_loading_info, which its types do not say
    with one_line(name, flag):
        model, info = loader.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below
            **options,
        )
    if lacking := [key for key in sorted(info["missing_keys"]) if not key.startswith(may_lack)]:
        raise UserError(f"{flag} {name}: its weights belong to another model: it has no {lacking[0]}")
    for key, *_ in sorted(info["mismatched_keys"]):
        if not key.startswith(may_lack):
            raise UserError(
                f"{flag} {name}: its weights belong to another model: {key} has another size than its config says"
            )
    if more := [key for key in sorted(info["unexpected_keys"]) if ".layer." in key]:
        raise UserError(f"{flag} {name}: its weights belong to another model: its config has no place for {more[0]}")
    for file in Path(name).glob("*.safetensors"):
        for key, type_ in sorted(not_floating(file).items()):
            if key.endswith((".weight", ".bias")):
                raise UserError(f"{flag} {name}: its {key} is of type {type_}: give weights of floating-point numbers")
    for key, layer in model.named_modules():
        is_never_zero = isinstance(layer, torch.nn.LayerNorm) or key.endswith("word_embeddings")
        if is_never_zero and not layer.weight.any():
            raise UserError(f"{flag} {name}: its {key}.weight is zero throughout: is the file whole?")
    if key := not_finite(model):
        raise UserError(f"{flag} {name}: its {key} holds NaN or infinity: take the weights of an earlier step")
    return model


def fingerprint(net: torch.nn.Module) -> str:
    """Sixteen hex digits of all weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def open_to_tune(start: Pretrained, task: str, names: Sequence[str], dropout: float | None) -> Any:
    """The model of `task` with labels of these `names`: a PreTrainedModel, whose new head is drawn from torch's seed.
    `dropout`, where it is given, is that of every dropout."""
    config = start.config
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.classifier_dropout = dropout
    return open_model(start.source, task, config, new_heads=True)


def files_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    """A function that writes config and tokenizer into a checkpoint, for `from_pretrained` and `pipeline`."""

    def write(path: Path) -> None:
        model.config.architectures = [architecture_of(type(model))]
        model.config.save_pretrained(path)
        tokenizer.save_pretrained(path)

    return write


def architecture_of(kind: type[PreTrainedModel]) -> str:
    """The name of the class of `transformers` that `kind` extends, for a config's `architectures`."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__.startswith("transformers."))


def reason_of(error: Exception) -> str:
    """What an error of a library says, in one line."""
    if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to run what is in the file
        return "its weights are not whole, or hold more than weights: copy them again, or save them as safetensors"
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    said = " ".join([first, *(line.strip() for line in rest[:1] if first.endswith(":"))])
    return f"{type(error).__name__}: {said}" if isinstance(error, KeyError | TypeError | AttributeError) else said


@contextlib.contextmanager
def one_line(name: str, flag: str = "--model") -> Iterator[None]:
    """Turn the errors of transformers, which fill paragraphs, into one line that names the flag."""
    try:
        yield
    except Exception as error:  # of each library that reads one of its files
        reason = reason_of(error)
        if Path(name).exists():
            for file in sorted(Path(name).glob("*")):
                with reading(file, f"{flag} {file}"):
                    pass
            raise UserError(f"{flag} {name} cannot be loaded: {reason}") from None
        raise RunError(f"{flag} {name} is not a folder here, and could not be loaded from the hub: {reason}") from None
