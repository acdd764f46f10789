"""Capture: keeps what an ordinary generation computes anyway, so that heads are scored after it.

    >>> with capturing(model, architecture, first_row=prompt_length - 8) as capture:
    ...     model.generate(**inputs, do_sample=False)
    >>> capture.layers[3].queries().shape       # (batch, heads, rows, head_dim)
    torch.Size([1, 9, 12, 64])

Inside the context the model runs an attention function registered under our own name. It calls the
fast kernel (sdpa; for families with a soft cap or attention sinks their own eager function; where
a family calls torch's kernel itself, that call is listened to) and keeps three references: the
rotated query and the output of the rows that matter, and the layer's keys and values, which the
cache holds anyway. Nothing is computed while generating and, but for the eager families, no
attention matrix exists at any time; `lm_eval_locos.detection.scores` does its arithmetic
afterwards, on the few rows that are scored.

Positions are absolute columns of the padded batch: column c holds the c-th token fed, left padding
included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_locos.ablation import refuse_compiled
from lm_eval_locos.architecture import Architecture, AttentionLayer, describe
from lm_eval_locos.errors import ModelError

SDPA = "locos_capture_sdpa"
EAGER = "locos_capture_eager"


class LayerCapture:
    """What is kept of one layer: B sequences, H query heads, Hk key/value heads, R rows.

    Attributes:
        kind, window: which keys a query sees, as in `AttentionLayer`.
        scaling: factor on the logits.
        softcap: soft cap on the scaled logits, or None.
        sinks: one extra logit a head, shape (H,), that takes part in the softmax, or None.
    """

    def __init__(self, layer: AttentionLayer, seen: int) -> None:
        self.kind, self.window = layer.kind, layer.window
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
        self._latent: tuple[nn.Module, Cache] | None = None

    @property
    def columns(self) -> range:
        """The absolute column of each kept row: the last ones that were fed."""
        return range(self._seen - self._rows, self._seen)

    def queries(self) -> Tensor:
        """The rotated queries of the kept rows, (B, H, R, head_dim).

        Raises:
            ModelError: no attention call was seen.
        """
        if not self._queries:
            raise ModelError(
                "the attention ran without a call of its kernel, so that its heads cannot be "
                "scored. Load the model with attn_implementation=sdpa."
            )
        return torch.cat(self._queries, 2)

    def outputs(self) -> Tensor:
        """Every head's output (the o_proj input) in the kept rows, (B, H, R, head_dim)."""
        return torch.cat(self._outputs, 1).transpose(1, 2)

    def keys_values(self) -> tuple[Tensor, Tensor, int]:
        """Keys and values (B, Hk, C, head_dim) and the absolute column of the first of the C.

        They hold every column that a kept row sees. Latent attention forms them anew: ask once.
        """
        if self._latent is not None:
            attention, cache = self._latent
            layer = cache.layers[attention.layer_idx]
            keys, values = attention.expand_kv(layer.keys, layer.values)
            return keys[:, :, : self._seen], values[:, :, : self._seen], 0
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
        if self._latent is not None:
            return
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

    def keep_latent(self, attention: nn.Module, cache: Cache) -> None:
        """Keeps the cache in the place of keys and values, which are formed from what it holds."""
        self._latent = attention, cache

    def release(self) -> None:
        """Drops references to a growing cache's tensors before it replaces them."""
        if self.window is None:
            self._keys, self._values = [], []


class Capture:
    """What is kept of one batch: ``layers[i]`` of decoder layer i.

    Attributes:
        materialises: whether the attention forms the matrix of the rows that are fed at a time.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], first_row: int, seen: int, materialises: bool
    ) -> None:
        self.first_row, self.materialises = first_row, materialises
        self.layers = tuple(LayerCapture(layer, seen) for layer in layers)

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
        ModelError: unknown family, a compiled model, or a context inside another one.
    """
    global _active
    if _active is not None:
        raise ModelError("a capture is running already. Captures do not nest; close the first one.")
    architecture = architecture or describe(model)
    refuse_compiled(model)
    attention = [layer.attention for layer in architecture.layers]
    special = any(layer.softcap or layer.sinks for layer in architecture.layers)
    kernel = not special and getattr(architecture.decoder, "_supports_sdpa", False)
    name = (SDPA if kernel else EAGER) if architecture.through_interface else "sdpa"
    # The decoder and its layers read their own config, which a multimodal model nests.
    owners = [architecture.decoder.config, *(module.config for module in attention)]
    configs = {id(config): config for config in owners}.values()
    former = [(config, config._attn_implementation) for config in configs]
    capture = Capture(architecture.layers, first_row, seen, name == EAGER)
    try:
        for config in configs:
            config._attn_implementation = name
        _active = capture
        with ExitStack() as stack:
            if not architecture.through_interface:
                for module in attention:
                    stack.enter_context(_listening(module))
            for layer, module in zip(capture.layers, attention, strict=True):
                if hasattr(module, "expand_kv"):
                    stack.callback(_keeping_latent(layer, module).remove)
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
    for name, what in (("s_aux", "attention sinks"), ("softcap", "a soft cap")):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} has {what}, which sdpa leaves out, and its config does "
                "not say so. Its heads cannot be scored."
            )
    if attention_mask is not None:
        # Some families of early releases make masks one column too wide, for their own sdpa.
        attention_mask = attention_mask[..., : key.shape[2]]
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


class _Kernel(TorchFunctionMode):
    """Records the calls of torch's attention kernel that one attention module makes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                raise ModelError(
                    f"{type(self.module).__name__} adds a bias of its own to every head's logits "
                    "(ALiBi). Its heads can be ablated but not scored."
                )
            heads = output.transpose(1, 2)
            _record(self.module, *args[:3], heads, kwargs.get("scale"), None, None)
        return output


@contextmanager
def _listening(module: nn.Module) -> Iterator[None]:
    """Records the attention of a module that calls torch's kernel itself."""
    kernel = _Kernel(module)

    def before(*_: Any) -> None:
        kernel.__enter__()

    def after(*_: Any) -> None:
        kernel.__exit__(None, None, None)

    handles = (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeping_latent(layer: LayerCapture, module: nn.Module) -> RemovableHandle:
    """Has ``layer`` keep the cache of latents that ``module`` is called with."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            layer.keep_latent(module, cache)

    return module.register_forward_pre_hook(before, with_kwargs=True)


# The mask functions go under the same names: without them masks vanish without a word.
for _name, _attention, _mask in ((SDPA, _sdpa, sdpa_mask), (EAGER, _eager, eager_mask)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)
