"""What a loaded model's attention looks like: the one description that everything else reads.

    >>> architecture = describe(model)
    >>> architecture.num_layers, architecture.num_heads, architecture.head_dim
    (30, 9, 64)
    >>> architecture.layers[3].query      # the module whose output holds the raw queries
    Linear(in_features=576, out_features=576, bias=False)

Head (l, h) is query head h of decoder layer l, both from 0. Its raw query is the slice
``[h * head_dim, (h + 1) * head_dim)`` of ``layers[l].query``'s output; its output (often called z)
is the same slice of ``layers[l].output``'s *input*. Under grouped-query attention head h reads
key/value head ``h // (num_heads // num_kv_heads)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_locos.errors import ModelError

if TYPE_CHECKING:  # rankings and gates are read without torch, which is slow to import
    from torch import nn

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""``model_type`` of the families with split q/k/v projections that are handled (and tested)."""


class Head(NamedTuple):
    """A query head: decoder layer and head within the layer, both from 0. Prints as ``3-1``."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}-{self.head}"


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention.

    Attributes:
        attention: the attention module itself.
        query: module whose *output* ``(..., num_heads * head_dim)`` is the raw query (before any
            query norm and before RoPE). With a PEFT adapter this is the adapted projection.
        output: module whose *input* ``(..., num_heads * head_dim)`` is every head's output.
        window: number of keys a query sees (itself included) in a sliding-window layer, else None.
    """

    attention: nn.Module
    query: nn.Module
    output: nn.Module
    window: int | None


@dataclass(frozen=True)
class Architecture:
    """The attention of a decoder-only language model; see the module's docstring."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    layers: tuple[AttentionLayer, ...]
    unembedding: nn.Module

    @property
    def heads(self) -> tuple[Head, ...]:
        """Every head, by layer, then by head."""
        return tuple(Head(i, j) for i in range(self.num_layers) for j in range(self.num_heads))

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a ranking records about the model it was made on (file form 3)."""
        return {
            "architecture": self.model_type,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, with the adapters still in place."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def describe(model: nn.Module) -> Architecture:
    """The attention of ``model``, a transformers causal language model or a PEFT wrapper of one.

    Raises:
        ModelError: the family is not supported, or its modules are not where they should be
            (packed or fused projections).
    """
    model = base_model(model)
    config = getattr(model, "config", None)
    if config is None:
        raise ModelError(
            f"{type(model).__name__} has no config. Expected a transformers causal language model."
        )
    text = config.get_text_config(decoder=True)
    if text.model_type not in SUPPORTED:
        raise ModelError(
            f"models of type {text.model_type!r} are not supported yet. Supported: "
            f"{', '.join(SUPPORTED)} (Llama, Mistral, Qwen2, Qwen3 and Gemma-3 text models and "
            "everything that uses their classes). Evaluate with one of those."
        )
    decoder = model.get_decoder()
    layers = tuple(_layer(text, i, block) for i, block in enumerate(decoder.layers))
    heads = int(text.num_attention_heads)
    return Architecture(
        model_type=text.model_type,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=int(text.num_key_value_heads),
        head_dim=layers[0].query.out_features // heads,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        layers=layers,
        unembedding=model.get_output_embeddings(),
    )


def _layer(config: Any, index: int, block: nn.Module) -> AttentionLayer:
    attention = getattr(block, "self_attn", None)
    query, output = (getattr(attention, name, None) for name in ("q_proj", "o_proj"))
    if query is None or output is None:
        raise ModelError(
            f"layer {index} of this {config.model_type} model is a {type(block).__name__} without "
            "self_attn.q_proj and self_attn.o_proj. Only split query projections are supported."
        )
    size = getattr(query, "out_features", None)
    if size is None or size % config.num_attention_heads or size != output.in_features:
        raise ModelError(
            f"layer {index}: q_proj gives {size} features and o_proj takes "
            f"{getattr(output, 'in_features', None)}; expected the same multiple of "
            f"{config.num_attention_heads} heads. Is the projection packed or split over devices?"
        )
    return AttentionLayer(attention, query, output, _window(config, index))


def _window(config: Any, index: int) -> int | None:
    """The sliding window of layer ``index``, or None where it attends to everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return int(window) if window and kinds[index] == "sliding_attention" else None
    # Mistral has no layer_types: a window in its config holds for every layer.
    return int(window) if window and getattr(config, "use_sliding_window", True) else None


def check_heads(heads: tuple[Head, ...] | list[Head], num_layers: int, num_heads: int) -> None:
    """Raises ModelError unless every head exists in ``num_layers`` x ``num_heads``."""
    wrong = [h for h in heads if not (0 <= h.layer < num_layers and 0 <= h.head < num_heads)]
    if wrong:
        raise ModelError(
            f"head {wrong[0]} is outside the model, which has layers 0-{num_layers - 1} and heads "
            f"0-{num_heads - 1} ({len(wrong)} of {len(heads)} heads are). Heads are written "
            "LAYER-HEAD, both from 0; is the ranking of another model?"
        )
