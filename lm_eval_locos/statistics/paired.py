"""Score intervals of paired proportions: for samples in which little or nothing changed.

Twenty documents right under the baseline and right under the condition: every bootstrap resample
shows a drop of 0, and an interval of width 0 would claim that nothing can have changed. The score
interval says what twenty documents can say.

    >>> low, high = ratio_interval(20, 0, 0, 0, level=0.90)     # 20 right twice, no loss, no gain
    >>> round(high, 3)
    0.119

A table is (kept, lost, gained, never): right under both, under the baseline only, under the
condition only, under neither. Counts may be fractions: a table scaled to an effective sample size,
or scores between 0 and 1, where a document adds min(b, c), max(b - c, 0), max(c - b, 0) and the
rest. (That is the expected table when one uniform draw decides whether both scores count as right,
and a 0/1 variable varies at least as much as a score in [0, 1] of that mean: conservative.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize, stats

_LARGE = 1e9


def proportion_interval(right: float, total: float, *, level: float) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927), exactly 0 or 1 at the ends."""
    z = _z(level)
    p, w = right / total, z * z / total
    middle, half = p + w / 2, z * math.sqrt(p * (1 - p) / total + w / (4 * total))
    low, high = (middle - half) / (1 + w), (middle + half) / (1 + w)
    return (0.0 if right == 0 else low), (1.0 if right == total else high)


def difference_interval(
    kept: float, lost: float, gained: float, never: float, *, level: float
) -> tuple[float, float]:
    """Tango's score interval of P(lost) - P(gained), the absolute difference (Tango 1998).

    Statistics in Medicine 17:891-908, equations 8 and 9: the difference D that the statistic
    (lost - gained - n D) / sqrt(n (2 q + D (1 - D))), q the constrained estimate of P(gained),
    does not reject.
    """
    n = kept + lost + gained + never

    def statistic(d: float) -> float:
        b = -lost - gained + (2 * n - lost + gained) * d
        c = -gained * d * (1 - d)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        top, variance = lost - gained - n * d, n * (2 * q + d * (1 - d))
        return top / math.sqrt(variance) if variance > 0 else math.copysign(_LARGE, top)

    return _invert(statistic, (lost - gained) / n, -1.0, 1.0, _z(level))


def constrained_cells(
    kept: float, lost: float, gained: float, never: float, ratio: float
) -> tuple[float, float]:
    """Maximum-likelihood P(lost), P(gained) under P(right, condition) = ratio * P(right, baseline).

    Nam and Blackwelder 2002, Statistics in Medicine 21:689-699: the larger root of a quadratic.
    """
    some = kept + lost + gained
    q = some / (some + never)
    k, m = (ratio - 1) * q, 1 + ratio
    b = q * (lost + gained) - m * k * (kept + lost)
    root = math.sqrt(max(b * b + 4 * m * some * lost * q * k, 0.0))
    loss = (b + root) / (2 * m * some)
    return loss, max((loss + k) / ratio, 0.0)


def ratio_interval(
    kept: float, lost: float, gained: float, never: float, *, level: float
) -> tuple[float, float]:
    """Score interval of the drop, 1 - P(right, condition) / P(right, baseline); low may be -inf.

    The ratios r that (kept + gained - r (kept + lost)) / sqrt(n r (p + q)) does not reject, p and
    q from `constrained_cells` (Nam and Blackwelder 2002; the same as Tang, Tang and Chan 2003).

    Raises:
        ZeroDivisionError: nothing is right under the baseline.
    """
    n, right = kept + lost + gained + never, kept + lost

    def statistic(drop: float) -> float:
        ratio = 1 - drop
        top = kept + gained - ratio * right
        if ratio <= 0:
            return _LARGE
        variance = n * ratio * sum(constrained_cells(kept, lost, gained, never, ratio))
        return top / math.sqrt(variance) if variance > 1e-12 else math.copysign(_LARGE, top)

    drop = (lost - gained) / right
    low, high = _invert(lambda d: -statistic(d), drop, -_LARGE, 1.0, _z(level))
    return (low if low > -_LARGE / 2 else -math.inf), high


def exact_upper(events: float, total: float, *, level: float) -> float:
    """Upper end of the Clopper-Pearson interval of a proportion (beta quantile)."""
    if events >= total:
        return 1.0
    return float(stats.beta.ppf((1 + level) / 2, events + 1, total - events))


def _z(level: float) -> float:
    return float(stats.norm.ppf((1 + level) / 2))


def _invert(
    statistic: Callable[[float], float], middle: float, low: float, high: float, z: float
) -> tuple[float, float]:
    """Where a statistic that falls from low to high, 0 at middle, passes z and -z."""
    ends = []
    for end, level in ((low, z), (high, -z)):

        def excess(x: float, level: float = level) -> float:
            return (0.0 if x == middle else statistic(x)) - level

        if middle == end or excess(end) * excess(middle) >= 0:
            ends.append(end)
        else:
            ends.append(float(optimize.brentq(excess, *sorted((end, middle)), xtol=1e-12)))
    return ends[0], ends[1]
