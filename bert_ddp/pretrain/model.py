"""The BERT of `transformers` for pretraining, with the same weights and names, computed only where a loss needs it.

About 15 % of a row's L tokens are masked, and only these have a loss. So the vocabulary projection, which is the
larger part of a small BERT, and the last layer run at the masked positions only. Keys and values of the last layer
come from all positions, so the numbers are the same as when everything is computed.

Shapes: B rows, L tokens in a row, P masked positions in a row, H width, V words.
"""

import hashlib
import json
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bert_ddp.model import pretrained
from bert_ddp.text.corpus import Corpus
from common.errors import UserError
from common.files import parse_json, reading

# layers, width, heads
PRESETS = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
MOST_LAYERS, MOST = 1_000, 10_000_000  # of layers, and of the other sizes
NEW_HEADS = ("cls.", "bert.pooler.")  # what --init-from may lack


@dataclass(frozen=True)
class ModelOptions:
    """Which model to build, as typed; None for a flag that was left out."""

    objective: str  # mlm or mlm+nsp
    preset: str  # a name in PRESETS
    config_file: Path | None  # instead of the preset
    dropout: float | None  # instead of the config's
    checkpoint_activations: bool


def model_options(args: Namespace) -> ModelOptions:
    """What the flags of pretraining say."""
    return ModelOptions(args.objective, args.preset, args.config_file, args.dropout, args.checkpoint_activations)


