"""Bootstrap, stability and comparison, against a bootstrap in plain loops and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import RankingError
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.ranking_stats import (
    OnlyIn,
    check_k,
    compare,
    draws,
    fingerprint,
    intervals,
    mismatches,
    stability,
    trial_scores,
    weights,
)

RESAMPLES = 40
EIGHTHS = st.integers(-4, 4).map(lambda n: n / 8)


@st.composite
def rankings(draw, values=EIGHTHS):
    """Rankings with and without answer steps, some heads without a score, many ties."""
    number = draw(st.integers(2, 6))
    heads = draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9, unique=True
        )
    )
    column = st.lists(values, min_size=number, max_size=number)
    scores = {Head(*head): tuple(draw(column)) for head in heads}
    for head in draw(st.lists(st.sampled_from(list(scores)), max_size=len(heads) - 1)):
        if sum(map(bool, scores.values())) > 1:
            scores[head] = ()
    counts = draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))
    return HeadRanking(scores, answer_steps=tuple(counts) if draw(st.booleans()) else None)


def slow_bootstrap(ranking, seed):
    """Per resample, every scored head's pooled score, exact for the scores as written."""
    trials = len(next(filter(None, ranking.scores.values())))
    steps = ranking.answer_steps or [1] * trials
    resamples = []
    for drawn in draws(trials, RESAMPLES, seed).tolist():
        total = sum(steps[t] for t in drawn)
        resamples.append(
            {
                head: sum(Fraction(repr(scores[t])) * steps[t] for t in drawn) / total
                for head, scores in ranking.scores.items()
                if scores
            }
        )
    return resamples


def slow_top(pooled, k):
    return set(sorted(pooled, key=lambda head: (-pooled[head], head.layer, head.head))[:k])


