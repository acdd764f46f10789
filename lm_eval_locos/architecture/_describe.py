"""From a loaded model to the description of its attention."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lm_eval_locos.architecture._ranks import check_split, on_rank, ranks_of, styles_of
from lm_eval_locos.architecture._structure import Architecture, AttentionLayer, HeadSlices, Kind
from lm_eval_locos.architecture.families import (
    Family,
    Layout,
    family_of,
    known_model_types,
)
from lm_eval_locos.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_KINDS: dict[str, Kind] = {
    "full_attention": "global",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, with the adapters still in place."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go: to the embeddings; of offloaded ones accelerate moves them on itself."""
    import torch

    device = base_model(model).get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def attention_implementation(architecture: Architecture, name: str) -> Iterator[None]:
    """The model's attention is the one registered as ``name``; the former is back after the block.

    The decoder and its layers read their own config, which a multimodal model nests.
    """
    layers = architecture.layers.values()
    owners = [architecture.decoder.config, *(layer.attention.config for layer in layers)]
    configs = {id(config): config for config in owners}.values()
    former = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in former:
            config._attn_implementation = implementation


def plain_weight(module: nn.Module) -> Tensor | None:
    """A module's weight, or None where it has none, or one that is packed or offloaded."""
    weight = getattr(module, "weight", None)
    plain = weight is not None and weight.is_floating_point() and not weight.is_meta
    return weight if plain else None


def describe(model: nn.Module, *, tensor_parallel: bool = False) -> Architecture:
    """The attention of ``model``, a transformers causal language model or a PEFT wrapper of one.

    Args:
        model: the model.
        tensor_parallel: whether the caller handles heads that lie on other ranks (ablation does).

    Raises:
        ModelError: the family is not known, its modules are not where they should be, or the
            layers are split over processes in a way that the caller or this package cannot handle.
    """
    wrapped, model = model, base_model(model)
    rank, ranks = ranks_of(model)
    if ranks > 1:
        check_split(ranks, handled=tensor_parallel, adapted=wrapped is not model)
    config = getattr(model, "config", None)
    if config is None:
        raise ModelError(
            f"{type(model).__name__} has no config. Expected a transformers causal language model."
        )
    text = config.get_text_config(decoder=True)
    family = family_of(text.model_type)
    if family is None:
        raise ModelError(
            f"models of type {text.model_type!r} are not known. Known: "
            f"{', '.join(known_model_types())}. Describe this one with "
            "lm_eval_locos.architecture.register_family (its module has an example), and check "
            "the description with locos doctor."
        )
    decoder = model.get_decoder()
    if _find(decoder, family.layers) is None:  # Llama 4 calls the whole model its decoder
        decoder = getattr(decoder, "model", decoder)
    blocks = _find(decoder, family.layers)
    norm = _find(decoder, family.norm)
    if blocks is None or norm is None:
        raise ModelError(
            f"the decoder of this {text.model_type} model, a {type(decoder).__name__}, has no "
            f"{family.layers if blocks is None else family.norm}. {_HINT}"
        )
    layers = {
        i: _layer(text, family, i, block)
        for i, block in enumerate(blocks)
        if not _without_attention(text, family, i, block)
    }
    if not layers:
        raise ModelError(
            f"none of the {len(blocks)} layers of this {text.model_type} model has an attention. "
            "Choose a model with attention heads."
        )
    output = _outputs(text, layers.values())
    query, groups = _queries(text, family.layout, layers.values(), output.size)
    gate = None
    if family.layout == "gated":
        after = tuple(start + query.size for start in query.starts if start is not None)
        gate = HeadSlices(after, query.size, query.width)
    if ranks > 1:
        styles = styles_of(model, layers.values())
        query, output = (
            on_rank(slices, groups, family.layout, style, rank, ranks)
            for slices, style in zip((query, output), styles, strict=True)
        )
    return Architecture(
        model_type=text.model_type,
        num_layers=len(blocks),
        num_heads=int(text.num_attention_heads),
        num_kv_heads=groups,
        head_dim=query.size,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        decoder=decoder,
        layers=layers,
        query_slices=query,
        output_slices=output,
        norm=norm,
        unembedding=model.get_output_embeddings(),
        gate_slices=gate,
        through_interface=_calls_interface(next(iter(layers.values())).attention),
        ranks=ranks,
    )


_HINT = (
    "Is the model of another family than its config says? See "
    "lm_eval_locos.architecture.register_family."
)


