"""What a description says of a model, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from lm_eval_locos.architecture import Architecture, HeadSlices, base_model


def facts(model: nn.Module, architecture: Architecture) -> dict[str, str]:
    """A line a fact: where the heads are, how they attend, and what the weights are."""
    names = {id(module): name for name, module in model.named_modules()}

    def module(of: nn.Module) -> str:
        return f"{names.get(id(of), '?')} ({type(of).__name__})"

    layers = architecture.layers.values()
    first = next(iter(layers))
    described = [architecture.layers.get(i) for i in range(architecture.num_layers)]
    windows = [layer and layer.window for layer in described]
    between = "keys and values" if architecture.gate_slices is None else "gates"
    parameters = list(model.parameters())
    return {
        "model": f"{architecture.model_type}, {type(base_model(model)).__name__}",
        "heads": f"{architecture.num_layers} layers of {architecture.num_heads} query heads and "
        f"{architecture.num_kv_heads} key/value heads",
        "head size": f"query {architecture.query_slices.size}, "
        f"output {architecture.output_slices.size}",
        "layers": _counted(
            kind if window is None else f"{kind} ({window})"
            for kind, window in zip(architecture.kinds, windows, strict=True)
        ),
        "scaling": _counted(f"{layer.scaling:.6g}" for layer in layers),
        "soft cap": _counted(f"{layer.softcap or 'none'}" for layer in layers),
        "sinks": _counted("yes" if layer.sinks else "none" for layer in layers),
        "attention": module(first.attention)
        + ("" if architecture.through_interface else ", calls torch's kernel itself"),
        "query site": f"output of {module(first.query)}, "
        f"{_layout(architecture.query_slices, between)}",
        "output site": f"input of {module(first.output)}, "
        f"{_layout(architecture.output_slices, between)}",
        "norm": module(architecture.norm),
        "unembedding": module(architecture.unembedding),
        "weights": f"{sum(p.numel() for p in parameters):,} parameters, "
        f"{_counted(str(p.dtype).removeprefix('torch.') for p in parameters)}, "
        f"on {', '.join(sorted({str(p.device) for p in parameters}))}",
    }


def _counted(values: Iterable[str]) -> str:
    """``15 sliding (512), 3 global``; the value alone where all are the same."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {value}" for value, count in counts.most_common())


def _layout(slices: HeadSlices, between: str) -> str:
    starts = [start for start in slices.starts if start is not None]
    size, width = slices.size, slices.width
    if starts != [i * size for i in range(len(starts))]:
        return f"{len(starts)} heads of {size} with {between} between them ({width} features)"
    more = "" if len(starts) * size == width else ", then keys and values"
    return f"{len(starts)} heads of {size} after one another{more} ({width} features)"
