"""Tiny random models, one a family, and the same ablations done without hooks.

`FAMILIES` is the matrix of the family tests: what is added here is tested by all of them. Where a
family keeps its heads is written down here once more, independently of the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

EARLY = Version(transformers.__version__) < Version("5.24")
"""Releases in which some ways to run fail by themselves."""
VOCABULARY = 97
HEADS = 4
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOW = {"sliding_window": 12, "layer_types": _MIXED}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,  # of the part with RoPE
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
Rows = Callable[[int, int], range]
Values = Callable[[Tensor, int], Tensor]


def _after_one_another(head: int, size: int) -> range:
    return range(head * size, (head + 1) * size)


def _in_threes(head: int, size: int) -> range:
    return range(3 * head * size, (3 * head + 1) * size)


def _before_a_gate(head: int, size: int) -> range:
    return range(2 * head * size, (2 * head + 1) * size)


def _in_groups_of_two(head: int, size: int) -> range:
    first = {0: 0, 1: 1, 2: 4, 3: 5}[head]  # q q k v q q k v
    return range(first * size, (first + 1) * size)


@dataclass(frozen=True)
class Case:
    """A family of the matrix.

    Attributes:
        models: the models it stands for, as the README's table names them.
        config: differences from the common config.
        type: ``model_type``, where it is not the name of the case.
        blocks, attention, query, output: where the modules are.
        rows: a head's rows of the query module, from the head and its size.
        size: features of a head's query.
        value: the module that gives values, and how they lie in its output: (S, width), head_dim
            to (S, value heads, head_dim).
        layers: the decoder layers that have attention.
        gated: whether each head's rows are followed by as many of a gate of its output.
        scored: whether heads can be scored.
        notes: for the README.
    """

    models: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    type: str = ""
    blocks: str = "model.layers"
    attention: str = "self_attn"
    query: str = "q_proj"
    output: str = "o_proj"
    rows: Rows = _after_one_another
    size: int = 8
    value: str = "v_proj"
    values: Values = lambda x, size: x.unflatten(-1, (-1, size))
    layers: tuple[int, ...] = (0, 1, 2)
    gated: bool = False
    scored: bool = True
    notes: str = ""


_NEOX = {"attention": "attention", "query": "query_key_value", "output": "dense"}
_FALCON = {
    **_NEOX,
    "type": "falcon",
    "blocks": "transformer.h",
    "attention": "self_attention",
    "value": "query_key_value",
}
_QWEN_NEXT = {
    "head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GATED = {"rows": _before_a_gate, "size": 16, "layers": (0, 2), "gated": True}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "full_attention"]}
FAMILIES: dict[str, Case] = {
    "llama": Case("Llama 2 and 3, SmolLM 1 and 2 and others of its classes"),
    "llama-one-kv-head": Case(
        "the same with one key/value head", {"num_key_value_heads": 1}, type="llama"
    ),
    "llama4_text": Case(
        "Llama 4 (text)",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 12,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "moe_layers": [1],
            **_EXPERTS,
        },
        notes="chunked layers, layers without RoPE, query norm after RoPE",
    ),
    "mistral": Case("Mistral", {"sliding_window": 12, "head_dim": 8}, notes="sliding window"),
    "mixtral": Case("Mixtral", {"sliding_window": 12, **_EXPERTS}, notes="sliding window"),
    "qwen2": Case("Qwen2, Qwen2.5"),
    "qwen3": Case("Qwen3", {"head_dim": 16}, size=16, notes="query norm in each head"),
    "qwen3_moe": Case(
        "Qwen3-MoE",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        size=16,
        notes="query norm in each head",
    ),
    "gemma": Case("Gemma 1", {"head_dim": 16}, size=16),
    "gemma2": Case(
        "Gemma 2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
            **_WINDOW,
        },
        size=16,
        notes="soft cap, sliding windows; eager attention",
    ),
    "gemma3_text": Case(
        "Gemma 3 (text)",
        {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW},
        size=16,
        notes="sliding windows, query norm in each head",
    ),
    "gemma3": Case(
        "Gemma 3 (multimodal wrapper)",
        {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW},
        blocks="model.language_model.layers",
        size=16,
        notes="the same, nested",
    ),
    "olmo2": Case("OLMo 2", query="q_norm", notes="query norm over all heads: ablated after it"),
    "olmo3": Case("OLMo 3", _WINDOW, query="q_norm", notes="the same; sliding windows"),
    "phi3": Case(
        "Phi-3, Phi-3.5, Phi-4",
        query="qkv_proj",
        value="qkv_proj",
        values=lambda x, size: x[..., 6 * size :].unflatten(-1, (-1, size)),
        notes="fused q, k, v",
    ),
    "gpt_neox": Case(
        "GPT-NeoX, Pythia",
        blocks="gpt_neox.layers",
        rows=_in_threes,
        value="query_key_value",
        values=lambda x, size: x.unflatten(-1, (-1, 3, size))[..., 2, :],
        **_NEOX,
        notes="fused, head by head",
    ),
    "gpt2": Case(
        "GPT-2",
        blocks="transformer.h",
        attention="attn",
        query="c_attn",
        output="c_proj",
        value="c_attn",
        values=lambda x, size: x.chunk(3, -1)[2].unflatten(-1, (-1, size)),
        notes="fused q, k, v",
    ),
    "falcon": Case(
        "Falcon 7B",
        {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
        values=lambda x, size: x[..., -size:].unflatten(-1, (-1, size)),
        **_FALCON,
        notes="fused, one key/value head",
    ),
    "falcon-new": Case(
        "Falcon 40B, 180B, Falcon 2",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
        rows=_in_groups_of_two,
        values=lambda x, size: x.unflatten(-1, (-1, 4, size))[..., 3, :],
        **_FALCON,
        notes="fused, group by group",
    ),
    "falcon-old": Case(
        "Falcon without multi-query",
        {"multi_query": False, "new_decoder_architecture": False, "alibi": False},
        rows=_in_threes,
        values=lambda x, size: x.unflatten(-1, (-1, 3, size))[..., 2, :],
        **_FALCON,
        notes="fused, head by head",
    ),
    "falcon-alibi": Case(
        "Falcon-RW",
        {"multi_query": False, "new_decoder_architecture": False, "alibi": True},
        rows=_in_threes,
        **_FALCON,
        scored=False,
        notes="ALiBi gives each head a bias of its own: heads are ablated but not scored",
    ),
    "stablelm": Case("StableLM", {"qk_layernorm": True}, notes="query norm in each head"),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0, 1]}, notes="layers without RoPE"),
    "gpt_oss": Case(
        "gpt-oss",
        {"head_dim": 16, **_WINDOW, **_EXPERTS},
        size=16,
        notes="attention sinks, sliding windows; eager attention",
    ),
    "deepseek_v2": Case(
        "DeepSeek-V2",
        {"q_lora_rank": None, "topk_method": "greedy", **_LATENT},
        size=12,
        value="kv_b_proj",
        values=lambda x, size: x.reshape(-1, HEADS, x.shape[-1] // HEADS)[..., -size:],
        notes="latent attention; query site: both parts of a head's query",
    ),
    "deepseek_v3": Case(
        "DeepSeek-V3, R1",
        {"q_lora_rank": 12, **_LATENT},
        query="q_b_proj",
        size=12,
        value="kv_b_proj",
        values=lambda x, size: x.reshape(-1, HEADS, x.shape[-1] // HEADS)[..., -size:],
        notes="the same",
    ),
    "qwen3_next": Case(
        "Qwen3-Next",
        _QWEN_NEXT | _QWEN_EXPERTS,
        **_GATED,
        notes="hybrid: linear attention in most layers; a gate after each head",
    ),
    "qwen3_5_text": Case("Qwen3.5", _QWEN_NEXT, **_GATED, notes="the same"),
    "qwen3_5_moe_text": Case("Qwen3.5-MoE", _QWEN_NEXT | _QWEN_EXPERTS, **_GATED, notes="the same"),
    "lfm2": Case(
        "LFM2",
        _CONVOLUTIONS,
        output="out_proj",
        layers=(1, 2),
        notes="hybrid: convolutions in most layers",
    ),
    "lfm2_moe": Case(
        "LFM2-MoE",
        {**_CONVOLUTIONS, **_QWEN_EXPERTS, "num_dense_layers": 1},
        output="out_proj",
        layers=(1, 2),
        notes="the same",
    ),
}
NEWER = {name for name, case in FAMILIES.items() if (case.type or name) not in CONFIG_MAPPING}
"""Families that this release of transformers does not have."""
for _name in NEWER:
    del FAMILIES[_name]


def _scored(case: Case) -> bool:
    """Early releases keep the state of layers without attention where detection cannot use it."""
    return case.scored and not (EARLY and len(case.layers) < 3)


SCORED = [name for name, case in FAMILIES.items() if _scored(case)]


def _config(family: str) -> Any:
    case = FAMILIES[family]
    settings = _COMMON | case.config
    if family == "gemma3":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        return AutoConfig.for_model(
            "gemma3",
            text_config=settings,
            vision_config=vision,
            mm_tokens_per_image=4,
            # Out of the way of random ids.
            image_token_index=VOCABULARY - 1,
        )
    return AutoConfig.for_model(case.type or family, **settings)


def tiny_model(family: str, seed: int = 0, attn: str = "sdpa") -> nn.Module:
    """A random float32 model of ``family`` in eval mode; weights large enough to matter."""
    if family in ("gemma2", "gpt_oss"):
        attn = "eager"  # sdpa would leave out the soft cap and the sinks
    auto = AutoModelForImageTextToText if family == "gemma3" else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(_config(family), attn_implementation=attn)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                # Linear attention would amplify the last bits to what tests can see.
                parameter.normal_(0, 0.1 if "linear_attn" in name else 0.3)
    return model.eval()


def submodule(module: Any, path: str) -> Any:
    """``submodule(model, "a.b")`` is model.a.b."""
    return reduce(getattr, path.split("."), module)


def attention_of(model: nn.Module, family: str, layer: int) -> nn.Module:
    case = FAMILIES[family]
    return submodule(submodule(model, case.blocks)[layer], case.attention)


class _Fixed(nn.Module):
    """A module some of whose output's features are constants."""

    def __init__(self, module: nn.Module, rows: list[int], value: Tensor) -> None:
        super().__init__()
        self.module, self.rows, self.value = module, rows, value

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x).clone()
        output[..., self.rows] = self.value.to(output)
        return output


