"""What `specificity` returns: plain frozen records, and their form for JSON."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from lm_eval_locos.statistics.estimates import Estimate
from lm_eval_locos.statistics.families import Side
from lm_eval_locos.statistics.hypotheses import holm

OK = "ok"
FLOOR = "undefined (floor)"
CEILING = "ceiling"


@dataclass(frozen=True)
class FamilyResult:
    """One family under one condition.

    Attributes:
        side: "retrieval" or "control".
        status: "ok"; "undefined (floor)", where the lower end of the baseline's interval is at or
            below the floor and the drop has no value; "ceiling", where the baseline has the
            highest score on every document, so that only losses can be seen.
        documents: number of documents.
        clusters: number of clusters.
        binary: whether every score is 0 or the ceiling.
        floor: score that needs no ability.
        ceiling: highest possible score.
        baseline: mean score.
        condition: mean score.
        drop: (baseline - condition) / baseline.
        difference: baseline - condition.
        lost: documents whose score fell.
        gained: documents whose score rose.
        p: exact two-sided p-value of a binary family, else None.
        test: "mcnemar", or "sign test over clusters" where documents share clusters.
        p_holm: `p` adjusted over the families, or over whatever `holm_across` was given.
    """

    side: Side
    status: str
    documents: int
    clusters: int
    binary: bool
    floor: float
    ceiling: float
    baseline: Estimate
    condition: Estimate
    drop: Estimate
    difference: Estimate
    lost: int
    gained: int
    p: float | None = None
    test: str | None = None
    p_holm: float | None = None


@dataclass(frozen=True)
class Controls:
    """The claim that the controls held.

    Attributes:
        held: the upper end of `drop`'s interval is below the margin, and no control is undefined.
        margin: largest drop that counts as held.
        drop: control drop with its 90% interval.
        reason: why they did not, else None.
    """

    held: bool
    margin: float
    drop: Estimate
    reason: str | None = None


@dataclass(frozen=True)
class RandomControl:
    """Conditions that ablate random heads.

    Attributes:
        seeds: number of conditions.
        specificity: mean over them; None where the condition's own is not defined.
        p: (1 + #{random >= the condition's}) / (1 + seeds), or None.
        values: specificity of each.
    """

    seeds: int
    specificity: float | None
    p: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class SpecificityResult:
    """All statistics of one condition.

    Attributes:
        families: by name.
        retrieval_drop: mean of `drop` over the retrieval families that have one.
        control_drop: the same of the control families.
        specificity: retrieval_drop - control_drop.
        retrieval_difference: mean absolute difference over all retrieval families.
        control_difference: the same of the control families.
        specificity_difference: retrieval_difference - control_difference.
        controls: whether the controls held.
        random: the random control, or None where none was given.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        level: of the intervals.
        power: of the minimum detectable effects.
    """

    families: Mapping[str, FamilyResult]
    retrieval_drop: Estimate
    control_drop: Estimate
    specificity: Estimate
    retrieval_difference: Estimate
    control_difference: Estimate
    specificity_difference: Estimate
    controls: Controls
    random: RandomControl | None
    resamples: int
    seed: int
    level: float
    power: float

    @property
    def controls_held(self) -> bool:
        """Whether the controls held."""
        return self.controls.held

    @property
    def random_specificity(self) -> float | None:
        """Mean specificity of the random conditions."""
        return self.random.specificity if self.random else None

    @property
    def p_random(self) -> float | None:
        """Permutation p-value of the random control."""
        return self.random.p if self.random else None

    def as_dict(self) -> dict[str, Any]:
        """Nested dicts and lists for JSON; every number is finite, or None."""
        return _plain(self) | {
            "controls_held": self.controls_held,
            "random_specificity": self.random_specificity,
            "p_random": self.p_random,
        }


def holm_across(
    results: Mapping[Hashable, SpecificityResult],
) -> dict[Hashable, SpecificityResult]:
    """The results with `p_holm` adjusted over all of them and all of their families.

    Args:
        results: by condition, for example by k.
    """
    adjusted = holm(
        {
            (key, name): family.p
            for key, result in results.items()
            for name, family in result.families.items()
        }
    )
    return {
        key: replace(
            result,
            families={
                name: replace(family, p_holm=adjusted[key, name])
                for name, family in result.families.items()
            },
        )
        for key, result in results.items()
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
