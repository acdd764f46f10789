"""Resampling clusters, and the intervals that follow (BCa, percentile).

A resample draws as many clusters as there are, with replacement; all documents of a drawn cluster
come along, as often as it is drawn. Only the clusters' totals matter, so R resamples of G clusters
are one (R, G) matrix of counts times a (G, columns) table.

Two intervals are made from it. BCa (Efron 1987; Efron and Tibshirani 1993, chapter 14; for several
samples the acceleration as in scipy.stats.bootstrap), and where its bias or acceleration is not
defined the percentile interval. Both are then widened for few clusters in the manner of Hesterberg
2015 ("What Teachers Should Know About the Bootstrap", expanded percentile interval): for the normal
quantile z stands Student's t, because the resamples' spread is itself an estimate, times the square
root by which their variance is too small. That is G / (G - 1), or the jackknife's variance over
theirs where it is more (a ratio, clusters of unequal size). The degrees of freedom are one less
than the effective number of clusters; several families are weighted by their variances (Welch and
Satterthwaite).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lm_eval_locos.statistics.families import (
    BASELINE,
    CONDITION,
    DIFFERENCE,
    GAIN,
    LOSS,
    FamilyScores,
    Floats,
    N,
)

Kind = Literal["drop", "difference", "baseline", "condition"]
COLUMNS: dict[Kind, tuple[int, int]] = {
    "drop": (DIFFERENCE, BASELINE),
    "difference": (DIFFERENCE, N),
    "baseline": (BASELINE, N),
    "condition": (CONDITION, N),
}
"""Numerator and denominator of each statistic."""
RESAMPLES = 10_000
_CELLS = 1 << 22


def draws(clusters: int, resamples: int, seed: int, name: str = "") -> Iterator[NDArray[np.int64]]:
    """Blocks of resamples, (rows, clusters) cluster numbers, `resamples` rows in all.

    The stream depends on seed and name only: a family is resampled in the same way beside whatever
    other families, and under every condition.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    rows = max(1, _CELLS // clusters)
    for start in range(0, resamples, rows):
        yield rng.integers(0, clusters, (min(rows, resamples - start), clusters))


def resampled_totals(table: Floats, blocks: Iterator[NDArray[np.int64]]) -> Floats:
    """(R, columns): the totals of a (G, columns) table in each resample of its rows."""
    clusters, totals = len(table), []
    for block in blocks:
        rows = len(block)
        flat = (block + np.arange(rows)[:, None] * clusters).ravel()
        counts = np.bincount(flat, minlength=rows * clusters).reshape(rows, clusters)
        totals.append(counts @ table)
    return np.concatenate(totals)


@dataclass(frozen=True, eq=False)
class Sample:
    """A family made ready: the table of its clusters and the totals of every resample.

    Attributes:
        table: (G, 6), see `FamilyScores.table`.
        totals: (R, 4), the first four columns in each resample.
        scale: the ceiling, by which a difference or mean is multiplied.
    """

    table: Floats
    totals: Floats
    scale: float = 1.0

    @classmethod
    def of(
        cls, scores: FamilyScores, name: str = "", *, resamples: int = RESAMPLES, seed: int = 0
    ) -> Sample:
        """The sample of a family; `name` and `seed` choose the resamples."""
        table = scores.table
        blocks = draws(len(table), resamples, seed, name)
        return cls(table, resampled_totals(table[:, :LOSS], blocks), scores.ceiling)

    @property
    def clusters(self) -> int:
        """G, the number of clusters."""
        return len(self.table)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return round(float(self.table[:, N].sum()))

    @cached_property
    def effective(self) -> float:
        """Documents that count as independent if clusters are wholly alike: n^2 / sum of sizes^2.

        Kish's design effect at an intraclass correlation of 1, the most cautious there is; n where
        every document is its own cluster.
        """
        sizes = self.table[:, N]
        return float(sizes.sum() ** 2 / (sizes**2).sum())

    @cached_property
    def effective_drop(self) -> float:
        """Documents that count as independent for a drop, by its measured design effect.

        n over the ratio of the clustered to the unclustered variance of the linearised drop (Rao
        and Scott 1992, Biometrics 48:577-585), between `effective` and n. It needs enough clusters
        with a change to measure a variance from.
        """
        kept, lost, gained, _ = self.cells(1.0)
        drop = self.value("drop")
        alone = kept * drop**2 + lost * (1 - drop) ** 2 + gained
        rest = self.table[:, DIFFERENCE] - drop * self.table[:, BASELINE]
        clustered = float((rest**2).sum()) * self.clusters / (self.clusters - 1)
        n = float(self.table[:, N].sum())
        return min(n, max(self.effective, n * alone / clustered)) if clustered > 0 else n

    def cells(self, share: float) -> tuple[float, float, float, float]:
        """(kept, lost, gained, never) of the paired table, times `share`."""
        n, base, _, _, loss, gain = self.table.sum(axis=0)
        kept = max(base - loss, 0.0)
        never = max(n - base - gain, 0.0)
        return kept * share, loss * share, gain * share, never * share

    @property
    def changed(self) -> int:
        """Number of clusters with a document whose score changed."""
        return int((self.table[:, LOSS] + self.table[:, GAIN] > 0).sum())

    def varied(self, kind: Kind) -> int:
        """Number of clusters that differ from the rest: with a change, or for a mean score
        those with something right or those with something wrong, whichever are fewer."""
        if kind in ("drop", "difference"):
            return self.changed
        right = self.table[:, COLUMNS[kind][0]]
        return int(min((right > 0).sum(), (right < self.table[:, N]).sum()))

    def value(self, kind: Kind) -> float:
        """The statistic itself; NaN for the drop of a baseline of 0."""
        return float(self._ratio(self.table.sum(axis=0), kind))

    def resampled(self, kind: Kind) -> Floats:
        """(R,): the statistic in each resample, NaN where its denominator is 0."""
        return self._ratio(self.totals, kind)

    def influence(self, kind: Kind) -> Floats:
        """(G,): (G - 1) times what leaving each cluster out takes away (jackknife)."""
        left = self._ratio(self.table.sum(axis=0) - self.table, kind)
        return (self.clusters - 1) * (left.mean() - left)

    def _ratio(self, totals: Floats, kind: Kind) -> Floats:
        top, bottom = (totals[..., column] for column in COLUMNS[kind])
        scale = 1.0 if kind == "drop" else self.scale
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(bottom > 1e-9, scale * top / bottom, np.nan)


@dataclass(frozen=True)
class Bootstrap:
    """Ends of an interval, which may be infinite, how they were found, and the standard error."""

    low: float
    high: float
    method: Literal["bca", "percentile"]
    standard_error: float


def bootstrap_interval(
    samples: Sequence[Sample],
    weights: Sequence[float],
    kind: Kind,
    *,
    level: float = 0.95,
    widen: bool = True,
) -> Bootstrap | None:
    """Interval of a weighted sum of one statistic over independent families.

    A resample in which a family's baseline is 0 has no drop: it counts as the lowest value for
    the lower end and as the highest for the upper.

    Args:
        samples: families, each of at least 2 clusters.
        weights: one a family.
        kind: which statistic.
        level: two-sided confidence.
        widen: for few clusters; without it the interval is scipy's.

    Returns:
        None where no cluster's absence changes the statistic: resampling says nothing then.
    """
    value = sum(w * s.value(kind) for w, s in zip(weights, samples, strict=True))
    parts = [w * s.resampled(kind) for w, s in zip(weights, samples, strict=True)]
    influence = [w * s.influence(kind) for w, s in zip(weights, samples, strict=True)]
    tiny = 1e-9 * max(1.0, abs(value))
    if all(np.abs(u).max() < tiny for u in influence):
        return None
    found = np.sum(parts, axis=0)
    known = found[np.isfinite(found)]
    if len(known) < len(found) / 2:
        return None
    z = float(stats.norm.ppf((1 + level) / 2))
    if widen:
        z = _widened(level, parts, influence, [s.effective for s in samples])
    below = ((known < value).sum() + (known <= value).sum()) / (2 * len(known))
    bias = float(stats.norm.ppf(below))
    acceleration = _acceleration(influence)
    method: Literal["bca", "percentile"] = "bca"
    # Beyond a pole of the correction, at acceleration * (bias + z) = 1, its ends change places.
    pole = max(acceleration * (bias - z), acceleration * (bias + z))
    if not (math.isfinite(bias) and math.isfinite(acceleration) and pole < 1):
        method, bias, acceleration = "percentile", 0.0, 0.0
    shares = []
    for end in (-z, z):
        shift = bias + end
        shares.append(float(stats.norm.cdf(bias + shift / (1 - acceleration * shift))))
    return Bootstrap(
        _quantile(found, shares[0], -math.inf),
        _quantile(found, shares[1], math.inf),
        method,
        float(known.std(ddof=1)),
    )


def _acceleration(influence: Sequence[Floats]) -> float:
    """Skewness of the influence values over 6, families weighted as in scipy; NaN if undefined."""
    cubes = sum(float((u**3).sum()) / len(u) ** 3 for u in influence)
    squares = sum(float((u**2).sum()) / len(u) ** 2 for u in influence)
    return cubes / squares**1.5 / 6 if squares > 0 else math.nan


def _widened(
    level: float, parts: Sequence[Floats], influence: Sequence[Floats], effective: Sequence[float]
) -> float:
    """The quantile that stands for z: the correction of the spread, times Student's t."""
    spread = [float(np.nanvar(p)) for p in parts]
    total = sum(spread)
    clusters = [len(u) for u in influence]
    factor = sum(v * g / (g - 1) for v, g in zip(spread, clusters, strict=True)) / total
    jackknife = sum(float((u**2).sum()) / (len(u) * (len(u) - 1)) for u in influence) / total
    if math.isfinite(jackknife):
        factor = max(factor, jackknife)
    freedom = total**2 / sum(v**2 / max(g - 1, 1) for v, g in zip(spread, effective, strict=True))
    return math.sqrt(factor) * float(stats.t.ppf((1 + level) / 2, freedom))


def _quantile(found: Floats, share: float, undefined: float) -> float:
    """The quantile at `share`, NaN counting as `undefined`."""
    missing = np.isnan(found)
    if not missing.any():
        return float(np.quantile(found, share))
    method = "lower" if undefined < 0 else "higher"
    return float(np.quantile(np.where(missing, undefined, found), share, method=method))
