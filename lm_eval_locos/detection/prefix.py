"""One prefill of a text that many prompts begin with, and caches that go on from a part of it.

    >>> prefix = prefill(model, haystack_ids)
    >>> cache = continued(model, prefix, lengths=[800, 790], past=500)
    >>> forward(model, cache, input_ids=ids[:, 500:], ...)

Keys and values of a token depend on the tokens before it only, and a dynamic cache can be cut
anywhere. A sliding-window layer's cannot once it has dropped something.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from lm_eval_locos.architecture import Architecture, base_model, input_device


def forward(model: nn.Module, cache: Cache, **inputs: Any) -> Any:
    """``model(**inputs)`` with ``cache``, under the name that this transformers release has."""
    parameters = inspect.signature(base_model(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return model(**inputs, use_cache=True, **{name: cache})


def empty(model: nn.Module) -> DynamicCache:
    """The cache that plain generation uses."""
    return DynamicCache(config=base_model(model).config)


def why_not(architecture: Architecture, longest: int) -> str | None:
    """Why caches of ``longest`` tokens cannot be cut, or None where they can."""
    windows = [layer.window for layer in architecture.layers if layer.window is not None]
    if not windows or min(windows) >= longest:
        return None
    return (
        f"the cache of a layer with a window keeps its last {min(windows)} tokens only, and "
        f"prompts have up to {longest}"
    )


def prefill(model: nn.Module, ids: Sequence[int]) -> Cache:
    """The cache after ``ids``, of one sequence."""
    cache = empty(model)
    device = input_device(model)
    forward(model, cache, input_ids=torch.tensor([list(ids)], device=device), logits_to_keep=1)
    return cache


def continued(model: nn.Module, prefix: Cache, lengths: Sequence[int], past: int) -> DynamicCache:
    """A new cache with the first ``past`` columns of a left-padded batch; ``prefix`` stays whole.

    Args:
        model: of the prefix.
        prefix: see `prefill`; each sequence starts with a part of its text that reaches ``past``.
        lengths: tokens of each prompt; the batch is as wide as the longest.
        past: columns, padding included, that need no computing.
    """
    cache = empty(model)
    width = max(lengths)
    kept = [max(0, past - (width - length)) for length in lengths]
    for index, layer in enumerate(prefix.layers):
        tensors = []
        for whole in (layer.keys, layer.values):
            if min(kept) == past:
                part = whole[:, :, :past].expand(len(lengths), -1, -1, -1)
            else:
                part = whole.new_zeros(len(lengths), whole.shape[1], past, whole.shape[3])
                for row, count in enumerate(kept):
                    part[row, :, past - count :] = whole[0, :, :count]
            tensors.append(part)
        cache.update(*tensors, index)
    return cache
