"""One prefill of a text that many prompts begin with, and caches that go on from a part of it.

    >>> prefix = prefill(model, architecture, haystack_ids)
    >>> cache = continued(model, architecture, prefix, lengths=[800, 790], past=500)
    >>> forward(model, cache, input_ids=ids[:, 500:], ...)

Keys and values of a token depend on the tokens before it only, and a dynamic cache can be cut
anywhere. A sliding-window layer's cannot once it has dropped something, and the state of a layer
without attention never can.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import Cache, DynamicCache

from lm_eval_locos.architecture import (
    Architecture,
    attention_implementation,
    base_model,
    input_device,
)
from lm_eval_locos.errors import ModelError

HYBRID_SINCE = Version("5.17")
"""The first release seen to continue a padded batch of a hybrid model rightly (5.14 did not)."""


def forward(model: nn.Module, cache: Cache, **inputs: Any) -> Any:
    """``model(**inputs)`` with ``cache``, under the name that this transformers release has."""
    parameters = inspect.signature(base_model(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return model(**inputs, use_cache=True, **{name: cache})


def empty(model: nn.Module, architecture: Architecture) -> DynamicCache:
    """The cache that plain generation uses.

    Raises:
        ModelError: layers without attention, in a release of transformers that cannot go on from
            their state with the next piece of a prompt: it would generate other tokens.
    """
    if architecture.hybrid and Version(transformers.__version__) < HYBRID_SINCE:
        raise ModelError(
            f"transformers {transformers.__version__} loses the state of layers without attention "
            f"({architecture.model_type}) between the pieces of a prompt, so that heads would be "
            f"scored on other answers. Use transformers {HYBRID_SINCE} or later."
        )
    return DynamicCache(config=base_model(model).config)


def why_not(architecture: Architecture, longest: int) -> str | None:
    """Why caches of ``longest`` tokens cannot be cut, or None where they can."""
    if architecture.hybrid:
        return "layers without attention keep a state that stands for all tokens before"
    windows = [x.window for x in architecture.layers.values() if x.window is not None]
    if not windows or min(windows) >= longest:
        return None
    return (
        f"the cache of a layer with a window keeps its last {min(windows)} tokens only, and "
        f"prompts have up to {longest}"
    )


def prefill(
    model: nn.Module, architecture: Architecture, ids: Sequence[int], *, piece: int = 256
) -> Cache:
    """The cache after ``ids``, of one sequence, whatever attention the model was loaded with.

    Eager attention, where the family has no other, is fed ``piece`` tokens at a time: it forms
    their matrix.
    """
    cache = empty(model, architecture)
    fed = torch.tensor([list(ids)], device=input_device(model))
    size = piece if architecture.kernel == "eager" else fed.shape[1]
    with attention_implementation(architecture, architecture.kernel):
        for part in fed.split(size, dim=1):
            forward(model, cache, input_ids=part, logits_to_keep=1)
    return cache


def continued(
    model: nn.Module,
    architecture: Architecture,
    prefix: Cache,
    lengths: Sequence[int],
    past: int,
) -> DynamicCache:
    """A new cache with the first ``past`` columns of a left-padded batch; ``prefix`` stays whole.

    Args:
        model: of the prefix.
        architecture: its description.
        prefix: see `prefill`; each sequence starts with a part of its text that reaches ``past``.
        lengths: tokens of each prompt; the batch is as wide as the longest.
        past: columns, padding included, that need no computing.
    """
    cache = empty(model, architecture)
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
