"""Tests and sizes: exact McNemar, Holm, the random control's p-value, what a sample can detect."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from scipy import stats

from lm_eval_locos.errors import DataError

Key = TypeVar("Key", bound=Hashable)


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact McNemar test: are losses and gains equally likely? 1 without any.

    The binomial test of `lost` among `lost + gained` at 1/2 (McNemar 1947, exact form). With one
    entry a cluster instead of a document (clusters whose score fell, clusters whose score rose) it
    is the sign test over clusters, which stays exact when documents of a cluster are alike.
    """
    changed = lost + gained
    return float(stats.binomtest(lost, changed).pvalue) if changed else 1.0


def holm(pvalues: Mapping[Key, float | None]) -> dict[Key, float | None]:
    """Holm's step-down adjustment over every entry (Holm 1979); None stays None, uncounted.

    Keys are free: ``{(k, family): p}`` corrects over all k and families at once.

    Raises:
        DataError: a p-value outside [0, 1].
    """
    for key, p in pvalues.items():
        if p is not None and not 0 <= p <= 1:
            raise DataError(f"p-value of {key!r}: {p}. Expected a number in [0, 1], or None.")
    known = sorted((p, i, key) for i, (key, p) in enumerate(pvalues.items()) if p is not None)
    adjusted: dict[Key, float | None] = dict.fromkeys(pvalues)
    highest = 0.0
    for place, (p, _, key) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - place) * p))
        adjusted[key] = highest
    return adjusted


def permutation_p(value: float, random: Sequence[float]) -> float:
    """(1 + #{random >= value}) / (1 + seeds); values within rounding of each other are equal."""
    return (1 + sum(r >= value - 1e-12 for r in random)) / (1 + len(random))


def detectable_effect(standard_error: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """The true effect that an interval of this level excludes 0 for with this power.

    (z[1 - alpha/2] + z[power]) times the standard error, alpha = 1 - level.
    """
    return float(stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(power)) * standard_error


_MOST_DOCUMENTS = 1e18


def documents_needed(
    documents: int,
    standard_error: float,
    effect: float,
    *,
    level: float = 0.95,
    power: float = 0.8,
    constant: bool = False,
) -> int:
    """Documents for which `detectable_effect` comes down to `effect`: it falls with 1 / sqrt(n).

    Of a sample in which nothing varied it falls with 1 / n: so do the ends of a score interval
    without changes, z^2 / (n + z^2), and the documents that show a loss of `effect` where nothing
    else changes, of which a handful must be lost.

    Args:
        documents: n of the sample that the standard error is of; more documents are taken to come
            in clusters of the same sizes, and, of several families, in the same shares.
        standard_error: of the estimate at n.
        effect: in the estimate's units, not 0.
        level: two-sided confidence.
        power: with which the effect is to be found.
        constant: nothing varied.

    Returns:
        At least 1; at most a billion billion, for an effect that nobody will find.

    Raises:
        DataError: an effect of 0.
    """
    if not effect:
        raise DataError("effect=0: no number of documents detects it. Give, for example, 0.05.")
    ratio = detectable_effect(standard_error, level=level, power=power) / abs(effect)
    # Of an effect near the smallest number the square is infinite, and no integer.
    times = ratio if constant else ratio * ratio
    return max(1, math.ceil(min(documents * times, _MOST_DOCUMENTS) - 1e-9))
