"""A number with its interval: which method applies, and what the sample could have shown.

BCa over clusters is the rule (`bootstrap`). It knows only what the sample shows: where fewer than
`SPARSE` clusters changed it is too narrow, and of width 0 where none did. Two cases are told apart
there. Of few clusters most may have changed: then they show, if roughly, how much clusters differ,
and the wider of Student's t and a score interval stands, which the measured design effect sets
(`clustered`). Or few of many clusters changed, or too little did: then the wider of BCa and the
score interval of the paired table stands (`paired`), with the documents of a cluster counted as
copies of each other.

A claim that nothing changed ("controls held") always takes the wider of BCa and score interval, the
latter at the sample size that the measured design effect leaves, and with copies where fewer than
`SPARSE` clusters changed. A mean or contrast over families with such a family among them joins the
families' intervals by the square root of the sum of squared distances (MOVER: Zou and Donner 2008,
Statistics in Medicine 27:1693-1702).

Measured by simulation (1,000 resamples, 60 to 200 documents, clusters of 1 to 4 documents on
average and of unequal sizes; standard errors of the shares below are 0.005 to 0.01):

- Coverage of the 95% interval by BCa: 0.94 to 0.96, graded or binary scores, one family or a
  contrast, down to 15 clusters. Without the widening it was 0.93 at 15 clusters.
- With a sparse family among them: 0.94 to 0.97 where documents are their own clusters; up to 1.00
  where they are not, because nothing in the sample tells how alike they are.
- Controls whose true drop is the margin, 0.05, pass in 0.00 to 0.052 of the cases: binary families
  near the ceiling or not, clustered or not, one or two families. (By BCa alone in up to 0.07, and
  in up to 0.11 for lopsided graded scores.) Graded scores pay for it: a score in [0, 1] is taken to
  vary as a 0/1 answer of the same mean would, so that they need about as many documents.

And with 2 to 9 clusters of 3 to 200 documents (graded scores: to 100), of equal and unequal sizes,
baselines of 0.3 to 0.95, drops of 0.1 to 0.97, intraclass correlations of 0 to 0.3 (5,040 settings,
400 replications each for graded and 700 for binary scores):

- Coverage of the 95% interval of a drop: in every setting 0.92 or more. On average, with 5 clusters
  or more, 30 documents or more in each, and drops of 0.3 and 0.6: 0.96 to 0.97 where documents of
  a cluster are alike (correlation 0.1 or 0.3), 0.98 where they are not (1.00 if graded). At 3 or 10
  documents a cluster, and at drops of 0.1 or of 0.9 and more: 0.98 to 1.00. With all of a cluster's
  documents counted as copies it was 0.995 to 1.00, of intervals up to ten times as wide and more.
- The t interval alone covered down to 0.85: few clusters of a drop near 0 or 1 are lopsided.
- Six needles of 33 documents, a drop of 0.6, two controls of 60 and 200 documents: the interval of
  specificity is 0.48 to 0.68 on average and covers 0.99 (before, -0.09 to 0.92 and 1.00).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import stats

from lm_eval_locos.statistics.bootstrap import Kind, Sample, bootstrap_interval
from lm_eval_locos.statistics.clustered import few_clusters_interval, score_interval
from lm_eval_locos.statistics.hypotheses import detectable_effect, documents_needed

SPARSE = 10
"""Below this many clusters with a change the bootstrap is not trusted alone."""


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval.

    Attributes:
        low: lower end.
        high: upper end.
        level: confidence, for example 0.95.
        method: "bca", "percentile", "score" (one family, the wider of bootstrap and score
            interval), "t" (one family of few clusters, the wider of Student's t over clusters and
            score interval) or "mover" (several families, at least one of them by "score" or "t").
    """

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Estimate:
    """A statistic, its interval and what the sample can detect.

    Attributes:
        value: None where it is not defined.
        interval: None where there is none; `reason` says why.
        standard_error: of the bootstrap; from the interval's width where that is by "score" or "t".
        detectable: the true effect that this sample would find with the power asked for.
        documents: that it rests on.
        power: behind `detectable`.
        reason: why something is missing, or which families were left out.
        clusters: that the documents come in, 0 where that is not known. Where they are fewer, more
            documents help only as further clusters of the same sizes.
        constant: nothing varied, for example no document changed in any family.
    """

    value: float | None
    interval: Interval | None = None
    standard_error: float | None = None
    detectable: float | None = None
    documents: int = 0
    power: float = 0.8
    reason: str | None = None
    clusters: int = 0
    constant: bool = False

    def documents_needed(self, effect: float) -> int | None:
        """Documents with which `effect` would be found; None where there is no interval.

        They are taken to come in clusters of the same sizes (`clusters` as well as documents grow).
        """
        if self.interval is None or self.standard_error is None:
            return None
        return documents_needed(
            self.documents,
            self.standard_error,
            effect,
            level=self.interval.level,
            power=self.power,
            constant=self.constant,
        )