def slow_quantile(values, q):
    """Linear between order statistics."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return float(values[low]) + (at - low) * float(values[high] - values[low])


@given(rankings(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_intervals_are_those_of_the_plain_loops(ranking, seed):
    slow = slow_bootstrap(ranking, seed)
    fast = intervals(ranking, resamples=RESAMPLES, seed=seed)
    assert set(fast) == set(ranking.pooled)
    for head, ends in fast.items():
        values = [pooled[head] for pooled in slow]
        expected = [slow_quantile(values, q) for q in (0.025, 0.975)]
        assert ends == pytest.approx(expected, abs=1e-12)


@given(rankings(), st.integers(0, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_stability_is_that_of_the_plain_loops_ties_included(ranking, seed, data):
    k = data.draw(st.integers(1, len(ranking.order)))
    tops = [slow_top(pooled, k) for pooled in slow_bootstrap(ranking, seed)]
    top = set(ranking.order[:k])
    found = stability(ranking, k, resamples=RESAMPLES, seed=seed)
    assert found.mean == pytest.approx(sum(len(t & top) for t in tops) / (k * RESAMPLES))
    assert found.share == {
        head: pytest.approx(sum(head in t for t in tops) / RESAMPLES) for head in ranking.pooled
    }


def test_ties_that_floating_point_breaks_stay_ties():
    # Where both trials are drawn once, all heads tie, but 0.1 + 0.2 is not 0.15 + 0.15.
    scores = {Head(0, j): ((0.1, 0.2), (0.15, 0.15), (0.2, 0.1))[j % 3] for j in range(60)}
    ranking = HeadRanking(scores)
    tops = [slow_top(pooled, 20) for pooled in slow_bootstrap(ranking, seed=0)]
    found = stability(ranking, 20, resamples=RESAMPLES)
    assert found.share == {head: sum(head in top for top in tops) / RESAMPLES for head in scores}
    assert len({frozenset(top) for top in tops}) == 3
    ranking = HeadRanking({Head(0, 1): (0.1 + 0.2, 0.1 + 0.2), Head(0, 0): (0.3, 0.3)})
    assert stability(ranking, 1).share == {Head(0, 0): 1.0, Head(0, 1): 0.0}


def test_a_large_ranking_is_taken_in_pieces_and_comes_out_the_same(monkeypatch):
    generator = np.random.default_rng(3)
    scores = {Head(i, j): tuple(generator.normal(size=7)) for i in range(10) for j in range(12)}
    ranking = HeadRanking(scores, answer_steps=(1, 2, 3, 1, 1, 5, 2))
    whole = intervals(ranking), stability(ranking, 20)
    monkeypatch.setattr("lm_eval_locos.ranking_stats._BLOCK", 7000)
    parts = intervals(ranking), stability(ranking, 20)
    assert parts[1] == whole[1]
    for head in scores:
        assert parts[0][head] == pytest.approx(whole[0][head], abs=1e-12)


def test_the_matrix_leaves_out_heads_without_a_score():
    ranking = HeadRanking({Head(1, 0): (1.0, 2.0), Head(0, 2): (), Head(0, 1): (3.0, 4.0)})
    trials = trial_scores(ranking)
    assert trials.heads == (Head(0, 1), Head(1, 0))
    assert trials.scores.tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert trials.steps.tolist() == [1, 1]
    assert set(intervals(ranking)) == set(stability(ranking, 1).share) == set(trials.heads)


def test_weights_count_draws_times_steps():
    steps = np.array([1, 4, 2])
    expected = []
    for drawn in draws(3, 20, seed=9).tolist():
        counted = [drawn.count(t) * int(steps[t]) for t in range(3)]
        expected.append([n / sum(counted) for n in counted])
    np.testing.assert_allclose(weights(steps, 20, seed=9), expected, rtol=1e-15)


def test_the_seed_decides():
    ranking = HeadRanking({Head(0, 0): (0.0, 1.0, 5.0, 2.0), Head(0, 1): (1.0, 1.0, 1.0, 2.0)})
    assert intervals(ranking, seed=1, resamples=20) == intervals(ranking, seed=1, resamples=20)
    assert intervals(ranking, seed=1, resamples=20) != intervals(ranking, seed=2, resamples=20)


def test_equation_4_moves_the_interval():
    scores = {Head(0, 0): (0.0, 1.0)}
    plain = intervals(HeadRanking(scores), level=0.2)
    heavy = intervals(HeadRanking(scores, answer_steps=(1, 9)), level=0.2)
    assert plain[Head(0, 0)] == (0.5, 0.5)
    assert heavy[Head(0, 0)] == pytest.approx((0.9, 0.9))


def test_one_trial_has_no_interval_and_no_stability():
    ranking = HeadRanking({Head(0, 0): (1.0,), Head(0, 1): (2.0,)})
    assert intervals(ranking) is None
    assert stability(ranking, 1) is None


def test_uneven_lists_name_the_heads():
    ranking = HeadRanking({Head(0, 0): (1.0, 2.0), Head(0, 1): (1.0,), Head(0, 2): ()}, path="w")
    for call in (lambda: intervals(ranking), lambda: stability(ranking, 1)):
        with pytest.raises(RankingError, match=r"w: head 0-1 has 1 scores and head 0-0 has 2"):
            call()


@given(rankings(values=st.just(0.1)) | rankings(values=st.just(-1 / 3)))
@settings(max_examples=30, deadline=None)
def test_a_constant_ranking_has_intervals_of_no_width(ranking):
    for head, (low, high) in intervals(ranking, resamples=20).items():
        assert low == pytest.approx(ranking.pooled[head], rel=1e-14)
        assert high == pytest.approx(ranking.pooled[head], rel=1e-14)
    assert stability(ranking, 1, resamples=20).mean == 1


@given(rankings(values=st.floats(-5, 5)), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_trials_changes_no_pooled_score(ranking, random):
    trials = len(trial_scores(ranking).steps)
    order = random.sample(range(trials), trials)
    steps = ranking.answer_steps
    other = HeadRanking(
        {head: tuple(s[t] for t in order) if s else () for head, s in ranking.scores.items()},
        answer_steps=steps and tuple(steps[t] for t in order),
    )
    assert other.pooled == ranking.pooled
    matrix = trial_scores(other)
    pooled = matrix.steps @ matrix.scores / matrix.steps.sum()
    assert dict(zip(matrix.heads, pooled, strict=True)) == pytest.approx(ranking.pooled, abs=1e-12)


@given(rankings(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_ranking_agrees_with_itself(ranking, data):
    k = data.draw(st.integers(1, len(ranking.order)))
    found = compare(ranking, ranking, k)
    assert (found.overlap, found.jaccard, found.only_a, found.only_b) == (k, 1, (), ())
    assert found.common == len(ranking.order)
    constant = len(set(ranking.pooled.values())) == 1
    assert found.spearman == (None if constant else pytest.approx(1))
    assert mismatches(ranking, ranking) == []


def slow_spearman(a, b):
    """Pearson correlation of mid-ranks."""

    def ranks(values):
        return [
            sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2
            for value in values
        ]

    x, y = ranks(a), ranks(b)
    mean = (len(a) + 1) / 2
    top = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    return top / (sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y)) ** 0.5


@given(rankings(), rankings(), st.data())
@settings(max_examples=80, deadline=None)
def test_compare_by_sets_and_in_both_directions(a, b, data):
    k = data.draw(st.integers(1, min(len(a.order), len(b.order))))
    found, back = compare(a, b, k), compare(b, a, k)
    top_a, top_b = set(a.order[:k]), set(b.order[:k])
    assert found.overlap == len(top_a & top_b) == k - len(found.only_a) == k - len(found.only_b)
    assert found.jaccard == found.overlap / (2 * k - found.overlap)
    assert (back.only_a, back.only_b, back.overlap) == (found.only_b, found.only_a, found.overlap)
    assert {one.head for one in found.only_a} == top_a - top_b
    for one in found.only_a:
        assert a.order[one.rank - 1] == one.head
        assert (one.other_rank is None) == (one.head not in b.order)
        assert one.other_rank is None or b.order[one.other_rank - 1] == one.head
    both = sorted(set(a.pooled) & set(b.pooled))
    x, y = ([ranking.pooled[head] for head in both] for ranking in (a, b))
    assert found.common == len(both)
    if len(set(x)) < 2 or len(set(y)) < 2:
        assert found.spearman is None
    else:
        assert found.spearman == pytest.approx(slow_spearman(x, y), abs=1e-12)


def test_compare_by_hand():
    a = HeadRanking({Head(0, 0): (4.0,), Head(0, 1): (3.0,), Head(0, 2): (2.0,), Head(1, 0): ()})
    b = HeadRanking({Head(0, 0): (1.0,), Head(0, 1): (2.0,), Head(0, 2): (), Head(1, 0): (9.0,)})
    found = compare(a, b, 2)
    assert (found.overlap, found.jaccard, found.common) == (1, 1 / 3, 2)
    assert found.spearman == pytest.approx(-1)
    assert found.only_a == (OnlyIn(Head(0, 0), 1, 3),)
    assert found.only_b == (OnlyIn(Head(1, 0), 1, None),)


@pytest.mark.parametrize("k", [0, -1, 3])
def test_k_out_of_range_names_the_largest(k):
    small = HeadRanking({Head(0, 0): (1.0, 2.0), Head(0, 1): (2.0, 2.0), Head(0, 2): ()}, path="s")
    large = HeadRanking({Head(0, j): (1.0, 2.0) for j in range(5)}, path="l")
    calls = (
        lambda: compare(large, small, k),
        lambda: compare(small, large, k),
        lambda: stability(small, k),
        lambda: check_k(small, k),
    )
    for call in calls:
        with pytest.raises(RankingError, match=rf"k={k}\b.* scores for 2 heads.*largest k is 2"):
            call()


def test_models_of_different_sizes_are_refused():
    def made(path, heads, **recorded):
        scores = {Head(i, j): (1.0,) for i in range(2) for j in range(heads)}
        return HeadRanking(scores, {"fingerprint": recorded} if recorded else {}, path=path)

    recorded = made("a", 3, num_layers=2, num_heads=3, head_dim=8)
    with pytest.raises(RankingError, match="a has num_heads 3 and b has num_heads 4"):
        mismatches(recorded, made("b", 3, num_layers=2, num_heads=4))
    with pytest.raises(RankingError, match="a has num_layers 2 and b has num_layers 5"):
        mismatches(recorded, made("b", 3, num_layers=5, num_heads=3))
    for pair in ((recorded, made("b", 4)), (made("b", 4), recorded)):
        with pytest.raises(RankingError, match="b names head 0-3, but a is of a model with 2 lay"):
            mismatches(*pair)
    assert mismatches(recorded, made("b", 3)) == []
    assert mismatches(made("a", 3), made("b", 4)) == ["6 and 8 heads are named, 6 in both"]
    other = made("b", 3, num_layers=2, num_heads=3, head_dim=16)
    assert mismatches(recorded, other) == ["head_dim differs: 8 and 16"]


def test_a_fingerprint_that_is_no_object_counts_as_none():
    assert fingerprint(HeadRanking({Head(0, 0): (1.0,)}, {"fingerprint": "abc"})) == {}


def test_golden_rankings(goldens):
    locos, dla = (
        HeadRanking.load(goldens / "rankings" / f"smollm2_{name}.json")
        for name in ("logit_contrib", "dla")
    )
    found = compare(locos, dla, 10)
    assert {one.head for one in found.only_a} == set(locos.top(10)) - set(dla.top(10))
    # The reference's own intervals, from other random numbers.
    ours = intervals(locos)
    for head in locos.top(6):
        low, high = locos.confidence_intervals[head]
        assert ours[head] == pytest.approx((low, high), abs=0.35 * (high - low))
