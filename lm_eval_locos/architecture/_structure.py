"""The description of a model's attention: frozen, and without torch (which is slow to import)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from lm_eval_locos.errors import ModelError

if TYPE_CHECKING:  # rankings and gates are read without torch
    from torch import Tensor, nn

Site = Literal["query", "output"]
SITES: tuple[Site, ...] = get_args(Site)
Kind = Literal["global", "sliding", "chunked"]
NONE = "none"
"""The kind of a decoder layer without attention (a convolution, a recurrence): it has no heads."""


class Head(NamedTuple):
    """A query head: decoder layer and head within the layer, both from 0. Prints as ``3-1``."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}-{self.head}"


@dataclass(frozen=True)
class HeadSlices:
    """Which features of an activation ``(..., width)`` belong to which head.

    Attributes:
        starts: each head's first feature, in the order of the heads; None for a head that lies on
            another rank (tensor parallelism).
        size: features of a head; they are neighbours.
        width: features of the activation on this rank.
    """

    starts: tuple[int | None, ...]
    size: int
    width: int

    @property
    def here(self) -> dict[int, slice]:
        """The slice of every head that lies on this rank."""
        return {
            head: slice(start, start + self.size)
            for head, start in enumerate(self.starts)
            if start is not None
        }

    @property
    def complete(self) -> bool:
        """Whether every head lies on this rank."""
        return None not in self.starts

    def split(self, activation: Tensor) -> Tensor:
        """``(..., width)`` to ``(..., heads, size)``; heads of other ranks are zero."""
        split = activation.new_zeros(*activation.shape[:-1], len(self.starts), self.size)
        for head, part in self.here.items():
            split[..., head, :] = activation[..., part]
        return split


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention.

    Attributes:
        attention: the attention module itself.
        query: module whose *output* holds the query of every head, before RoPE; before the query
            norm where that works on one head at a time, after it where it works on all at once.
            With a PEFT adapter this is the adapted projection.
        output: module whose *input* is every head's output, often called z.
        kind: ``global``; ``sliding``: a query sees the last ``window`` keys, itself included;
            ``chunked``: the keys of its own chunk of ``window`` tokens.
        window: number of keys, or None in a global layer.
        scaling: factor on query times key.
        softcap: logits are softcap * tanh(logits / softcap), or None.
        sinks: whether the softmax has one more logit a head that belongs to no key.
    """

    attention: nn.Module
    query: nn.Module
    output: nn.Module
    kind: Kind
    window: int | None
    scaling: float
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class Architecture:
    """The attention of a decoder-only language model.

    Head (l, h) is query head h of decoder layer l, both from 0. Under grouped-query attention it
    reads key/value head ``h // (num_heads // num_kv_heads)``.

    Attributes:
        head_dim: features of a head's query.
        decoder: the module of all layers.
        layers: the attention of each decoder layer that has one, by the layer's number.
        query_slices: where the heads are in the output of ``layers[l].query``.
        output_slices: where they are in the input of ``layers[l].output``.
        gate_slices: where in the output of ``layers[l].query`` each head has the gate of its
            output, whose sigmoid multiplies what it read from the values; None without gates.
        norm: the norm before the unembedding.
        unembedding: module from hidden states to logits.
        through_interface: whether the attention calls transformers' attention interface; if not,
            it calls torch's scaled_dot_product_attention itself.
        ranks: over how many processes tensor parallelism splits the layers. What the slices say
            is true of this process.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    decoder: nn.Module
    layers: Mapping[int, AttentionLayer]
    query_slices: HeadSlices
    output_slices: HeadSlices
    norm: nn.Module
    unembedding: nn.Module
    gate_slices: HeadSlices | None = None
    through_interface: bool = True
    ranks: int = 1

    @property
    def heads(self) -> tuple[Head, ...]:
        """Every head, by layer, then by head."""
        return tuple(Head(i, j) for i in self.layers for j in range(self.num_heads))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every decoder layer; ``none`` where it has no attention."""
        kinds = {index: layer.kind for index, layer in self.layers.items()}
        return tuple(kinds.get(index, NONE) for index in range(self.num_layers))

    @property
    def hybrid(self) -> bool:
        """Whether some layers have no attention."""
        return len(self.layers) < self.num_layers

    @property
    def kernel(self) -> str:
        """``sdpa``, which forms no attention matrix; ``eager`` where only the family's own eager
        attention knows all of it (a soft cap, sinks)."""
        if not self.through_interface:
            return "sdpa"
        special = any(layer.softcap or layer.sinks for layer in self.layers.values())
        fast = not special and getattr(self.decoder, "_supports_sdpa", False)
        return "sdpa" if fast else "eager"

    def slices(self, site: Site) -> HeadSlices:
        """Where the heads are at ``site``; the same in every layer."""
        return self.query_slices if site == "query" else self.output_slices

    def check_heads(self, heads: Iterable[Head]) -> None:
        """Raises ModelError unless every one of these heads exists."""
        heads, known = list(heads), set(self.heads)
        if not (wrong := [head for head in heads if head not in known]):
            return
        if wrong[0].layer in range(self.num_layers) and wrong[0].layer not in self.layers:
            raise ModelError(
                f"head {wrong[0]} does not exist: layer {wrong[0].layer} of this "
                f"{self.model_type} model has no attention. Choose heads of the layers "
                f"{', '.join(map(str, self.layers))}; is the ranking of another model?"
            )
        raise ModelError(
            f"head {wrong[0]} is outside the model, which has layers 0-{self.num_layers - 1} and "
            f"heads 0-{self.num_heads - 1} ({len(wrong)} of {len(heads)} heads are). Heads are "
            "written LAYER-HEAD, both from 0; is the ranking of another model?"
        )

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a ranking records about the model it was made on (file form 3)."""
        found: dict[str, str | int] = {
            "architecture": self.model_type,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        if self.hybrid:
            found["attention_layers"] = " ".join(map(str, self.layers))
        return found
