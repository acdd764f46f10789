"""How sure a ranking is of its order, and how far two rankings agree; pure functions.

    >>> intervals(ranking)[Head(14, 3)]          # 95%, percentile bootstrap over trials
    (0.41, 0.93)
    >>> stability(ranking, k=20).mean            # share of the top 20 that a resample keeps
    0.86
    >>> compare(ranking, other, k=20).overlap
    13

A resample draws as many trials as there are, with replacement, and pools them as
`HeadRanking.pooled` does: by equation 4 of the LOCOS paper where the ranking has answer steps
(``sum n_t s_t / sum n_t`` over the drawn trials), by the mean where it has none. Trials are the
unit because the answer steps of one trial share its haystack and needle and are not independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import RankingError
from lm_eval_locos.ranking import HeadRanking

RESAMPLES = 1000
LEVEL = 0.95

_BLOCK = 4_000_000  # pooled scores held at once (32 MB), whatever the model's size
_DIGITS = 12  # pooled scores this close, relative to the largest, tie: float error ranks no head


@dataclass(frozen=True)
class TrialScores:
    """A ranking's scores as one matrix.

    Attributes:
        heads: the heads that have a score, by (layer, head).
        scores: (trials, heads), float64.
        steps: (trials,), int64: answer steps of each trial, or ones where the ranking has none.
    """

    heads: tuple[Head, ...]
    scores: NDArray[np.float64]
    steps: NDArray[np.int64]


@dataclass(frozen=True)
class Stability:
    """How much of the top-k survives another draw of trials.

    Attributes:
        mean: mean over resamples of ``|top-k of the resample & top-k of all trials| / k``.
        share: per head with a score, the share of resamples in which it is in the top-k.
    """

    mean: float
    share: Mapping[Head, float]


@dataclass(frozen=True)
class OnlyIn:
    """A head in one ranking's top-k and not in the other's; ranks from 1, None for no score."""

    head: Head
    rank: int
    other_rank: int | None


@dataclass(frozen=True)
class Comparison:
    """What two rankings have in common.

    Attributes:
        k: size of the two sets compared.
        overlap: number of heads in both top-k sets.
        jaccard: overlap over the size of the union.
        spearman: rank correlation of the pooled scores over the heads that both score; None where
            it is undefined (fewer than two such heads, or all their scores equal in one ranking).
        common: number of heads that both score.
        only_a, only_b: heads in one top-k only, by rank.
    """

    k: int
    overlap: int
    jaccard: float
    spearman: float | None
    common: int
    only_a: tuple[OnlyIn, ...]
    only_b: tuple[OnlyIn, ...]


# -- one ranking ---------------------------------------------------------------------------


def trial_scores(ranking: HeadRanking) -> TrialScores:
    """The scores as a matrix; heads without a score are left out.

    Raises:
        RankingError: heads have different numbers of scores, so that it is unknown which scores
            belong to the same trial.
    """
    heads = tuple(sorted(head for head, scores in ranking.scores.items() if scores))
    lengths = {len(ranking.scores[head]): head for head in reversed(heads)}
    if len(lengths) > 1:
        (few, first), *_, (many, last) = sorted(lengths.items())
        raise RankingError(
            f"heads={ranking.path}: head {first} has {few} scores and head {last} has {many}. "
            "Resampling trials needs one score a trial from every head (or none); run the "
            "detection again."
        )
    scores = np.array([ranking.scores[head] for head in heads], dtype=np.float64).T
    steps = ranking.answer_steps or (1,) * len(scores)
    return TrialScores(heads, scores, np.array(steps, dtype=np.int64))


def draws(trials: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """(resamples, trials) indices of trials, drawn uniformly with replacement."""
    return np.random.default_rng(seed).integers(0, trials, size=(resamples, trials))


def weights(steps: NDArray[np.int64], resamples: int, seed: int) -> NDArray[np.float64]:
    """(resamples, trials): what each trial counts in each resample; rows sum to 1.

    A trial drawn c times that has n answer steps counts ``c * n`` (equation 4).
    """
    trials = len(steps)
    drawn = draws(trials, resamples, seed) + trials * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * trials).reshape(resamples, trials)
    weighted = (counts * steps).astype(np.float64)
    return weighted / weighted.sum(axis=1, keepdims=True)


def intervals(
    ranking: HeadRanking, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> dict[Head, tuple[float, float]] | None:
    """Percentile bootstrap interval of every scored head's pooled score; None with one trial.

    Args:
        ranking: with the scores of at least two trials.
        resamples: number of resamples.
        seed: of the draw.
        level: coverage, 0.95 for the 2.5th to the 97.5th percentile.

    Raises:
        RankingError: see `trial_scores`.
    """
    trials = trial_scores(ranking)
    if len(trials.steps) < 2:
        return None
    drawn = weights(trials.steps, resamples, seed)
    ends = np.empty((2, len(trials.heads)))
    for part in _parts(len(trials.heads), _BLOCK // resamples):
        pooled = drawn @ trials.scores[:, part]
        ends[:, part] = np.quantile(pooled, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {head: (float(a), float(b)) for head, a, b in zip(trials.heads, *ends, strict=True)}


def stability(
    ranking: HeadRanking, k: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> Stability | None:
    """How often resampled trials give the same top-k; None with one trial.

    Args:
        ranking: with the scores of at least two trials.
        k: size of the top set, from 1 to the number of scored heads.
        resamples: number of resamples.
        seed: of the draw; `intervals` draws the same trials from the same seed.

    Raises:
        RankingError: ``k`` is out of range; see also `trial_scores`.
    """
    check_k(ranking, k)
    trials = trial_scores(ranking)
    if len(trials.steps) < 2:
        return None
    drawn = weights(trials.steps, resamples, seed)
    times = np.zeros(len(trials.heads), dtype=np.int64)
    for part in _parts(resamples, _BLOCK // len(trials.heads)):
        times += _in_top(drawn[part] @ trials.scores, k).sum(axis=0)
    number = dict(zip(trials.heads, times.tolist(), strict=True))
    # Overlaps summed over resamples are appearances summed over the heads of the top-k.
    kept = sum(number[head] for head in ranking.top(k))
    return Stability(kept / (k * resamples), {head: n / resamples for head, n in number.items()})


def _in_top(pooled: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """(resamples, heads): whether a head is in the row's top ``k``; the first of equals wins.

    Columns are in the order of (layer, head), so ties fall as in `HeadRanking.order`.
    """
    scale = np.abs(pooled).max()
    rounded = np.round(pooled / scale, _DIGITS) if scale else pooled
    last = -np.partition(-rounded, k - 1, axis=1)[:, k - 1 : k]  # the k-th highest
    above, equal = rounded > last, rounded == last
    return above | (equal & (equal.cumsum(axis=1) <= k - above.sum(axis=1, keepdims=True)))


def _parts(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` (at least 1) that cover ``range(total)``."""
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, total, size))


