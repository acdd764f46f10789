"""Checks of scoring: that what is captured is the attention, and that scores follow from it.

A ModelError in here says that the model cannot be scored, which is no fault of its description.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_eval_locos.architecture import Architecture, AttentionLayer, Head, plain_weight
from lm_eval_locos.detection import prefix
from lm_eval_locos.detection import scores as engine
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.captured import LayerCapture
from lm_eval_locos.detection.reader import Reader
from lm_eval_locos.detection.steps import Generation, Stopping
from lm_eval_locos.doctor.reference import explicit_scores, output_weight, visible
from lm_eval_locos.doctor.subject import STEPS, Finding, Subject, relative_error
from lm_eval_locos.errors import ModelError

_EXPLAINED = 10  # times as far as outputs differ, scores may: they are differences of terms
_METHODS = ("locos", "attention_spatial")


def visible_keys(subject: Subject) -> Finding:
    """An eager run attends where the description says a layer sees, and to all of it."""
    for index, run in subject.eager.items():
        layer = subject.architecture.layers[index]
        attended = (run.attention > 0).any(0)  # (R, L)
        seen = [visible(layer.kind, layer.window, row) for row in subject.rows]
        outside = attended.clone()
        for step, positions in enumerate(seen):
            outside[step, positions.start : positions.stop] = False
        if outside.any():
            step, position = outside.nonzero()[0].tolist()
            return False, (
                f"layer {index} ({_reach(layer)}): the query at {subject.rows[step]} attends to "
                f"{position}, and should see {seen[step].start} to {seen[step].stop - 1} only"
            )
        # A single weight may be too small for the dtype; those of all steps and heads are not.
        if not any(attended[step, positions.start] for step, positions in enumerate(seen)):
            first = int(attended[0].nonzero()[0, 0])
            return False, (
                f"layer {index} ({_reach(layer)}): the query at {subject.rows[0]} should see from "
                f"{seen[0].start} on, and attends from {first} on"
            )
    return True, f"every layer attends to what it should see; {_crossed(subject)}"


def _reach(layer: AttentionLayer) -> str:
    return layer.kind if layer.window is None else f"{layer.kind}, {layer.window} keys"


def _crossed(subject: Subject) -> str:
    found = {layer.window for layer in subject.architecture.layers.values()}
    windows = sorted(window for window in found if window is not None)
    tokens = subject.length + STEPS - 1
    told = [
        f"the window of {window} was {'' if window < tokens else 'NOT '}crossed"
        for window in windows
    ]
    return f"{', '.join(told) or 'no layer has a window'} ({tokens} tokens)"


def pieces(subject: Subject) -> Finding:
    """A padded batch that is fed piece by piece through a cache gives each prompt's own logits.

    So detection feeds it. The first piece is padding only for the shorter prompt.
    """
    rows, batch = subject.padded(subject.length // 2)
    size = subject.length // 3
    cache = prefix.empty(subject.model, subject.architecture)
    for start in range(0, subject.length, size):
        part = slice(start, start + size)
        logits = prefix.forward(
            subject.model,
            cache,
            input_ids=batch["input_ids"][:, part],
            attention_mask=batch["attention_mask"][:, : part.stop],
            position_ids=batch["position_ids"][:, part],
            logits_to_keep=1,
        ).logits[:, -1]
    error = max(map(relative_error, logits, subject.alone(rows)))
    return error <= subject.tolerance, (
        f"a batch of {len(rows[0])} and {len(rows[1])} tokens, fed {size} at a time through a "
        f"cache, gives the logits of each alone: relative error {error:.1e} (at most "
        f"{subject.tolerance:g})"
    )


def scaling(subject: Subject) -> Finding:
    """Scaling, soft cap and sinks are what the attention was called with."""
    for index, layer, kept in _captured(subject):
        sinks = kept.sinks is not None
        for name, described, called in (
            ("scaling", layer.scaling, kept.scaling),
            ("soft cap", layer.softcap or 0.0, kept.softcap or 0.0),
            ("sinks", layer.sinks, sinks),
        ):
            if not math.isclose(described, called, rel_tol=1e-6):
                return False, (
                    f"layer {index}: {name} {described:g} in the description, {called:g} in the "
                    "attention's call"
                )
    return True, "scaling, soft cap and sinks of every layer are what its attention is called with"


def _captured(subject: Subject) -> list[tuple[int, AttentionLayer, LayerCapture]]:
    captured = subject.recording.capture.layers
    found = [(i, layer, captured[i]) for i, layer in subject.architecture.layers.items()]
    for index, layer, kept in found:
        if not kept.columns:
            raise ModelError(
                f"the attention of layer {index}, a {type(layer.attention).__name__}, calls "
                "neither transformers' attention interface nor torch's kernel. Heads can be "
                "ablated but not scored."
            )
    return found


def attention(subject: Subject) -> Finding:
    """The captured output is the output module's input, and the softmax gives it again."""
    slices = subject.architecture.output_slices
    exact, worst, far = True, 0.0, 0
    for index, _, kept in _captured(subject):
        z = slices.split(subject.recording.inputs[index]).transpose(0, 1)  # (H, R, size)
        output = kept.outputs()[0].cpu()
        if output.shape != z.shape:
            return False, (
                f"layer {index}: heads and their outputs are {tuple(output.shape)} in the "
                f"attention and {tuple(z.shape)} at the output module"
            )
        exact = exact and torch.equal(output, z)
        error = max(relative_error(output, z), relative_error(_again(kept), z))
        if not error <= worst:
            worst, far = error, index
    told = "bit-equal to" if exact else "within the tolerance of"
    # Eager attention, the only one with a soft cap or sinks, rounds its logits to the dtype.
    rounded = subject.coarse and subject.architecture.kernel == "eager"
    most = subject.tolerance if rounded else subject.tight
    what = f"relative error {worst:.1e} in layer {far} (at most {most:g})"
    if worst > most and rounded:
        return None, f"eager attention rounds coarsely: {what}; use --dtype float32 to compare"
    if not worst <= most:
        return False, f"softmax of the captured queries and keys is not the heads' output: {what}"
    return True, (
        f"captured outputs are {told} the output modules' inputs; softmax of queries and keys "
        f"gives them again: {what}"
    )


