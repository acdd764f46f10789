"""From trials' results to rankings, and to the card that goes with them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lm_eval_locos import __version__
from lm_eval_locos.architecture import Head, base_model
from lm_eval_locos.detection.generate import TrialResult
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.ranking_stats import intervals, stability

POOLED = frozenset({"locos", "dla", "attention_spatial", "cri"})
"""Methods whose score of a trial is a mean over answer steps: equation 4 pools the steps."""
UNFILTERED = frozenset({"headkv"})
"""Methods that score every trial, whether it passes or not."""
_DIGITS = 7  # float32 computations: more would be noise, and twice the file


def versions() -> dict[str, str]:
    """The versions of what results depend on."""
    names = ("torch", "transformers", "tokenizers")
    return {name: importlib.metadata.version(name) for name in names}


def provenance(model: nn.Module, revision: str | None, peft: str | None) -> dict[str, str | None]:
    """``revision`` and ``peft`` for the record.

    Args:
        model: that was loaded.
        revision: that was asked for. The commit of the model's config stands in its place where
            there is one, and ``revision_requested`` beside it where that is another text.
        peft: where the adapter is from; default the names and kinds of the model's adapters,
            whether PEFT wraps it or they are loaded into it.
    """
    commit = getattr(base_model(model).config, "_commit_hash", None)
    found = {"revision": commit or revision}
    if commit and revision and commit != revision:
        found["revision_requested"] = revision
    wrapped = hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)
    configs = getattr(model, "peft_config", None) if wrapped else None
    kinds = {name: one.peft_type for name, one in (configs or {}).items()}
    named = ", ".join(f"{name} ({getattr(kind, 'value', kind)})" for name, kind in kinds.items())
    return {**found, "peft": peft or named or None}


def ranking(
    method: str,
    layers: Sequence[int],
    ids: Sequence[str],
    results: Sequence[TrialResult],
    meta: Mapping[str, Any],
) -> HeadRanking:
    """One method's ranking, with bootstrap intervals.

    Args:
        method: its name.
        layers: the decoder layers that the rows of the scores belong to.
        ids: of the trials.
        results: of the trials.
        meta: what all rankings of the run record.
    """
    rows = [(i, r) for i, r in zip(ids, results, strict=True) if method in r.scores]
    passed = sum(result.passed for result in results)
    scores: dict[Head, tuple[float, ...]] = {}
    if rows:
        table = torch.stack([result.scores[method] for _, result in rows], -1).tolist()
        for layer, heads in zip(layers, table, strict=True):
            for head, values in enumerate(heads):
                scores[Head(layer, head)] = tuple(float(f"{x:.{_DIGITS}g}") for x in values)
    steps = tuple(len(result.steps) for _, result in rows) if method in POOLED else None
    made = HeadRanking(
        scores=scores,
        meta={
            "method": method,
            **meta,
            "num_trials_total": len(results),
            "num_trials_passed": passed,
            "pass_rate": round(passed / len(results), 4),
            "num_trials_scored": len(rows),
            **({"pooled_ans_steps": sum(steps)} if steps else {}),
        },
        trial_ids=tuple(name for name, _ in rows),
        answer_steps=steps,
    )
    found = intervals(made) or {}
    rounded = {h: (float(f"{a:.6g}"), float(f"{b:.6g}")) for h, (a, b) in found.items()}
    return replace(made, confidence_intervals=rounded)


_UNITS = {
    "locos": "logits",
    "dla": "logits",
    "cri": "nats",
    "attention_spatial": "attention",
    "wu": "share of the needle's tokens",
    "contrastive": "overlap of the top 10",
    "headkv": "attention",
}
_PAPER = (
    "Aryo Pradipta Gema, Beatrice Alex, Pasquale Minervini: LOCOS (Logit-Contribution Scoring), "
    "arXiv:2607.01002"
)


def card(rankings: Mapping[str, HeadRanking], *, top: int = 10) -> str:
    """The Markdown card of one run's rankings: model, data, pass rate, top heads, how to cite."""
    meta = next(iter(rankings.values())).meta
    fingerprint = meta["fingerprint"]
    guess = guessing(meta)
    lines = [
        f"# Head rankings of {meta['model']}",
        "",
        "| | |",
        "|---|---|",
        f"| model | {_model(meta)} |",
        f"| attention | {_layers(rankings, fingerprint)} x {fingerprint['num_heads']} heads "
        f"({fingerprint['num_kv_heads']} key/value heads), {fingerprint['architecture']} |",
        f"| data | {_data(meta)} |",
        f"| split | {meta['split']} |",
        f"| trials | {meta['num_trials_total']}, of which {meta['num_trials_passed']} passed "
        f"(pass rate {meta['pass_rate']:.2f}) |",
        *([f"| guessing | {guess} |"] if guess else []),
        f"| seed, chat template | {meta['seed']}, {'yes' if meta['chat_template'] else 'no'} |",
        f"| made with | lm-eval-locos {meta['plugin_version']}, "
        f"{', '.join(f'{name} {version}' for name, version in meta['versions'].items())} |",
        "",
        "A trial passes when the model answers it (ROUGE-1 recall above 0.5, and the answer is in "
        "the generation). Only trials that pass are scored, except for headkv.",
        "",
        f"| method | unit | top heads (layer-head), highest first | stability of the top {top} |",
        "|---|---|---|---|",
    ]
    for method, found in rankings.items():
        lines.append(
            f"| {method} | {_UNITS.get(method, 'score')} | {listed(found, top)} | "
            f"{_stability(found, top)} |"
        )
    lines += [
        "",
        f"Stability: the share of the top {top}, or of as many heads as are listed, that stays "
        "when trials are drawn again with replacement (mean of 1,000 draws). Heads that tie at "
        "zero have no order and are not listed.",
        "",
    ]
    if meta["data"].get("source") == "bundled":
        lines += [
            "The trials are of the sample bundled with lm-eval-locos: text of its own in the form "
            "of NoLiMa, **not the benchmark**.",
            "",
        ]
    lines += [
        "Use: `lm_eval --model locos-ablated --model_args pretrained=MODEL,heads=FILE.json,"
        "num_heads=K --tasks nolima,musique`. Whether these heads are specific to retrieval is "
        "what an evaluation with controls shows; a ranking alone does not.",
        "",
        f"To cite: {_PAPER}; and lm-eval-locos {__version__} with the sha256 of the file.",
        "",
    ]
    return "\n".join(lines)


