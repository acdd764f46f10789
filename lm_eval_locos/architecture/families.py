"""The families of models that are known: where each keeps its attention.

    >>> register_family(Family(("my_model",), attention="attn", query="wq", output="wo"))

tells of a model of your own whose decoder layers have ``attn.wq`` and ``attn.wo``. Do that in a
script that ends with ``from lm_eval_locos.cli import main; main()``: ``python script.py doctor
--model ID`` then says whether the description is right. With ``from lm_eval.__main__ import
cli_evaluate; cli_evaluate()`` at its end the script is the harness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["split", "query_first", "grouped", "gated"]


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps its attention. Paths are dotted names.

    Attributes:
        model_types: the ``model_type`` of the (text) configs.
        layers: the list of decoder layers, from the decoder.
        attention: the attention, from a decoder layer; a layer of a type that is not attention
            (``layer_types`` of the config) may be without it.
        query: the module whose output holds the queries, from the attention; of several the first
            that is there.
        output: the module whose input is the heads' outputs, from the attention.
        norm: the norm before the unembedding, from the decoder.
        layout: how the query module's output is laid out. ``split``: queries only, head after head;
            ``query_first``: queries, then keys, then values; ``grouped``: for each key/value head
            its queries, its key and its value; ``gated``: for each head its query, and then a gate
            whose sigmoid multiplies the head's output.
    """

    model_types: tuple[str, ...]
    layers: str = "layers"
    attention: str = "self_attn"
    query: str | tuple[str, ...] = "q_proj"
    output: str = "o_proj"
    norm: str = "norm"
    layout: Layout = "split"


_FUSED = {"query": "query_key_value", "output": "dense", "layout": "grouped"}
_KNOWN: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Makes ``family`` known; it replaces what was known of its model types."""
    _KNOWN.update(dict.fromkeys(family.model_types, family))


def known_model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is known."""
    return tuple(_KNOWN)


def family_of(model_type: str) -> Family | None:
    """The family of a model type, or None."""
    return _KNOWN.get(model_type)


for _family in (
    Family(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "llama4_text"),
            *("gemma", "gemma2", "gemma3_text", "smollm3", "stablelm", "gpt_oss"),
        )
    ),
    # The query norm spans all heads: before it, one head's query would move all others.
    Family(("olmo2", "olmo3"), query="q_norm"),
    # Latent attention: a head's query has a part without and a part with RoPE, side by side.
    Family(("deepseek_v2", "deepseek_v3"), query=("q_b_proj", "q_proj")),
    Family(("phi3",), query="qkv_proj", layout="query_first"),
    # Hybrids: their other layers are convolutions, or linear attention, and have no heads.
    Family(("lfm2", "lfm2_moe"), output="out_proj", norm="embedding_norm"),
    Family(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), layout="gated"),
    Family(
        ("gpt2",),
        layers="h",
        attention="attn",
        query="c_attn",
        output="c_proj",
        norm="ln_f",
        layout="query_first",
    ),
    Family(("gpt_neox",), attention="attention", norm="final_layer_norm", **_FUSED),
    Family(("falcon",), layers="h", attention="self_attention", norm="ln_f", **_FUSED),
):
    register_family(_family)