def _again(kept: LayerCapture) -> Tensor:
    """The heads' outputs from captured queries, keys and values: (H, R, size), float64."""
    query = kept.queries()[0].cpu().double()
    keys, values, first = kept.keys_values()
    groups = len(query) // keys.shape[1]
    keys, values = (x[0].cpu().double().repeat_interleave(groups, 0) for x in (keys, values))
    logits = kept.scaling * query @ keys.mT
    if kept.softcap is not None:
        logits = kept.softcap * torch.tanh(logits / kept.softcap)
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool)
    for row, column in enumerate(kept.columns):
        seen = visible(kept.kind, kept.window, column)
        hidden[row, max(0, seen.start - first) : max(0, seen.stop - first)] = False
    logits = logits.masked_fill(hidden, -torch.inf)
    if kept.sinks is not None:
        sinks = kept.sinks.cpu().double()[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, sinks], -1)
    read = logits.softmax(-1)[..., : keys.shape[1]] @ values
    gates = kept.gates()
    return read if gates is None else read * gates[0].cpu().double()


def queries(subject: Subject) -> Finding:
    """Ablating a head's query changes its captured query, and no other query, key or value."""
    _captured(subject)
    for layer in subject.layers:
        head = Head(layer, subject.heads[-1].head)
        plain = subject.recording.capture.layers[layer]
        ablated = subject.record({head: subject.constant(head, "query")}).capture.layers[layer]
        same = [
            subject.same(ablated.queries()[:, other].cpu(), plain.queries()[:, other].cpu())
            for other in range(subject.architecture.num_heads)
        ]
        if same.pop(head.head):
            return False, f"ablating the query of head {head} does not change it"
        if not all(same):
            return False, f"ablating the query of head {head} changes that of another head"
        pairs = zip(ablated.keys_values()[:2], plain.keys_values()[:2], strict=True)
        for name, (got, before) in zip(("key", "value"), pairs, strict=True):
            if not subject.same(got.cpu(), before.cpu()):
                return False, f"ablating the query of head {head} changes a {name} of its layer"
    return True, "ablating a query changes the captured query of that head, and no key or value"


