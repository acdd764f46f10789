"""Checks of ablation: that it changes the head it should, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Head, HeadSlices, Site, plain_weight
from lm_eval_locos.doctor.subject import Finding, Subject, Trace, relative_error


def no_head(subject: Subject) -> Finding:
    """With no head ablated, and after an ablation, every bit is the plain model's."""
    if not subject.deterministic:
        return None, "two plain runs of this model differ, so that no run can be bit-equal"
    hooks = _hooks(subject.model)
    plain = subject.plain.logits
    if not torch.equal(subject.trace({}).logits, plain):
        return False, "ablating no head changes the logits"
    head = subject.heads[0]
    subject.trace({head: subject.constant(head, "query")})
    if _hooks(subject.model) != hooks:
        return False, f"{_hooks(subject.model) - hooks} hooks are left after an ablation"
    if not torch.equal(subject.trace().logits, plain):
        return False, "the logits are others after an ablation has ended"
    return True, "logits bit-equal with no head ablated, and after an ablation; no hook is left"


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def query_site(subject: Subject) -> Finding:
    """Ablating a head's query changes its own query and its own output."""
    return _site(subject, "query", "only the head's own query and its own output change")


def output_site(subject: Subject) -> Finding:
    """Ablating a head's output changes its slice of the output module's input."""
    return _site(subject, "output", "only the head's own output changes, and with it the logits")


def _site(subject: Subject, site: Site, summary: str) -> Finding:
    wrong = {}
    for head in subject.heads:
        constant = subject.constant(head, site)
        ablated = subject.trace({head: constant}, site)
        if problem := _problem(subject, site, head, constant, ablated):
            wrong[head] = problem
    layers = ", ".join(map(str, subject.layers))
    if not wrong:
        return True, f"{len(subject.heads)} heads of layers {layers}: {summary}"
    head, problem = next(iter(wrong.items()))
    return False, f"head {head}: {problem} ({len(wrong)} of {len(subject.heads)} heads are wrong)"


def _problem(
    subject: Subject, site: Site, head: Head, constant: Tensor, ablated: Trace
) -> str | None:
    """What is wrong with one head's ablation, or None."""
    plain, architecture, layer = subject.plain, subject.architecture, head.layer
    got, before = ablated.sites[site][layer], plain.sites[site][layer]
    part = architecture.slices(site).here[head.head]
    if not torch.equal(got[..., part], constant.to(got).expand_as(got[..., part])):
        return f"its slice at the {site} site is not the constant"
    if not subject.same(_without(got, part), _without(before, part)):
        return f"something else than its slice changes at the {site} site"
    if site == "query":
        changed = _changed(subject, architecture.output_slices, ablated, layer)
        others = [str(Head(layer, other)) for other in changed if other != head.head]
        if others:
            return f"ablating its query changes the output of {_listed(others)}"
        if head.head not in changed:
            return "ablating its query does not change its output"
    elif not subject.same(ablated.sites["query"][layer], plain.sites["query"][layer]):
        return "ablating its output changes queries of its own layer"
    if torch.equal(ablated.logits, plain.logits):
        return f"ablating its {site} does not change any logit"
    return None


def _changed(subject: Subject, slices: HeadSlices, ablated: Trace, layer: int) -> list[int]:
    """The heads of a layer whose outputs are not those of the plain run."""
    outputs, plain = ablated.sites["output"][layer], subject.plain.sites["output"][layer]
    return [
        head
        for head, part in slices.here.items()
        if not subject.same(outputs[..., part], plain[..., part])
    ]


def _without(activations: Tensor, part: slice) -> Tensor:
    return torch.cat([activations[..., : part.start], activations[..., part.stop :]], -1)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"head {shown}" if len(names) == 1 else f"heads {shown}{', ...' * (len(names) > 4)}"


def left_padding(subject: Subject) -> Finding:
    """A left-padded batch gives the logits of each prompt alone, a head being ablated."""
    rows, batch = subject.padded(7)
    middle = subject.layers[len(subject.layers) // 2]
    head = Head(middle, 0)
    values = {head: subject.constant(head, "query")}
    with ablate(subject.model, values, architecture=subject.architecture):
        together = subject.model(**batch, use_cache=False, logits_to_keep=1).logits[:, -1]
        error = max(map(relative_error, together, subject.alone(rows)))
    return error <= subject.tolerance, (
        f"a batch of {len(rows[0])} and {len(rows[1])} tokens gives the logits of each alone: "
        f"relative error {error:.1e} (at most {subject.tolerance:g}), head {head} ablated"
    )


def unembedding(subject: Subject) -> Finding:
    """The logits are what the unembedding makes of the final norm's output."""
    architecture = subject.architecture
    seen: dict[str, Tensor] = {}

    def norm(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["norm"] = output[0, -1].float()

    def unembed(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["in"], seen["out"] = args[0][0, -1].float(), output[0, -1].float()

    handles = (
        architecture.norm.register_forward_hook(norm),
        architecture.unembedding.register_forward_hook(unembed),
    )
    try:
        ids = subject.fed(subject.ids[: subject.length])
        logits = subject.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    finally:
        for handle in handles:
            handle.remove()
    if seen.keys() != {"norm", "in", "out"}:
        missing = "norm" if "norm" not in seen else "unembedding"
        return False, f"the {missing} of the description never runs"
    before = _relation(seen["norm"], seen["in"], subject.tight)
    after = _relation(seen["out"], logits, subject.tight)
    name = type(architecture.unembedding).__name__
    if before not in ("unchanged", "scaled"):
        return False, f"what the unembedding ({name}) reads is not the output of the norm"
    if after is None:
        return False, f"the logits are not those of the unembedding ({name})"
    rows = _rows_error(architecture.unembedding, seen)
    if rows is not None and not rows <= subject.tolerance:
        return False, (
            f"the rows of the unembedding's weight do not give its logits: relative error "
            f"{rows:.1e} (at most {subject.tolerance:g})"
        )
    told = "its weight is packed" if rows is None else f"its rows give it again to {rows:.1e}"
    return True, (
        f"{name} reads the norm's output {before}; {told}; the logits are its output {after}"
    )


def _relation(before: Tensor, after: Tensor, tolerance: float) -> str | None:
    """How one vector follows from another: a logit scale and a soft cap keep the order."""
    if before.shape != after.shape:
        return None
    if torch.equal(before, after.to(before.device)):
        return "unchanged"
    after = after.to(before.device)
    scale = (before @ after) / (before @ before)
    if scale > 0 and relative_error(before * scale, after) <= tolerance:
        return "scaled"
    ordered = after[before.argsort()]
    return "capped" if bool((ordered.diff() >= 0).all()) else None


def _rows_error(module: nn.Module, seen: dict[str, Tensor]) -> float | None:
    """How far the weight's rows are from giving the module's output; None where it is packed."""
    weight = plain_weight(module)
    if weight is None:
        return None
    if weight.shape != (len(seen["out"]), len(seen["in"])):
        return float("inf")
    again = weight.float() @ seen["in"].to(weight.device)
    bias = getattr(module, "bias", None)
    again = again if bias is None else again + bias.float()
    return relative_error(again, seen["out"].to(again.device))
