"""Head ablation by forward hooks.

    >>> with ablate(model, {Head(3, 1): torch.zeros(64)}, site="query"):
    ...     model(**inputs)          # head 1 of layer 3 asks with a zero query
    >>> model(**inputs)              # the plain model again

Weights are never edited. At ``site="query"`` (the paper's) the head's slice of the query
projection's output, before RoPE and before a query norm of its own, is replaced by a constant; at
``site="output"`` its slice of the output projection's input is, and nothing else changes in that
layer. What the constant is (a calibration mean, zero, a resampled value) is the caller's choice:
see `lm_eval_locos.calibration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lm_eval_locos.architecture import (
    SITES,
    Architecture,
    Head,
    HeadSlices,
    Site,
    describe,
)
from lm_eval_locos.errors import ModelError


class Ablation:
    """An ablation in force; ``fired`` counts the projections it has changed so far."""

    def __init__(self) -> None:
        self.fired = 0


@contextmanager
def ablate(
    model: nn.Module,
    values: Mapping[Head, Tensor],
    *,
    site: Site = "query",
    architecture: Architecture | None = None,
) -> Iterator[Ablation]:
    """Replaces heads by constants while the context is open; the hooks are gone after it.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one. Any device map,
            floating dtype, batch, padding side and cache.
        values: for each head its constant, shape (size of a head at the site,), any floating dtype
            and device; it is cast to the activation's. No heads: no hooks, so logits are bit-equal
            to the model's.
        site: ``query`` or ``output``, see the module's docstring.
        architecture: ``describe(model)`` where it is known already.

    Raises:
        ModelError: unsupported family, head outside the model, constant of the wrong shape, or a
            compiled model (hooks added after torch.compile are ignored).
    """
    if site not in SITES:
        raise ModelError(f"site={site!r} is not known. Use one of {', '.join(SITES)}.")
    if not values:
        yield Ablation()
        return
    architecture = architecture or describe(model, tensor_parallel=True)
    refuse_compiled(model)
    architecture.check_heads(values)
    slices = architecture.slices(site)
    by_layer: dict[int, dict[int, Tensor]] = {}
    for head, value in values.items():
        if tuple(value.shape) != (slices.size,):
            raise ModelError(
                f"the constant of head {head} has shape {tuple(value.shape)}; expected "
                f"({slices.size},). Was the calibration made on another model?"
            )
        by_layer.setdefault(head.layer, {})[head.head] = value
    ablation = Ablation()
    with ExitStack() as stack:
        for layer, constants in by_layer.items():
            replace = _replacement(constants, slices, ablation)
            stack.callback(on_site(architecture, layer, site, replace).remove)
        yield ablation


def on_site(
    architecture: Architecture, layer: int, site: Site, function: Callable[[Tensor], Tensor | None]
) -> RemovableHandle:
    """Calls ``function`` with a layer's activations at ``site``: see `Architecture.slices`.

    Where it returns a tensor, that takes the activations' place; None leaves them alone.
    """
    width = architecture.slices(site).width

    def checked(activations: Tensor) -> Tensor | None:
        whole = activations
        if hasattr(whole, "to_local"):  # early releases split layers by DTensors
            activations = whole.to_local()
        if activations.shape[-1] != width:
            raise ModelError(
                f"layer {layer} has {activations.shape[-1]} features at site={site}, not {width}. "
                "Are its layers split over processes in a way that is not known here? Load the "
                "model on one device."
            )
        changed = function(activations)
        if changed is None or whole is activations:
            return changed
        return type(whole).from_local(changed, whole.device_mesh, whole.placements)

    if site == "query":

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return checked(output)

        return architecture.layers[layer].query.register_forward_hook(after)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = checked(args[0])
        return None if changed is None else (changed, *args[1:])

    return architecture.layers[layer].output.register_forward_pre_hook(before)


def _replacement(
    constants: Mapping[int, Tensor], slices: HeadSlices, ablation: Ablation
) -> Callable[[Tensor], Tensor]:
    """A function that puts ``constants`` in their heads' slices and leaves all else bit-equal."""
    constant = torch.zeros(slices.width)
    keep = torch.ones(slices.width, dtype=torch.bool)
    for head, part in slices.here.items():
        if head in constants:
            constant[part] = constants[head]
            keep[part] = False

    def replace(activations: Tensor) -> Tensor:
        nonlocal constant, keep
        # The activations' device and dtype are known only here (device maps, autocast, 4 bit).
        constant, keep = constant.to(activations), keep.to(activations.device)
        ablation.fired += 1
        return torch.where(keep, activations, constant)

    return replace


def refuse_compiled(model: nn.Module) -> None:
    """Raises ModelError for a model, or a part of one, that went through torch.compile."""
    for name, module in model.named_modules():
        compiled_in_place = getattr(module, "_compiled_call_impl", None) is not None
        if compiled_in_place or hasattr(module, "_orig_mod"):
            raise ModelError(
                f"{name or type(model).__name__} is compiled (torch.compile), and hooks added "
                "after compiling are ignored. Load the model without compiling it."
            )
