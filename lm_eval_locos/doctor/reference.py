"""The same numbers in another way: an eager run's attention matrices, and sums written out.

Nothing here uses the capture or `lm_eval_locos.detection.scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lm_eval_locos.architecture import Architecture, Kind, attention_implementation
from lm_eval_locos.detection import prefix
from lm_eval_locos.errors import ModelError


@dataclass(frozen=True)
class EagerLayer:
    """One layer of an eager run over L tokens: H query heads, Hv value heads.

    Attributes:
        attention: rows of the attention matrix, (H, R, L), float64.
        values: (Hv, L, size of a head's output), float64.
        gates: what the heads' outputs are multiplied by in those rows, (H, R, size of a head's
            output), float64, or None.
    """

    attention: Tensor
    values: Tensor
    gates: Tensor | None = None


def eager_layers(
    model: nn.Module, architecture: Architecture, ids: Tensor, rows: Sequence[int]
) -> dict[int, EagerLayer]:
    """Runs ``ids``, (1, L), with eager attention and keeps some rows of every matrix.

    The matrices are read where they arise, so that only one exists at a time.

    Raises:
        ModelError: the model's eager attention returns no matrices.
    """
    found: dict[int, Tensor] = {}
    gates: dict[int, Tensor] = {}
    shape = (1, architecture.num_heads, ids.shape[1], ids.shape[1])

    def keep(layer: int, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        for part in parts:
            if isinstance(part, Tensor) and tuple(part.shape) == shape:
                found[layer] = part[0, :, list(rows)].to("cpu", torch.float64)

    def keep_gates(layer: int, output: Tensor) -> None:
        rows_of = architecture.gate_slices.split(output[0, list(rows)])
        gates[layer] = rows_of.transpose(0, 1).to("cpu", torch.float64).sigmoid()

    # Without the config no layer drops what left its window; hybrids need it for their other state.
    cache = prefix.empty(model, architecture) if architecture.hybrid else DynamicCache()
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(architecture, "eager"))
        for index, layer in architecture.layers.items():
            hooked = [(layer.attention, keep)]
            if architecture.gate_slices is not None:
                hooked.append((layer.query, keep_gates))
            for module, function in hooked:
                handle = module.register_forward_hook(
                    lambda module, args, output, index=index, f=function: f(index, output)
                )
                stack.callback(handle.remove)
        prefix.forward(model, cache, input_ids=ids, logits_to_keep=1)
    if len(found) < len(architecture.layers):
        name = type(next(iter(architecture.layers.values())).attention).__name__
        raise ModelError(
            f"{name} returns no attention matrix with attn_implementation=eager, so that there is "
            "nothing to compare with."
        )
    return {
        i: EagerLayer(
            found[i],
            _values(layer.attention, cache.layers[i]).to("cpu", torch.float64)[0],
            gates.get(i),
        )
        for i, layer in architecture.layers.items()
    }


def _values(attention: nn.Module, cached: Any) -> Tensor:
    """A layer's values from its cache, (1, Hv, L, size)."""
    if hasattr(attention, "expand_kv"):  # latent attention keeps latents
        return attention.expand_kv(cached.keys, cached.values)[1]
    return cached.values


def visible(kind: Kind, window: int | None, row: int) -> range:
    """The positions that a query at ``row`` sees, from the definition of a layer's kind."""
    if window is None:
        return range(row + 1)
    if kind == "chunked":
        return range(row // window * window, row + 1)
    return range(max(0, row + 1 - window), row + 1)


def output_weight(projection: nn.Module, width: int) -> Tensor:
    """What each input of an output projection writes, (``width``, hidden), float64."""
    weight = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
        return weight.to("cpu", torch.float64).T
    if type(projection).__name__ == "Conv1D":  # GPT-2 keeps it the other way round
        return weight.to("cpu", torch.float64)
    # Adapters, packed or offloaded weights: what the module makes of a one in each place.
    floating = [p for p in projection.parameters() if p.is_floating_point() and not p.is_meta]
    like = floating[0] if floating else torch.zeros(())
    ones = torch.eye(width, dtype=like.dtype, device=like.device)
    written, bias = projection(ones), projection(torch.zeros_like(ones[:1]))
    return written.to("cpu", torch.float64) - bias.to("cpu", torch.float64)


def explicit_scores(
    layer: EagerLayer,
    weight: Tensor,
    unembedding: Tensor,
    seen: Sequence[range],
    needle: tuple[int, int],
) -> dict[str, tuple[Tensor, float]]:
    """LOCOS and attention-spatial of a layer's heads, position by position.

    At step t, with phi[j] = a[t, j] * (u[t] . W_O v[j]), or a[t, j] alone, and v[j] multiplied by
    the head's gate at t where there is one,

        plus - minus = sum of phi on the needle - n / (N - n) * sum of phi off the needle

    over the N keys seen, n of them on the needle (arXiv 2607.01002, section 3).

    Returns:
        Per method the scores, (H,), float64, and the largest of the heads' mean sums of absolute
        terms: what the error of a difference is to be measured by, where rounding is coarse.

    Args:
        layer: attention in the rows of the T steps.
        weight: see `output_weight`.
        unembedding: the row of each step's token, (T, hidden), float64.
        seen: the positions that each step's query sees.
        needle: [start, end).
    """
    heads = layer.attention.shape[0]
    values = layer.values.repeat_interleave(heads // layer.values.shape[0], 0)  # (H, L, size)
    slices = weight.view(heads, -1, weight.shape[1])
    steps: dict[str, list[tuple[Tensor, Tensor]]] = {"locos": [], "attention_spatial": []}
    for step, positions in enumerate(seen):
        on = [j for j in positions if needle[0] <= j < needle[1]]
        off = [j for j in positions if not needle[0] <= j < needle[1]]
        ratio = len(on) / len(off) if off else 0.0
        written = slices if layer.gates is None else layer.gates[:, step, :, None] * slices
        read = torch.einsum("hjd,hdo,o->hj", values, written, unembedding[step])
        attention = layer.attention[:, step]
        for method, phi in (("locos", attention * read), ("attention_spatial", attention)):
            plus, minus = phi[:, on], ratio * phi[:, off]
            terms = plus.abs().sum(1) + minus.abs().sum(1)
            score = plus.sum(1) - minus.sum(1) if on else torch.zeros(heads).double()
            steps[method].append((score, terms))
    return {
        method: (
            torch.stack([score for score, _ in each]).mean(0),
            float(torch.stack([terms for _, terms in each]).mean(0).max()),
        )
        for method, each in steps.items()
    }
