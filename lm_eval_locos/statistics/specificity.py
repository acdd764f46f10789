"""Retrieval specificity of one condition against the baseline, with everything that qualifies it.

    >>> right, wrong = [1] * 50, [0] * 50
    >>> result = specificity({
    ...     "nolima": FamilyScores(right, [1, 0, 0, 0, 0] * 10),
    ...     "recall": FamilyScores(right, [1] * 49 + [0], side="control"),
    ... })
    >>> round(result.specificity.value, 3)       # 0.8 of retrieval lost, 0.02 of recall
    0.78
    >>> result.controls.held                     # 50 documents do not show a drop below 0.05
    False

For family f with mean score R_f: drop_f = (R_f(baseline) - R_f(condition)) / R_f(baseline), on the
same documents; retrieval_drop and control_drop are means over the families of a side; specificity
is their difference (the functional dissociation score of LOCOS, arXiv 2607.01002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from lm_eval_locos.errors import DataError
from lm_eval_locos.statistics.bootstrap import RESAMPLES, Kind, Sample
from lm_eval_locos.statistics.estimates import Estimate, estimate
from lm_eval_locos.statistics.families import GAIN, LOSS, FamilyScores, Side
from lm_eval_locos.statistics.hypotheses import holm, mcnemar, permutation_p
from lm_eval_locos.statistics.results import (
    CEILING,
    FLOOR,
    OK,
    Controls,
    FamilyResult,
    RandomControl,
    SpecificityResult,
)

MARGIN = 0.05


def specificity(
    families: Mapping[str, FamilyScores],
    *,
    random: Sequence[Mapping[str, ArrayLike]] = (),
    margin: float = MARGIN,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
    power: float = 0.8,
) -> SpecificityResult:
    """All statistics of one condition.

    Families are independent samples: each one's clusters are resampled by a stream of its own,
    which depends on the seed and the family's name only, so that conditions are compared on the
    same resamples.

    Args:
        families: scores by family name, of either side.
        random: conditions that ablate random heads; for each the scores (n,) of every family, on
            the same documents.
        margin: largest control drop that still counts as "held".
        resamples: of the bootstrap.
        seed: of the bootstrap.
        level: confidence of the intervals; the controls' is always 0.90, whose upper end is a
            one-sided bound at 0.05.
        power: for the minimum detectable effects.

    Raises:
        DataError: no families; a random condition that lacks a family or has other documents; a
            setting out of range.
    """
    _check(families, margin, resamples, level, power)
    samples = {
        name: Sample.of(scores, name, resamples=resamples, seed=seed)
        for name, scores in families.items()
    }
    results = {
        name: _family(scores, samples[name], level, power) for name, scores in families.items()
    }
    adjusted = holm({name: result.p for name, result in results.items()})
    results = {name: replace(result, p_holm=adjusted[name]) for name, result in results.items()}
    defined = {name for name, result in results.items() if result.status != FLOOR}
    weights = {side: _weights(families, defined, side) for side in ("retrieval", "control")}
    everything = {
        side: _weights(families, set(families), side) for side in ("retrieval", "control")
    }

    def over(kind: Kind, *sides: Side, **options: object) -> Estimate:
        chosen = weights if kind == "drop" else everything
        return _over(samples, results, {s: chosen[s] for s in sides}, kind, level, power, **options)

    value = over("drop", "retrieval", "control")
    return SpecificityResult(
        families=results,
        retrieval_drop=over("drop", "retrieval"),
        control_drop=over("drop", "control"),
        specificity=value,
        retrieval_difference=over("difference", "retrieval"),
        control_difference=over("difference", "control"),
        specificity_difference=over("difference", "retrieval", "control"),
        controls=_controls(samples, results, weights["control"], margin, power),
        random=_random(families, weights, random, value.value),
        resamples=resamples,
        seed=seed,
        level=level,
        power=power,
    )


def _check(
    families: Mapping[str, FamilyScores], margin: float, resamples: int, level: float, power: float
) -> None:
    if not families:
        raise DataError("families: none given. Expected at least one name with its FamilyScores.")
    if resamples < 100:
        raise DataError(f"resamples={resamples}: expected at least 100, 10000 for a report.")
    for name, found in (("margin", margin), ("level", level), ("power", power)):
        if not 0 < found < 1:
            raise DataError(f"{name}={found}: expected a number between 0 and 1.")


def _weights(
    families: Mapping[str, FamilyScores], usable: set[str], side: Side
) -> dict[str, float]:
    names = [name for name, scores in families.items() if scores.side == side and name in usable]
    return dict.fromkeys(names, 1 / len(names)) if names else {}


def _family(scores: FamilyScores, sample: Sample, level: float, power: float) -> FamilyResult:
    def one(kind: Kind) -> Estimate:
        return estimate([sample], [1.0], kind, level=level, power=power)

    baseline = one("baseline")
    bound = baseline.value if baseline.interval is None else baseline.interval.low
    status = CEILING if scores.at_ceiling else OK
    drop = None
    if bound <= scores.floor:
        status = FLOOR
        what = "mean" if baseline.interval is None else f"{level:.0%} lower bound"
        drop = Estimate(
            None,
            documents=sample.documents,
            power=power,
            reason=f"{FLOOR}: the baseline's {what} {bound:.3g} is not above {scores.floor:g}.",
        )
    fell, rose = sample.table[:, LOSS], sample.table[:, GAIN]
    change = scores.baseline - scores.condition
    p = test = None
    if scores.binary:
        net = fell - rose
        p = mcnemar(int((net > 0).sum()), int((net < 0).sum()))
        test = "mcnemar" if sample.clusters == sample.documents else "sign test over clusters"
    return FamilyResult(
        side=scores.side,
        status=status,
        documents=sample.documents,
        clusters=sample.clusters,
        binary=scores.binary,
        floor=float(scores.floor),
        ceiling=float(scores.ceiling),
        baseline=baseline,
        condition=one("condition"),
        drop=drop or one("drop"),
        difference=one("difference"),
        lost=int((change > 0).sum()),
        gained=int((change < 0).sum()),
        p=p,
        test=test,
    )


def _over(
    samples: Mapping[str, Sample],
    results: Mapping[str, FamilyResult],
    sides: Mapping[Side, Mapping[str, float]],
    kind: Kind,
    level: float,
    power: float,
    cautious: bool = False,
) -> Estimate:
    """The first side's mean, less the second's where there is one."""
    left_out = _left_out(results, *sides) if kind == "drop" else ""
    if not all(sides.values()):
        why = "a side has no family" + (" whose drop is defined" if left_out else "")
        return Estimate(None, power=power, reason=" ".join(filter(None, (why + ".", left_out))))
    first, *others = sides.values()
    weights = {**first, **{name: -weight for other in others for name, weight in other.items()}}
    return estimate(
        [samples[name] for name in weights],
        list(weights.values()),
        kind,
        level=level,
        power=power,
        reason=left_out or None,
        cautious=cautious,
    )


def _left_out(results: Mapping[str, FamilyResult], *sides: Side) -> str:
    names = [n for n, r in results.items() if r.status == FLOOR and r.side in sides]
    return f"Left out, {FLOOR}: {', '.join(names)}." if names else ""


def _controls(
    samples: Mapping[str, Sample],
    results: Mapping[str, FamilyResult],
    weights: Mapping[str, float],
    margin: float,
    power: float,
) -> Controls:
    found = _over(samples, results, {"control": weights}, "drop", 0.90, power, cautious=True)
    left_out = _left_out(results, "control")
    held = found.interval is not None and not left_out and found.interval.high < margin
    if left_out:
        reason = left_out + " A control at its floor cannot be shown to hold."
    elif found.interval is None:
        reason = found.reason
    elif held:
        reason = None
    else:
        reason = (
            f"the 90% interval's upper end {found.interval.high:.3g} is not below {margin:g}; "
            f"with power {power:g} this sample shows no drop only up to {found.detectable:.3g}."
        )
    return Controls(held, margin, replace(found, reason=left_out or None), reason)


def _random(
    families: Mapping[str, FamilyScores],
    weights: Mapping[Side, Mapping[str, float]],
    random: Sequence[Mapping[str, ArrayLike]],
    value: float | None,
) -> RandomControl | None:
    """Specificity of each random condition over the same families, and the p-value."""
    if not random:
        return None
    found = []
    for number, condition in enumerate(random):
        checked = {}
        for name, scores in families.items():
            if name not in condition:
                raise DataError(
                    f"random[{number}]: no scores of {name}. Every random condition needs all of: "
                    f"{', '.join(families)}."
                )
            checked[name] = scores.checked(condition[name], f"random[{number}][{name}]")
            if len(checked[name]) != len(scores.baseline):
                raise DataError(
                    f"random[{number}][{name}]: {len(checked[name])} scores for "
                    f"{len(scores.baseline)} documents. Expected the baseline's documents."
                )
        if value is None:
            continue
        drops = {
            name: float((families[name].baseline - checked[name]).sum())
            / float(families[name].baseline.sum())
            for side in weights.values()
            for name in side
        }
        sides = [sum(w * drops[name] for name, w in side.items()) for side in weights.values()]
        found.append(sides[0] - sides[1])
    if value is None:
        return RandomControl(len(random), None, None, ())
    return RandomControl(
        len(random), float(np.mean(found)), permutation_p(value, found), tuple(found)
    )