def leading(ranking: HeadRanking, top: int = 10) -> tuple[Head, ...]:
    """The first ``top`` heads, or the fewer ones before several that tie at zero.

    Ties at zero are most often heads that no trial gave anything; the order of their numbers, which
    `HeadRanking.order` falls back to, says nothing about them.
    """
    scores = ranking.pooled.values()
    k = min(top, len(ranking.order))
    if sum(score == 0 for score in scores) > 1:
        k = min(k, sum(score > 0 for score in scores))
    return ranking.top(k)


def listed(ranking: HeadRanking, top: int = 10) -> str:
    """`leading` as text, which says where it ends early."""
    heads = leading(ranking, top)
    names = ", ".join(map(str, heads))
    if len(heads) == min(top, len(ranking.order)):
        return names
    scored = any(ranking.pooled[head] for head in ranking.order[len(heads) :])
    rest = f"no {'other ' if heads else ''}head {'is above zero' if scored else 'scored'}"
    return f"{names} ({rest})" if heads else rest


def _stability(ranking: HeadRanking, top: int) -> str:
    k = len(leading(ranking, top))
    if not k:
        return "none"
    steady = stability(ranking, k)
    size = f" (of {k})" if k != top else ""
    return "one trial" if steady is None else f"{steady.mean:.2f}{size}"


def guessing(meta: Mapping[str, Any]) -> str | None:
    """What guessing would pass, where it is known how many names the planted sentences hold."""
    names = meta["data"].get("candidates")
    if not names:
        return None
    return f"among the {names} names in the planted sentences would pass about 1/{names} of trials"


def near_guessing(meta: Mapping[str, Any]) -> bool:
    """Whether the pass rate is below twice what `guessing` would pass."""
    names = meta["data"].get("candidates")
    return bool(names) and meta["pass_rate"] < 2 / names


def _model(meta: Mapping[str, Any]) -> str:
    revision = meta["revision"] or "none"
    if meta.get("revision_requested"):
        revision += f" (asked for as {meta['revision_requested']})"
    adapter = f" with adapter {meta['peft']}" if meta.get("peft") else ""
    return f"{meta['model']}{adapter}, revision {revision}, {meta['dtype']}"


def _layers(rankings: Mapping[str, HeadRanking], fingerprint: Mapping[str, Any]) -> str:
    total = fingerprint["num_layers"]
    scored = len({head.layer for ranking in rankings.values() for head in ranking.scores})
    return f"{total} layers" if scored in (0, total) else f"{scored} of {total} layers"


def _data(meta: Mapping[str, Any]) -> str:
    data = meta["data"]
    parts = [str(meta["dataset"]), f"source {data['source']}"]
    parts += [f"{key} {data[key]}" for key in ("needle_set", "revision") if data.get(key)]
    if data.get("lengths"):
        parts.append(f"lengths {', '.join(f'{n:g}' for n in data['lengths'])} tokens")
    if data.get("depths"):
        parts.append(f"depths {', '.join(f'{n:g}' for n in data['depths'])} %")
    if data["source"] == "file" and not data.get("lengths"):
        parts.append("contexts as long as they are in the file")
    return ", ".join(parts)
