"""Tiny random models, one a family, and the same ablations done without hooks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 12, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},  # not hidden / heads
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
}


def tiny_model(family: str, seed: int = 0, attn: str = "sdpa") -> nn.Module:
    """A random float32 model of ``family`` in eval mode; weights large enough to matter."""
    config = AutoConfig.for_model(family.split("-")[0], **(_COMMON | FAMILIES[family]))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


def folded(model: nn.Module, values: dict[tuple[int, int], Tensor], site: str) -> nn.Module:
    """A copy of ``model`` with heads ablated in its weights instead of by hooks.

    query: the head's rows of q_proj are zero and its bias is the constant. output: the head's
    columns of o_proj are zero and what the constant would have written is added to the bias.
    """
    model = copy.deepcopy(model)
    config = model.config
    for (layer, head), value in values.items():
        attention = model.get_decoder().layers[layer].self_attn
        size = attention.q_proj.out_features // config.num_attention_heads
        rows = slice(head * size, (head + 1) * size)
        with torch.no_grad():
            for name in ("q_proj", "o_proj"):
                projection = getattr(attention, name)
                if projection.bias is None:
                    zeros = torch.zeros(projection.out_features, dtype=projection.weight.dtype)
                    projection.bias = nn.Parameter(zeros)
            if site == "query":
                attention.q_proj.weight[rows] = 0
                attention.q_proj.bias[rows] = value
            else:
                attention.o_proj.bias += attention.o_proj.weight[:, rows] @ value
                attention.o_proj.weight[:, rows] = 0
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