def _find(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _layer(config: Any, family: Family, index: int, block: nn.Module) -> AttentionLayer:
    attention = _find(block, family.attention)
    paths = (family.query,) if isinstance(family.query, str) else family.query
    query = next((found for path in paths if (found := _find(attention, path)) is not None), None)
    output = _find(attention, family.output)
    if query is None or output is None:
        raise ModelError(
            f"layer {index} of this {config.model_type} model is a {type(block).__name__} without "
            f"{family.attention}.{' or .'.join(paths)} and {family.attention}.{family.output}. "
            f"{_HINT}"
        )
    kind, window = _reach(config, index)
    softcap = getattr(config, "attn_logit_softcapping", None)
    scaling = getattr(attention, "scaling", None)
    if scaling is None:
        scaling = (int(config.hidden_size) // int(config.num_attention_heads)) ** -0.5
    return AttentionLayer(
        attention=attention,
        query=query,
        output=output,
        kind=kind,
        window=window,
        scaling=float(scaling),
        softcap=None if softcap is None else float(softcap),
        sinks=hasattr(attention, "sinks"),
    )


def _without_attention(config: Any, family: Family, index: int, block: nn.Module) -> bool:
    """Whether the config says that a layer is something else than attention, and it is."""
    kinds = getattr(config, "layer_types", None)
    other = kinds is not None and kinds[index] not in _KINDS
    return other and _find(block, family.attention) is None


def _reach(config: Any, index: int) -> tuple[Kind, int | None]:
    """Which keys layer ``index`` sees: its kind and its window."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Mistral and Phi-3 have no layer_types: a window in their config holds for every layer.
        sliding = bool(window) and getattr(config, "use_sliding_window", True)
        return ("sliding", int(window)) if sliding else ("global", None)
    kind = _KINDS.get(kinds[index])
    if kind is None:
        raise ModelError(
            f"layer {index} of this {config.model_type} model is of type {kinds[index]!r}. Only "
            f"layers of the types {', '.join(_KINDS)} have heads that can be ablated."
        )
    if kind == "chunked":
        return kind, int(config.attention_chunk_size)
    return (kind, int(window)) if kind == "sliding" and window else ("global", None)


def _calls_interface(attention: nn.Module) -> bool:
    """Whether the file of the attention's class uses transformers' attention interface."""
    return hasattr(sys.modules[type(attention).__module__], "ALL_ATTENTION_FUNCTIONS")


def _outputs(config: Any, layers: Collection[AttentionLayer]) -> HeadSlices:
    """Where the heads are in the output modules' input."""
    heads = int(config.num_attention_heads)
    width = _same(config, [_width(layer.output, ("in_features", "nx")) for layer in layers])
    if width % heads:
        raise ModelError(
            f"the output projections of this {config.model_type} model take {width} features, "
            f"which {heads} heads cannot share evenly. {_HINT}"
        )
    return HeadSlices(_starts("split", heads, heads, width // heads), width // heads, width)


def _queries(
    config: Any, layout: Layout, layers: Collection[AttentionLayer], output: int
) -> tuple[HeadSlices, int]:
    """Where the heads are in the query modules' output, and the number of key/value heads.

    A fused projection also gives keys and values, or gates, all as large as a head's ``output``.
    """
    heads = int(config.num_attention_heads)
    width = _same(config, [_width(layer.query, ("out_features", "nf")) for layer in layers])
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    size, rest = divmod(width, heads)
    if layout == "gated":
        size, rest = output, width - 2 * output * heads
    elif layout != "split":
        size, rest = output, width - output * heads
        groups, rest = divmod(rest, 2 * size)
    if rest or groups < 1 or heads % groups:
        raise ModelError(
            f"the query modules of this {config.model_type} model give {width} features, which "
            f"{heads} heads of {output} cannot have ({layout}). Is the projection packed? {_HINT}"
        )
    return HeadSlices(_starts(layout, heads, groups, size), size, width), groups


def _same(config: Any, widths: list[int | None]) -> int:
    if len(set(widths)) != 1 or not widths[0]:
        raise ModelError(
            f"the attention projections of this {config.model_type} model have "
            f"{sorted(set(widths), key=str)} features. Expected the same number in every layer; "
            "packed projections (GPTQ, AWQ) have none of their own."
        )
    return widths[0]


def _width(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Features that nn.Linear and what looks like it, GPT-2's Conv1D or a norm give or take."""
    for name in names:
        if (size := getattr(module, name, None)) is not None:
            return int(size)
    weight = getattr(module, "weight", None)
    return None if weight is None or weight.dim() != 1 else len(weight)


def _starts(layout: Layout, heads: int, groups: int, size: int) -> tuple[int, ...]:
    if layout == "gated":
        return tuple(2 * head * size for head in range(heads))
    each = heads // groups
    skipped = 2 if layout == "grouped" else 0  # a key and a value after each group's queries
    return tuple((head + skipped * (head // each)) * size for head in range(heads))
