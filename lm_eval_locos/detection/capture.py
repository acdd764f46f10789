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
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_locos.ablation import on_site, refuse_compiled
from lm_eval_locos.architecture import Architecture, attention_implementation, describe
from lm_eval_locos.detection.captured import Capture, LayerCapture
from lm_eval_locos.errors import ModelError

SDPA = "locos_capture_sdpa"
EAGER = "locos_capture_eager"


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
    layers, name = architecture.layers, architecture.kernel
    if architecture.through_interface:
        name = {"sdpa": SDPA, "eager": EAGER}[name]
    capture = Capture(architecture, first_row, seen)
    try:
        _active = capture
        with ExitStack() as stack:
            stack.enter_context(attention_implementation(architecture, name))
            for index, kept in capture.layers.items():
                module = layers[index].attention
                if not architecture.through_interface:
                    stack.enter_context(_listening(module))
                if hasattr(module, "expand_kv"):
                    stack.callback(_keeping_latent(kept, module).remove)
                if architecture.gate_slices is not None:
                    hook = on_site(architecture, index, "query", kept.keep_gate)
                    stack.callback(hook.remove)
            yield capture
    finally:
        _active = None


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
                "not say so. Its heads can be ablated but not scored."
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