class MaskedPositions(nn.Module):
    """The forward pass of pretraining, for a BERT whose weights `transformers` names and loads."""

    config: Any
    bert: Any
    cls: Any
    checkpoint_activations: bool = False

    def forward(
        self,
        input_ids: torch.Tensor,  # (B, L)
        token_type_ids: torch.Tensor,  # (B, L)
        attention_mask: torch.Tensor | None,  # (B, L) True where there is a token
        positions: torch.Tensor,  # (B, P)
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits of the masked words (B * P, V), logits of the next sentence (B, 2) or None without that head)."""
        hidden = self.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)  # (B, L, H)
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        *layers, last = self.bert.encoder.layer
        for layer in layers:
            if self.checkpoint_activations and self.training:
                hidden = checkpoint(_run_layer, layer, hidden, hidden, mask, use_reentrant=False)
            else:
                hidden = _run_layer(layer, hidden, hidden, mask)
        pairs = self.bert.pooler is not None
        if pairs:  # the pooler reads the first token
            positions = torch.cat([positions.new_zeros(len(positions), 1), positions], dim=1)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        chosen = _run_layer(last, hidden[rows, positions], hidden, mask)  # (B, P, H)
        words = self.cls.predictions(chosen[:, int(pairs) :].flatten(0, 1))
        return words, self.cls.seq_relationship(self.bert.pooler(chosen)) if pairs else None


class MaskedLM(MaskedPositions, BertForMaskedLM):
    """Predicts masked words."""


class MaskedLMAndNextSentence(MaskedPositions, BertForPreTraining):
    """Predicts masked words, and whether the second segment follows the first."""


def _run_layer(layer: Any, chosen: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """One encoder layer at the positions `chosen` (B, P, H), which attend to all of `hidden` (B, L, H): (B, P, H)."""
    inner = layer.attention.self
    query, key, value = (
        projection(states).unflatten(-1, (inner.num_attention_heads, -1)).transpose(1, 2)  # (B, heads, P or L, H/heads)
        for projection, states in ((inner.query, chosen), (inner.key, hidden), (inner.value, hidden))
    )
    attend = ALL_ATTENTION_FUNCTIONS[inner.config._attn_implementation]  # torch's scaled_dot_product_attention: "sdpa"
    dropout = inner.dropout.p if layer.training else 0.0
    context, _ = attend(inner, query, key, value, mask, dropout=dropout)  # (B, P, heads, H/heads)
    attended = layer.attention.output(context.flatten(2), chosen)
    return layer.output(layer.intermediate(attended), attended)


# --- from flags -------------------------------------------------------------------------------------------------


def build(options: ModelOptions, meta: dict[str, Any], init_from: str | None = None) -> MaskedPositions:
    """The model that the flags describe, for the corpus that `meta` describes, ready to train.

    Its weights are drawn from torch's seed, or are those of the folder or hub name `init_from`; heads that this lacks
    are drawn. Raises UserError where a config, a checkpoint and a corpus do not fit together.
    """
    kind: Any = MaskedLMAndNextSentence if options.objective == "mlm+nsp" else MaskedLM
    config = _config(options, meta, init_from)
    _check_fit(config, meta, init_from or options.config_file or f"--preset {options.preset}")
    config.architectures = [pretrained.architecture_of(kind)]
    try:
        net = pretrained.load_weights(kind, init_from, config, NEW_HEADS, "--init-from") if init_from else kind(config)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        source = init_from or options.config_file or f"--preset {options.preset}"
        raise UserError(f"{source}: a model of that size does not fit into memory", same_on_every_rank=True) from None
    net.checkpoint_activations = options.checkpoint_activations
    return net.train()


def _check_fit(config: BertConfig, meta: dict[str, Any], source: object) -> None:
    """Raise UserError, which names `source`, unless vocabulary size and row length fit the model."""
    words, length = meta["vocab_size"], meta["sequence_length"]
    if config.vocab_size != words:
        raise UserError(
            f"{source} has vocab_size {config.vocab_size}, but the vocabulary has {words} words: give the --vocab "
            "that it was made for, or change vocab_size",
            same_on_every_rank=True,
        )
    if config.max_position_embeddings < length:
        there = config.max_position_embeddings
        raise UserError(
            f"--sequence-length is {length}, but {source} has {there} positions: give at most {there}, or raise "
            "max_position_embeddings",
            same_on_every_rank=True,
        )


def _config(options: ModelOptions, meta: dict[str, Any], init_from: str | None) -> BertConfig:
    values: dict[str, Any]
    if init_from:
        values = pretrained.open_config(init_from, flag="--init-from").to_dict()
    elif options.config_file:
        values = _read_config(options.config_file)
    else:
        layers, width, heads = PRESETS[options.preset]
        values = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        values |= {"intermediate_size": 4 * width, "vocab_size": meta["vocab_size"]}
        values |= {"max_position_embeddings": max(512, meta["sequence_length"])}
    if options.dropout is not None:
        values |= {"hidden_dropout_prob": options.dropout, "attention_probs_dropout_prob": options.dropout}
    values = {name: value for name, value in values.items() if name not in ("dtype", "torch_dtype", "architectures")}
    values["pad_token_id"] = meta["special"]["pad"]
    try:
        config = BertConfig(**values | {"attn_implementation": "sdpa"})
        _require_possible(config, segments=2 if options.objective == "mlm+nsp" else 1)
    except Exception as error:  # of the class that checks its values, and of values that it does not check
        raise UserError(
            f"{init_from or options.config_file}: not a BERT config: {pretrained.reason_of(error)}",
            same_on_every_rank=True,
        ) from None
    return config


def _require_possible(config: BertConfig, segments: int) -> None:
    """Raise ValueError for a value that transformers takes, and no model can be made of, or none that learns."""
    least = {**dict.fromkeys(SIZES, 1), "max_position_embeddings": 1, "type_vocab_size": segments}
    for name, fewest in least.items():
        limit = MOST_LAYERS if name == "num_hidden_layers" else MOST
        if not fewest <= getattr(config, name) <= limit:
            raise ValueError(f"{name} is {getattr(config, name)}: give {fewest:,} to {limit:,}")
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(f"hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} heads")
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: give 0 to less than 1")
    for name in ("layer_norm_eps", "initializer_range"):
        if not 0 < getattr(config, name) <= 1:
            raise ValueError(f"{name} is {getattr(config, name)}: give more than 0, and at most 1")
    if getattr(config, "is_decoder", False):
        raise ValueError("is_decoder is true, but masked words are predicted from both sides")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act is {config.hidden_act!r}: give one of {', '.join(sorted(ACT2FN))}")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        with reading(file, str(file)):
            values = parse_json(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}", same_on_every_rank=True) from None
    kind = values.get("model_type", "bert") if isinstance(values, dict) else type(values).__name__
    if kind != "bert":
        raise UserError(f"{file} has another architecture: model_type is {kind}, not bert", same_on_every_rank=True)
    if missing := [name for name in SIZES if name not in values]:  # else a misspelt one would be BERT-base's
        raise UserError(f"{file} has no {missing[0]}: give the config.json of a BERT", same_on_every_rank=True)
    return values


def fingerprint(net: MaskedPositions, with_weights: bool) -> str:
    """Sixteen hex digits of the config, and of the weights with `with_weights`."""
    own_to_a_node = ("_name_or_path", "transformers_version")
    values = {name: value for name, value in net.config.to_dict().items() if name not in own_to_a_node}
    text = json.dumps(values, sort_keys=True, default=str) + (pretrained.fingerprint(net) if with_weights else "")
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def files_of(net: MaskedPositions, text: Corpus) -> Callable[[Path], None]:
    """A function that writes config and tokenizer into a checkpoint, so that `from_pretrained` reads it."""

    def write(path: Path) -> None:
        net.config.save_pretrained(path)
        text.copy_tokenizer(path)

    return write


def untrained_loss(net: MaskedPositions) -> float:
    """The loss of a model that guesses: over the words, and over the two answers for the next sentence."""
    return math.log(net.config.vocab_size) + (math.log(2) if isinstance(net, MaskedLMAndNextSentence) else 0.0)