# -- two rankings --------------------------------------------------------------------------


def compare(a: HeadRanking, b: HeadRanking, k: int) -> Comparison:
    """Agreement of two rankings of one model's heads, in their top ``k`` and over all heads.

    Raises:
        RankingError: ``k`` is not between 1 and either's number of scored heads.
    """
    check_k(min(a, b, key=lambda ranking: len(ranking.order)), k)
    top_a, top_b = set(a.top(k)), set(b.top(k))
    both = [head for head in a.order if head in b.pooled]
    return Comparison(
        k=k,
        overlap=len(top_a & top_b),
        jaccard=len(top_a & top_b) / len(top_a | top_b),
        spearman=_spearman([a.pooled[head] for head in both], [b.pooled[head] for head in both]),
        common=len(both),
        only_a=_only(a, b, k),
        only_b=_only(b, a, k),
    )


def mismatches(a: HeadRanking, b: HeadRanking) -> list[str]:
    """What speaks against comparing two rankings; empty where nothing does.

    Raises:
        RankingError: they are of models with different layers or heads, by the fingerprints that
            the files record or, where one has none, by the heads it names.
    """
    prints = [fingerprint(ranking) for ranking in (a, b)]
    for key in ("num_layers", "num_heads"):
        sizes = [recorded.get(key) for recorded in prints]
        if None not in sizes and sizes[0] != sizes[1]:
            raise RankingError(
                f"{a.path} has {key} {sizes[0]} and {b.path} has {key} {sizes[1]}: rankings of "
                "different models, whose heads do not correspond. Compare rankings of one model."
            )
    for ranking, other, recorded in ((a, b, prints[1]), (b, a, prints[0])):
        sizes = [recorded.get(key) for key in ("num_layers", "num_heads")]
        outside = [
            head
            for head in sorted(ranking.scores)
            if any(type(n) is int and i >= n for i, n in zip(head, sizes, strict=True))
        ]
        if outside:
            raise RankingError(
                f"{ranking.path} names head {outside[0]}, but {other.path} is of a model with "
                f"{sizes[0]} layers of {sizes[1]} heads ({len(outside)} heads are outside). "
                "Compare rankings of one model."
            )
    differ = [key for key in prints[0] if key in prints[1] and prints[0][key] != prints[1][key]]
    found = [f"{key} differs: {prints[0][key]} and {prints[1][key]}" for key in differ]
    if set(a.scores) != set(b.scores):
        shared = len(set(a.scores) & set(b.scores))
        found.append(f"{len(a.scores)} and {len(b.scores)} heads are named, {shared} in both")
    return found


def fingerprint(ranking: HeadRanking) -> Mapping[str, object]:
    """The model's fingerprint as the file records it, empty where it has none."""
    recorded = ranking.meta.get("fingerprint")
    return recorded if isinstance(recorded, dict) else {}


def check_k(ranking: HeadRanking, k: int) -> None:
    """Raises RankingError unless ``1 <= k <= `` the number of heads with a score."""
    if not 1 <= k <= len(ranking.order):
        raise RankingError(
            f"k={k}, but {ranking.path} has scores for {len(ranking.order)} heads. The largest k "
            f"is {len(ranking.order)}, the smallest 1."
        )


def _only(ranking: HeadRanking, other: HeadRanking, k: int) -> tuple[OnlyIn, ...]:
    ranks = {head: rank for rank, head in enumerate(other.order, start=1)}
    return tuple(
        OnlyIn(head, rank, ranks.get(head))
        for rank, head in enumerate(ranking.top(k), start=1)
        if ranks.get(head, k + 1) > k
    )


def _spearman(a: list[float], b: list[float]) -> float | None:
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    from scipy.stats import spearmanr  # here: scipy.stats loads slowly and only this needs it

    return float(spearmanr(a, b).statistic)