def scores(subject: Subject) -> Finding:
    """The engine's scores are those of attention matrices and sums written out.

    Eager attention rounds its logits to the dtype: a logit of 50 is off by an eighth in bfloat16,
    and so is the weight. Where that explains the scores' difference, nothing is said.
    """
    architecture, ids = subject.architecture, subject.ids
    rows = _unembedding(architecture)[ids[subject.length :]]
    got = _engine_scores(subject, rows.float())
    errors = dict.fromkeys(_METHODS, 0.0)
    for number, (index, run) in enumerate(subject.eager.items()):
        layer = architecture.layers[index]
        weight = output_weight(layer.output, architecture.output_slices.width)
        seen = [visible(layer.kind, layer.window, row) for row in subject.rows]
        u = rows.to("cpu", torch.float64)
        expected = explicit_scores(run, weight, u, seen, subject.needle)
        for method, (score, size) in expected.items():
            difference = float((got[method][number] - score).abs().max())
            error = difference / size if size else difference
            errors[method] = error if not error <= errors[method] else errors[method]
    told = ", ".join(f"{method} {error:.1e}" for method, error in errors.items())
    worst = max(errors.values())
    passed = worst <= subject.tolerance
    if not passed and subject.coarse and worst <= _EXPLAINED * (rounding := _rounding(subject)):
        return None, (
            f"eager attention rounds so coarsely that the heads' outputs differ by {rounding:.1e} "
            f"and the scores by {told}; with --dtype float32 they can be compared"
        )
    return passed, (
        f"all {len(architecture.heads)} heads against an eager run, relative to the terms summed: "
        f"error {told} (at most {subject.tolerance:g})"
    )


def _rounding(subject: Subject) -> float:
    """How far the heads' outputs of the eager run are from the captured run's, in the same rows."""
    slices = subject.architecture.output_slices
    errors = []
    for index, run in subject.eager.items():
        z = slices.split(subject.recording.inputs[index][-STEPS:]).transpose(0, 1)
        groups = len(run.attention) // len(run.values)
        eager = run.attention @ run.values.repeat_interleave(groups, 0)
        eager = eager if run.gates is None else eager * run.gates
        errors.append(relative_error(eager, z))
    return max(errors)


def _unembedding(architecture: Architecture) -> Tensor:
    weight = plain_weight(architecture.unembedding)
    if weight is None:
        raise ModelError(
            f"the unembedding is a {type(architecture.unembedding).__name__} without plain "
            "weights: heads can be ablated but not scored by LOCOS."
        )
    return weight


def _engine_scores(subject: Subject, rows: Tensor) -> dict[str, Tensor]:
    """What detection makes of the captured run, (layers, heads) for each method."""
    prompt, following = subject.ids[: subject.length], subject.ids[subject.length :]
    generation = Generation(Stopping(subject.tokenizer, ()), thinking=False)
    generation.ids = following
    trial = Trial(tuple(prompt), subject.needle, gold="")
    reader = Reader(trial, generation, range(STEPS), _METHODS, row=0, width=len(prompt))
    for _, layer, kept in _captured(subject):
        effect = engine.direct_effect(layer.output, rows)
        reader.read(kept, kept.queries(), kept.outputs(), kept.gates(), kept.keys_values(), effect)
    return reader.scores()