def estimate(
    samples: Sequence[Sample],
    weights: Sequence[float],
    kind: Kind,
    *,
    level: float = 0.95,
    power: float = 0.8,
    reason: str | None = None,
    cautious: bool = False,
) -> Estimate:
    """A weighted sum of one statistic over families, every one of which has it defined.

    Args:
        samples: the families.
        weights: one a family.
        kind: which statistic.
        level: two-sided confidence of the interval.
        power: for `Estimate.detectable`.
        reason: a remark to carry along.
        cautious: for a claim of no effect. Each family then has the wider of the bootstrap's and
            the score interval, the latter at the sample size that the design effect leaves: of
            few and lopsided changes BCa alone is too sure.
    """
    value = sum(w * s.value(kind) for w, s in zip(weights, samples, strict=True))
    bare = Estimate(
        value,
        documents=sum(s.documents for s in samples),
        power=power,
        reason=reason,
        clusters=sum(s.clusters for s in samples),
        constant=all(s.varied(kind) == 0 for s in samples),
    )
    if any(s.clusters == 1 for s in samples):
        why = "1 cluster: no interval. Documents of one needle or story do not vary independently."
        return replace(bare, reason=_join(reason, why))
    found = None
    if not (cautious or any(s.varied(kind) < SPARSE for s in samples)):
        found = bootstrap_interval(samples, weights, kind, level=level)
    if found is None:
        low, high, error, method = _joined(samples, weights, kind, level, value, cautious)
    else:
        low, high, error, method = found.low, found.high, found.standard_error, found.method
    if not (math.isfinite(low) and math.isfinite(high)):
        why = "no interval: the baseline falls to 0 in too many resamples."
        return replace(bare, reason=_join(reason, why))
    return replace(
        bare,
        interval=Interval(low, high, level, method),
        standard_error=error,
        detectable=detectable_effect(error, level=level, power=power),
    )


def _join(*reasons: str | None) -> str | None:
    return " ".join(r for r in reasons if r) or None


def _joined(
    samples: Sequence[Sample],
    weights: Sequence[float],
    kind: Kind,
    level: float,
    value: float,
    cautious: bool,
) -> tuple[float, float, float, str]:
    """(low, high, standard error, method): each family by its own method, joined by MOVER."""
    below, above, errors, methods = [], [], [], []
    for sample, weight in zip(samples, weights, strict=True):
        low, high, error, method = _alone(sample, kind, level, cautious)
        middle = sample.value(kind)
        sides = (weight * (middle - low), weight * (middle - high))
        below.append(max(sides))
        above.append(min(sides))
        errors.append(weight * error)
        methods.append(method)
    method = methods[0] if len(samples) == 1 else "mover"
    return value - math.hypot(*below), value + math.hypot(*above), math.hypot(*errors), method


def _alone(
    sample: Sample, kind: Kind, level: float, cautious: bool
) -> tuple[float, float, float, str]:
    """(low, high, standard error, method) of one family, by what its clusters can tell."""
    z = float(stats.norm.ppf((1 + level) / 2))
    sparse = sample.varied(kind) < SPARSE
    if sparse and not cautious:
        ends = few_clusters_interval(sample, kind, level=level)
        if ends is not None:
            return *ends, (ends[1] - ends[0]) / (2 * z), "t"
    found = bootstrap_interval([sample], [1.0], kind, level=level)
    if found is not None and not sparse and not cautious:
        return found.low, found.high, found.standard_error, found.method
    share = sample.effective / sample.documents
    if kind == "drop" and found is not None and not sparse:
        share = sample.effective_drop / sample.documents
        if sample.clusters < sample.documents:  # the design effect is itself an estimate
            share *= (z / stats.t.ppf((1 + level) / 2, max(sample.effective - 1, 1))) ** 2
    low, high = score_interval(sample, kind, share, level=level)
    if found is not None:
        low, high = min(low, found.low), max(high, found.high)
    return low, high, (high - low) / (2 * z), "score"