def folded(
    model: nn.Module, values: dict[tuple[int, int], Tensor], site: str, family: str = "llama"
) -> nn.Module:
    """A copy of ``model`` with heads ablated in its weights instead of by our hooks.

    query: the head's rows of the query module are the constant. output: the head's columns of the
    output projection are zero and what the constant would have written is added to its bias.
    """
    model = copy.deepcopy(model)
    case = FAMILIES[family]
    for (layer, head), value in values.items():
        attention = attention_of(model, family, layer)
        rows = list(case.rows(head, len(value)))
        if site == "query":
            setattr(attention, case.query, _Fixed(getattr(attention, case.query), rows, value))
            continue
        projection = getattr(attention, case.output)
        columns = list(range(head * len(value), (head + 1) * len(value)))
        with torch.no_grad():
            # Conv1D of GPT-2 keeps its weight the other way round.
            weight = projection.weight if hasattr(projection, "nf") else projection.weight.T
            if projection.bias is None:
                projection.bias = nn.Parameter(weight.new_zeros(weight.shape[1]))
            projection.bias += value @ weight[columns]
            weight[columns] = 0
    return model


def random_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids (no special ones), one list a length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, padded on ``side``."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = [0] * (width - len(row))
        ids.append(fill + row if side == "left" else row + fill)
        mask.append([0] * len(fill) + [1] * len(row) if side == "left" else [1] * len(row) + fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
