"""Tensor parallelism: which heads lie on this rank.

transformers splits a projection's weight by rows or by columns, so that a hook sees the features of
this rank's heads alone; or it gathers them, and a hook sees them all. Which of them is in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from lm_eval_locos.architecture._structure import AttentionLayer, HeadSlices
from lm_eval_locos.architecture.families import Layout
from lm_eval_locos.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

_SPLIT = ("colwise", "rowwise")
"""Styles that leave each rank its own heads, in the query's output or the output's input."""
_WHOLE = (
    *("colwise_rep", "colwise_gather_output", "rowwise_rep", "rowwise_split_input"),
    *("replicate", "replicated_with_grad_allreduce"),
)
"""Styles under which every rank sees all heads there. Without a style a module is not split."""


def ranks_of(model: nn.Module) -> tuple[int, int]:
    """This process's place among those that the layers are split over, and their number."""
    ranks = int(getattr(model, "_tp_size", None) or 1)
    if ranks == 1:
        return 0, 1
    from torch import distributed

    if (world := distributed.get_world_size()) != ranks:
        raise ModelError(
            f"the layers of this model are split over {ranks} of {world} processes. Start as many "
            "processes as tensor parallelism uses (torchrun --nproc-per-node)."
        )
    return distributed.get_rank(), ranks


def check_split(ranks: int, *, handled: bool, adapted: bool) -> None:
    """Raises ModelError where split layers cannot be handled: by the caller, or with an adapter."""
    if not handled:
        raise ModelError(
            f"the layers of this model are split over {ranks} processes (tensor parallelism). Its "
            "heads can be ablated so, but not scored. For detection load it on one device, or on "
            "several with device_map=auto."
        )
    if adapted:
        raise ModelError(
            f"this model has an adapter and its layers are split over {ranks} processes (tensor "
            "parallelism), where an adapter's heads are not known. Merge the adapter into the "
            "model first (merge_and_unload), or load it on one device."
        )


def styles_of(
    model: nn.Module, layers: Collection[AttentionLayer]
) -> tuple[str | None, str | None]:
    """How the model's plan splits the query and the output modules."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    names = {module: name for name, module in model.named_modules()}
    found = [
        tuple(plan.get(re.sub(r"\d+", "*", names[m])) for m in (layer.query, layer.output))
        for layer in layers
    ]
    if len(set(found)) != 1:
        raise ModelError(
            f"tensor parallelism splits this model's layers in different ways ({found}). Use "
            "tp_plan=auto, or load it on one device."
        )
    return found[0]


def on_rank(
    slices: HeadSlices,
    groups: int,
    layout: Layout,
    style: str | None,
    rank: int,
    ranks: int,
) -> HeadSlices:
    """Where the heads are in what this rank sees of an activation; all or an equal share are."""
    if style is None or style in _WHOLE:
        return slices
    heads = len(slices.starts)
    if style not in _SPLIT or layout == "query_first" or heads % ranks or groups % ranks:
        raise ModelError(
            f"the {heads} heads and {groups} key/value heads of this model "
            f"({layout}, {style}) cannot be told apart on {ranks} processes. Use a number of "
            "processes that divides both, or load the model on one device or with device_map=auto."
        )
    width = slices.width // ranks
    first = rank * width
    starts = (None if start is None else start - first for start in slices.starts)
    return HeadSlices(
        tuple(s if s is not None and 0 <= s < width else None for s in starts), slices.size, width
    )
