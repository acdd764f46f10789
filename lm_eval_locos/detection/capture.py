"""Capture: keeps what an ordinary generation computes anyway, so that heads are scored after it.

    >>> with capturing(model, architecture, first_row=prompt_length - 8) as capture:
    ...     model.generate(**inputs, do_sample=False)
    >>> capture.layers[3].queries().shape       # (batch, heads, rows, head_dim)
    torch.Size([1, 9, 12, 64])

Inside the context the model runs an attention function registered under our own name. It calls the
fast kernel (sdpa; for families with a soft cap or attention sinks their own eager function) and
keeps three references: the rotated query and the output of the rows that matter, and the layer's
keys and values, which the cache holds anyway. Nothing is computed while generating and no attention
matrix exists at any time; `lm_eval_locos.detection.scores` does its arithmetic afterwards, on the
few rows that are scored.

Positions are absolute columns of the padded batch: column c holds the c-th token fed, left padding
included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_locos.ablation import refuse_compiled
from lm_eval_locos.architecture import Architecture, base_model, describe
from lm_eval_locos.errors import ModelError

SDPA = "locos_capture_sdpa"
EAGER = "locos_capture_eager"


class LayerCapture:
    """What is kept of one layer: B sequences, H query heads, Hk key/value heads, R rows.

    Attributes:
        window: keys that a query sees, itself included, in a sliding-window layer, else None.
        scaling: factor on the logits.
        softcap: soft cap on the scaled logits, or None.
        sinks: one extra logit a head, shape (H,), that takes part in the softmax, or None.
    """

    def __init__(self, window: int | None, seen: int) -> None:
        self.window = window
        self.scaling = 1.0
        self.softcap: float | None = None
        self.sinks: Tensor | None = None
        self._seen = seen
        self._rows = 0
        self._first = 0
        self._queries: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def columns(self) -> range:
        """The absolute column of each kept row: the last ones that were fed."""
        return range(self._seen - self._rows, self._seen)

    def queries(self) -> Tensor:
        """The rotated queries of the kept rows, (B, H, R, head_dim)."""
        return torch.cat(self._queries, 2)

    def outputs(self) -> Tensor:
        """Every head's output (the o_proj input) in the kept rows, (B, H, R, head_dim)."""
        return torch.cat(self._outputs, 1).transpose(1, 2)

    def keys_values(self) -> tuple[Tensor, Tensor, int]:
        """Keys and values (B, Hk, C, head_dim) and the absolute column of the first of the C.

        They hold every column that a kept row sees.
        """
        if len(self._keys) > 1:
            self._keys, self._values = [torch.cat(self._keys, 2)], [torch.cat(self._values, 2)]
        return self._keys[0], self._values[0], self._first

    def record(
        self, first_row: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Keeps rows from column ``first_row`` on of one attention call.

        Args:
            query: (B, H, Q, head_dim), of the last Q columns.
            key: (B, Hk, K, head_dim), after the cache update.
            value: as ``key``.
            output: (B, Q, H, head_dim).
        """
        count, total = query.shape[2], key.shape[2]
        seen = self._seen = self._seen + count
        rows = min(count, seen - first_row)
        if rows <= 0:
            return
        # A slice would keep the whole prompt's queries alive: it is copied.
        self._queries.append(query if rows == count else query[:, :, -rows:].clone())
        self._outputs.append(output if rows == count else output[:, -rows:].clone())
        self._rows += rows
        # A static cache hands out all its slots; those after the last token are empty.
        filled = min(total, seen)
        if self.window is None:
            if filled < total:
                key, value = key[:, :, :filled], value[:, :, :filled]
            self._keys, self._values = [key], [value]
        elif not self._keys:
            # The cache will drop these columns, or write others in their place: copied.
            offset = max(0, seen - total)
            self._first = max(offset, seen - rows - self.window + 1)
            self._keep(key, value, self._first - offset, filled)
        else:
            self._keep(key, value, filled - count, filled)

    def _keep(self, key: Tensor, value: Tensor, start: int, end: int) -> None:
        self._keys.append(key[:, :, start:end].clone())
        self._values.append(value[:, :, start:end].clone())

    def release(self) -> None:
        """Drops references to a growing cache's tensors before it replaces them."""
        if self.window is None:
            self._keys, self._values = [], []


class Capture:
    """What is kept of one batch: ``layers[i]`` of decoder layer i."""

    def __init__(self, windows: Sequence[int | None], first_row: int, seen: int) -> None:
        self.first_row = first_row
        self.layers = tuple(LayerCapture(window, seen) for window in windows)

    def release(self) -> None:
        """To be called before a forward pass where memory is tight: the cache grows by copying,
        and without the references held here the old copy is free at once. Optional."""
        for layer in self.layers:
            layer.release()


_active: Capture | None = None


@contextmanager
def capturing(
    model: nn.Module,
    architecture: Architecture | None = None,
    *,
    first_row: int,
    seen: int = 0,
) -> Iterator[Capture]:
    """Runs the model with the capturing attention; the former one is back after the block.

    One batch a context, of any batch size, left padding, kind of cache (dynamic, static, sliding)
    and number of prefill chunks.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one.
        architecture: ``describe(model)`` where it is known already.
        first_row: column of the first row to keep. Row t - 1 is the one that produces token t.
        seen: columns that the cache already holds.

    Raises:
        ModelError: unsupported family, a compiled model, or a context inside another one.
    """
    global _active
    if _active is not None:
        raise ModelError("a capture is running already. Captures do not nest; close the first one.")
    architecture = architecture or describe(model)
    refuse_compiled(model)
    attention = [layer.attention for layer in architecture.layers]
    base = base_model(model)
    name = SDPA if getattr(base.get_decoder(), "_supports_sdpa", False) else EAGER
    # The decoder and its layers read their own config, which a multimodal model nests.
    owners = [base.get_decoder().config, *(module.config for module in attention)]
    configs = {id(config): config for config in owners}.values()
    former = [(config, config._attn_implementation) for config in configs]
    capture = Capture([layer.window for layer in architecture.layers], first_row, seen)
    try:
        for config in configs:
            config._attn_implementation = name
        _active = capture
        yield capture
    finally:
        _active = None
        for config, implementation in former:
            config._attn_implementation = implementation


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    if _active is None:
        raise ModelError(
            f"{type(module).__name__} runs the capturing attention outside a capture. Its "
            "config names an implementation that belongs to detection; load the model again."
        )
    layer = _active.layers[module.layer_idx]
    layer.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.softcap, layer.sinks = softcap, sinks
    layer.record(_active.first_row, query, key, value, output)


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if kwargs.get("s_aux") is not None:
        raise ModelError(
            f"{type(module).__name__} has attention sinks, which sdpa leaves out. Its family must "
            "say that sdpa is not supported."
        )
    output, weights = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    _record(module, query, key, value, output, scaling, None, None)
    return output, weights


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    family = sys.modules[type(module).__module__]
    forward = getattr(family, "eager_attention_forward", None)
    if forward is None:
        raise ModelError(
            f"{family.__name__} has no eager_attention_forward, so that its attention cannot be "
            "captured. Use a family of transformers itself."
        )
    output, weights = forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    _record(module, query, key, value, output, scaling, softcap, sinks)
    return output, weights


# The mask functions go under the same names: without them masks vanish without a word.
for _name, _attention, _mask in ((SDPA, _sdpa, sdpa_mask), (EAGER, _eager, eager_mask)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)
