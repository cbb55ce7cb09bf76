"""Open a BERT that is there already: a folder of `transformers`, a run of ours, or a hub name; checked, or one line."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.errors import RunError, UserError

# what each task's model is called in a config's `architectures`
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
NEW_HEADS = ("classifier.", "bert.pooler.")  # what fine-tuning may begin without

transformers.logging.set_verbosity_error()  # its reports on missing weights: `open_model` checks and says it shorter
transformers.logging.disable_progress_bar()


def locate(name: str, flag: str = "--model") -> str:
    """The folder or hub name to load from: of a run's --out-dir its best weights, or else its latest."""
    path = Path(name)
    for inside in (".", "best/latest", "checkpoints/latest"):
        if (path / inside / "config.json").is_file():
            return str(path / inside)
    if path.exists():
        raise UserError(
            f"{flag} {name} has no config.json: give a folder that transformers has saved, or a run's --out-dir"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{flag} {name}: there is no such folder")
    return name


def open_config(name: str, task: str | None = None, flag: str = "--model") -> PretrainedConfig:
    """The checked config. With `task` the model must have been fine-tuned for that (predicting)."""
    with one_line(name, flag):
        config = AutoConfig.from_pretrained(name)
    if config.model_type != "bert":
        raise UserError(f"{flag} {name} is of the architecture {config.model_type}: a BERT is needed (model_type bert)")
    allowed = ARCHITECTURES[task] if task else ()
    found = config.architectures or ["no architecture"]
    if allowed and not set(allowed) & set(found):
        raise UserError(
            f"--model {name} is a {found[0]}, but --task {task} needs a {allowed[0]}: fine-tune it "
            "first, or choose another task"
        )
    return config


def open_tokenizer(name: str, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises UserError where it has words that the model has not, or special ones lack."""
    with one_line(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"--model {name}: its vocabulary has {len(tokenizer):,} words, but its config says {config.vocab_size:,}"
        )
    if not tokenizer.is_fast:
        raise UserError(f"--model {name}: its tokenizer has no tokenizer.json or vocab.txt")
    for token in ("cls", "sep", "pad", "unk", "mask"):
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise UserError(f"--model {name}: its vocabulary has no [{token.upper()}]")
    # saved with the checkpoint, so that a pipeline cuts what the position table has no place for
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    return tokenizer


def open_model(name: str, task: str, config: PretrainedConfig, new_heads: bool = False) -> PreTrainedModel:
    """The model of `task` with its weights in float32; with `new_heads` a missing head is drawn by torch's seed."""
    unpooled = {"add_pooling_layer": False} if task == "embed" else {}
    return load_weights(CLASSES[task], name, config, NEW_HEADS if new_heads else (), **unpooled)


def load_weights(
    kind: type[PreTrainedModel],
    name: str,
    config: PretrainedConfig,
    may_lack: tuple[str, ...],
    flag: str = "--model",
    **options: object,
) -> PreTrainedModel:
    """A model with the weights at `name` in float32. Those whose names begin as one of `may_lack` may be missing or of
    another size, and are then drawn by torch's seed. Raises UserError where others are."""
    with one_line(name, flag):
        model, info = kind.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(may_lack),
            **options,
        )
    if lacking := [key for key in sorted(info["missing_keys"]) if not key.startswith(may_lack)]:
        raise UserError(f"{flag} {name}: its weights are of another model: it has no {lacking[0]}")
    for key, *_ in sorted(info["mismatched_keys"]):
        if not key.startswith(may_lack):
            raise UserError(
                f"{flag} {name}: its weights are of another model: {key} has another size than its config says"
            )
    return model


def fingerprint(net: torch.nn.Module) -> str:
    """Sixteen hex digits of all weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def prepare(config: PretrainedConfig, names: Sequence[str], dropout: float | None) -> None:
    """Give `config` the names of the labels, and one dropout everywhere where `dropout` is given."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.classifier_dropout = dropout


def files_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    """Writes what makes a checkpoint's folder one that `from_pretrained` and `pipeline` read: config and tokenizer."""

    def write(path: Path) -> None:
        model.config.architectures = [architecture_of(type(model))]
        model.config.save_pretrained(path)
        tokenizer.save_pretrained(path)

    return write


def architecture_of(kind: type[PreTrainedModel]) -> str:
    """What a model's config says it is, so that from_pretrained and pipeline() find it: `transformers`' own class."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__.startswith("transformers."))


@contextlib.contextmanager
def one_line(name: str, flag: str = "--model") -> Iterator[None]:
    """What transformers says in paragraphs, in one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if Path(name).exists():
            raise UserError(f"{flag} {name} cannot be loaded: {reason}") from None
        raise RunError(f"{flag} {name} is no folder here, and the hub does not give it: {reason}") from None
