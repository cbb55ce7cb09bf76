"""Open a BERT that is there already: a folder of `transformers`, a run of ours, or a hub name; checked, or one line."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
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


def locate(name: str) -> str:
    """The folder or hub name to load from: of a run's --out-dir its best weights, or else its latest."""
    path = Path(name)
    for inside in (".", "best/latest", "checkpoints/latest"):
        if (path / inside / "config.json").is_file():
            return str(path / inside)
    if path.exists():
        raise UserError(
            f"--model {name} has no config.json: give a folder that transformers has saved, or a run's --out-dir"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"--model {name}: there is no such folder")
    return name


def open_config(name: str, task: str | None = None) -> PretrainedConfig:
    """The checked config. With `task` the model must have been fine-tuned for that (predicting)."""
    with _one_line(name):
        config = AutoConfig.from_pretrained(name)
    if config.model_type != "bert":
        raise UserError(
            f"--model {name} is of the architecture {config.model_type}: a BERT is needed (model_type bert)"
        )
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
    with _one_line(name):
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
    with _one_line(name):
        model, info = CLASSES[task].from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=new_heads,
            **unpooled,
        )
    allowed = NEW_HEADS if new_heads else ()
    if lacking := [key for key in sorted(info["missing_keys"]) if not key.startswith(allowed)]:
        raise UserError(f"--model {name}: its weights are of another model: it has no {lacking[0]}")
    for key, *_ in sorted(info["mismatched_keys"]):
        if not key.startswith(allowed):
            raise UserError(
                f"--model {name}: its weights are of another model: {key} has another size than its config says"
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
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(path)
        tokenizer.save_pretrained(path)

    return write


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """What transformers says in paragraphs, in one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if Path(name).exists():
            raise UserError(f"--model {name} cannot be loaded: {reason}") from None
        raise RunError(f"--model {name} is no folder here, and the hub does not give it: {reason}") from None
