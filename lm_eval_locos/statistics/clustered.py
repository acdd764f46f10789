"""Intervals of one family whose documents share few clusters (needles, stories).

    >>> from lm_eval_locos.statistics import FamilyScores
    >>> lost = [20, 18, 22, 19, 21, 20]                      # of 33 documents of each of 6 needles
    >>> after = [d >= n for n in lost for d in range(33)]
    >>> scores = FamilyScores([1] * 198, after, clusters=[i // 33 for i in range(198)])
    >>> low, high = few_clusters_interval(Sample.of(scores), "drop", level=0.95)
    >>> round(low, 3), round(high, 3)
    (0.537, 0.675)

Six needles can tell how much needles differ, if roughly, where most of them changed: a resample of
six cannot be trusted, but the variance between them can, with Student's t for its few degrees of
freedom. Six needles of which one changed tell nothing of the kind.

Two intervals follow from that variance, and the wider stands. One is value +- t * SE, SE the
jackknife's. It is symmetrical, and few clusters of a small or a large drop are not. The other is
the score interval of the paired table (`paired`) at the sample size that the measured design effect
leaves (Rao and Scott 1992, Biometrics 48:577-585), less (z / t)^2: where t * SE stands for z * SE
there, with a score interval's skewness and ends. Its design effect is at least 1, so that clusters
which happen to be equal give no more than as many independent documents.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from lm_eval_locos.statistics.bootstrap import COLUMNS, Kind, Sample
from lm_eval_locos.statistics.families import N
from lm_eval_locos.statistics.paired import (
    difference_interval,
    exact_upper,
    proportion_interval,
    ratio_interval,
)

ENOUGH = 5.0
"""Net changes, and documents without one, that `few_clusters_interval` asks for, each counted at
the sample size that the design effect leaves: the rule of thumb for a normal approximation. Net,
because a few clusters' losses are no less lopsided for gains elsewhere."""


def score_interval(
    sample: Sample, kind: Kind, share: float, *, level: float
) -> tuple[float, float]:
    """Score interval of one family, its table scaled to `share` of its documents; low may be -inf.

    Args:
        sample: the family.
        kind: which statistic.
        share: documents that count as independent over documents, above 0.
        level: two-sided confidence.
    """
    kept, lost, gained, never = sample.cells(share)
    if kind == "drop":
        low, high = ratio_interval(kept, lost, gained, never, level=level)
        # A drop is at most P(lost | right, baseline). Of a handful of losses and no gains the score
        # interval ends a little too low; this end is exact.
        return low, max(high, exact_upper(max(lost - gained, 0.0), kept + lost, level=level))
    if kind == "difference":
        low, high = difference_interval(kept, lost, gained, never, level=level)
    else:
        right = kept + (lost if kind == "baseline" else gained)
        low, high = proportion_interval(right, kept + lost + gained + never, level=level)
    return sample.scale * low, sample.scale * high


def effective_clusters(sample: Sample, kind: Kind) -> float:
    """Clusters of equal weight that would vary as these: (sum w)^2 / sum w^2 (Kish).

    w is a cluster's part of the statistic's denominator: its documents, or for a drop its baseline
    total. G where they are equal, near 1 where one cluster has nearly all.
    """
    weight = sample.table[:, COLUMNS[kind][1]]
    return float(weight.sum() ** 2 / (weight**2).sum())


def jackknife_error(sample: Sample, kind: Kind) -> float:
    """Standard error by leaving each cluster out: sqrt(sum of influence^2 / (G (G - 1))).

    NaN where the statistic is not defined without one of the clusters.
    """
    influence, count = sample.influence(kind), sample.clusters
    return math.sqrt(float((influence**2).sum()) / (count * (count - 1)))


def few_clusters_interval(
    sample: Sample, kind: Kind, *, level: float
) -> tuple[float, float] | None:
    """The wider of Student's t over clusters and the score interval at the measured design effect.

    Args:
        sample: a family of at least 2 clusters.
        kind: which statistic.
        level: two-sided confidence.

    Returns:
        (low, high), never narrower than the score interval of documents that vary independently;
        None where the clusters do not show how much they vary: every document is its own cluster,
        half of the clusters or more are without a change, or the design effect leaves fewer than
        `ENOUGH` net changes or documents without one.
    """
    if sample.clusters == sample.documents or 2 * sample.varied(kind) <= sample.clusters:
        return None
    error = jackknife_error(sample, kind)
    if not math.isfinite(error):
        return None
    scale = 1.0 if kind == "drop" else sample.scale
    events, others, alone = _independent(sample, kind)
    share = min(1.0, alone * (scale / error) ** 2) if error > 0 else 1.0
    if min(events, others) * share < ENOUGH:
        return None
    freedom = max(effective_clusters(sample, kind) - 1, 1.0)
    quantile = float(stats.t.ppf((1 + level) / 2, freedom))
    z = float(stats.norm.ppf((1 + level) / 2))
    if error > 0:
        share = min(1.0, alone * (scale * z / (error * quantile)) ** 2)
    low, high = score_interval(sample, kind, share, level=level)
    value, half = sample.value(kind), quantile * error
    least = {"drop": -math.inf, "difference": -scale}.get(kind, 0.0)
    return min(low, max(value - half, least)), max(high, min(value + half, scale))


def _independent(sample: Sample, kind: Kind) -> tuple[float, float, float]:
    """(events, the rest, variance) of a statistic whose documents vary independently.

    Events are net changes, and the rest documents right both times (for a difference all without a
    change); for a mean score they are right and wrong. The variance is that of 0/1 scores,
    linearised, in units of the ceiling.
    """
    kept, lost, gained, never = sample.cells(1.0)
    n, net = float(np.sum(sample.table[:, N])), lost - gained
    if kind == "drop":
        drop = sample.value(kind)
        spread = kept * drop**2 + lost * (1 - drop) ** 2 + gained
        return abs(net), kept, spread / (kept + lost) ** 2
    if kind == "difference":
        return abs(net), kept + never, (lost + gained - net**2 / n) / n**2
    right = kept + (lost if kind == "baseline" else gained)
    return right, n - right, right * (n - right) / n**3
