"""Statistics of specificity, against slow loops, scipy, maximum likelihood and simulation."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from lm_eval_locos.errors import DataError
from lm_eval_locos.statistics import (
    CEILING,
    FLOOR,
    OK,
    Estimate,
    FamilyScores,
    detectable_effect,
    documents_needed,
    holm,
    holm_across,
    mcnemar,
    permutation_p,
    specificity,
)
from lm_eval_locos.statistics.bootstrap import Sample, bootstrap_interval
from lm_eval_locos.statistics.clustered import (
    effective_clusters,
    few_clusters_interval,
    jackknife_error,
    score_interval,
)
from lm_eval_locos.statistics.estimates import estimate
from lm_eval_locos.statistics.paired import (
    constrained_cells,
    difference_interval,
    exact_upper,
    proportion_interval,
    ratio_interval,
)


def scores(seed, n=40, size=3, drop=0.3, binary=False, **options):
    """Random scores of n documents in clusters of 1 to 2 * size - 1."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n), rng.integers(1, 2 * size, n))[:n]
    base = rng.uniform(0.3, 1, n)
    cond = base * np.clip(rng.normal(1 - drop, 0.3, n), 0, 1)
    if binary:
        base, cond = (base > 0.5).astype(float), (cond > 0.35).astype(float)
    return FamilyScores(base, cond, labels, **options)


# -- against loops over resamples and documents ------------------------------------------------


def slow_indices(name, seed, clusters, resamples):
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.integers(0, clusters, (resamples, clusters))


def slow_statistic(documents, kind):
    """Of a list of (baseline, condition)."""
    base = sum(b for b, _ in documents)
    cond = sum(c for _, c in documents)
    n = len(documents)
    return {
        "drop": (base - cond) / base,
        "difference": (base - cond) / n,
        "baseline": base / n,
        "condition": cond / n,
    }[kind]


def slow_interval(families, weights, kind, seed, resamples, level):
    """Widened BCa by loops: (low, high, standard error)."""
    members, drawn = {}, {}
    for name, family in families.items():
        groups = {}
        for b, c, label in zip(family.baseline, family.condition, family.clusters, strict=True):
            groups.setdefault(label, []).append((float(b), float(c)))
        members[name] = [groups[label] for label in sorted(groups)]
        drawn[name] = slow_indices(name, seed, len(groups), resamples)
    parts = {name: [] for name in families}
    for r in range(resamples):
        for name, groups in members.items():
            documents = [d for g in drawn[name][r] for d in groups[g]]
            parts[name].append(weights[name] * slow_statistic(documents, kind))
    found = [sum(parts[name][r] for name in families) for r in range(resamples)]
    flat = {name: [d for g in groups for d in g] for name, groups in members.items()}
    value = sum(weights[name] * slow_statistic(flat[name], kind) for name in families)

    cubes = squares = jackknife = total = classic = quotient = 0.0
    for name, groups in members.items():
        count = len(groups)
        left = []
        for i in range(count):
            rest = [d for j, g in enumerate(groups) if j != i for d in g]
            left.append(weights[name] * slow_statistic(rest, kind))
        influence = [(count - 1) * (np.mean(left) - x) for x in left]
        cubes += sum(u**3 for u in influence) / count**3
        squares += sum(u**2 for u in influence) / count**2
        jackknife += sum(u**2 for u in influence) / (count * (count - 1))
        spread = np.var(parts[name])
        sizes = [len(g) for g in groups]
        effective = sum(sizes) ** 2 / sum(s**2 for s in sizes)
        total += spread
        classic += spread * count / (count - 1)
        quotient += spread**2 / (effective - 1)
    factor = max(classic, jackknife) / total
    z = math.sqrt(factor) * stats.t.ppf((1 + level) / 2, total**2 / quotient)
    below = np.mean([(f < value) / 2 + (f <= value) / 2 for f in found])
    bias, acceleration = stats.norm.ppf(below), cubes / squares**1.5 / 6
    ends = [
        np.quantile(found, stats.norm.cdf(bias + (bias + e) / (1 - acceleration * (bias + e))))
        for e in (-z, z)
    ]
    return *ends, np.std(found, ddof=1)


@pytest.mark.parametrize("kind", ["drop", "difference", "baseline", "condition"])
@pytest.mark.parametrize("binary", [False, True])
def test_interval_equals_loops_over_resamples_and_documents(kind, binary):
    families = {"one": scores(1, binary=binary), "two": scores(2, n=55, size=2, binary=binary)}
    weights = {"one": 0.5, "two": -1.0}
    samples = [Sample.of(families[n], n, resamples=150, seed=9) for n in families]
    found = bootstrap_interval(samples, list(weights.values()), kind, level=0.9)
    low, high, error = slow_interval(families, weights, kind, 9, 150, 0.9)
    assert found.method == "bca"
    assert (found.low, found.high, found.standard_error) == pytest.approx(
        (low, high, error), abs=1e-12
    )


def test_specificity_is_the_difference_of_the_sides_means():
    families = {
        "a": scores(1),
        "b": scores(2, drop=0.6),
        "c": scores(3, n=60, drop=0.1, side="control"),
    }
    result = specificity(families, resamples=200, seed=4)
    drops = {k: 1 - f.condition.sum() / f.baseline.sum() for k, f in families.items()}
    differences = {k: (f.baseline - f.condition).mean() for k, f in families.items()}
    assert result.retrieval_drop.value == pytest.approx((drops["a"] + drops["b"]) / 2)
    assert result.control_drop.value == pytest.approx(drops["c"])
    assert result.specificity.value == pytest.approx((drops["a"] + drops["b"]) / 2 - drops["c"])
    assert result.specificity_difference.value == pytest.approx(
        (differences["a"] + differences["b"]) / 2 - differences["c"]
    )
    low, high, error = slow_interval(
        families, {"a": 0.5, "b": 0.5, "c": -1.0}, "drop", 4, 200, 0.95
    )
    found = result.specificity
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=1e-12)
    assert found.standard_error == pytest.approx(error)
    assert found.detectable == pytest.approx(detectable_effect(error))
    assert found.documents == 140


def test_bca_equals_scipy_on_documents_that_are_their_own_clusters():
    family = replace(scores(5, n=70), clusters=None)
    sample = Sample.of(family, "f", resamples=2000, seed=3)
    found = bootstrap_interval([sample], [1.0], "drop", widen=False)
    reference = stats.bootstrap(
        (family.baseline, family.condition),
        lambda b, c, axis: 1 - c.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        n_resamples=2000,
        method="BCa",
        vectorized=True,
        random_state=np.random.default_rng([3, zlib.crc32(b"f")]),
    )
    interval = reference.confidence_interval
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert found.standard_error == pytest.approx(reference.standard_error)


def test_bca_of_a_contrast_equals_scipy_on_two_samples():
    one, two = replace(scores(6, n=50), clusters=None), replace(scores(7, n=80), clusters=None)
    samples = [Sample.of(f, str(i), resamples=60_000) for i, f in enumerate((one, two))]
    found = bootstrap_interval(samples, [1.0, -1.0], "drop", widen=False)

    def contrast(i, j, axis):
        def drop(f, rows):
            rows = rows.astype(int)
            return 1 - f.condition[rows].sum(axis) / f.baseline[rows].sum(axis)

        return drop(one, i) - drop(two, j)

    interval = stats.bootstrap(
        (np.arange(50), np.arange(80)),
        contrast,
        n_resamples=60_000,
        batch=5_000,
        method="BCa",
        random_state=np.random.default_rng(1),
    ).confidence_interval
    width = interval.high - interval.low
    # Other draws: the ends agree to a hundredth or two of the width.
    assert (found.low, found.high) == pytest.approx(
        (interval.low, interval.high), abs=0.025 * width
    )


def test_percentile_where_bca_is_not_defined():
    sample = Sample.of(scores(8), "f", resamples=500)
    # Every resample above the value: the bias is infinite.
    shifted = replace(sample, totals=sample.totals * [1, 1, 1, 3])
    found = bootstrap_interval([shifted], [1.0], "drop", widen=False)
    assert found.method == "percentile"
    assert (found.low, found.high) == pytest.approx(
        tuple(np.quantile(shifted.resampled("drop"), [0.025, 0.975]))
    )


def test_few_lopsided_clusters_keep_the_ends_in_order():
    base, cond = np.ones(30), np.r_[np.zeros(10), np.linspace(0.98, 1, 20)]
    sample = Sample.of(FamilyScores(base, cond, np.arange(30) // 10), resamples=500)
    found = bootstrap_interval([sample], [1.0], "difference", level=0.999)
    assert found.method == "percentile"
    assert found.low <= sample.value("difference") <= found.high


def test_resamples_without_a_baseline_count_against_both_ends():
    sample = Sample.of(replace(scores(9), clusters=None), "f", resamples=1000)
    totals = sample.totals.copy()
    totals[:10, 1] = 0
    found = bootstrap_interval([replace(sample, totals=totals)], [1.0], "drop")
    plain = bootstrap_interval([sample], [1.0], "drop")
    assert found.low <= plain.low < plain.high <= found.high
    totals[:100, 1] = 0
    lost = estimate([replace(sample, totals=totals)], [1.0], "drop")
    assert lost.interval is None
    assert "falls to 0" in lost.reason


def test_draws_depend_on_name_and_seed_only():
    one = specificity({"a": scores(1), "b": scores(2)}, resamples=200)
    other = specificity({"b": scores(2)}, resamples=200)
    again = specificity({"b": scores(2)}, resamples=200, seed=1)
    assert one.families["b"].drop == other.families["b"].drop
    assert again.families["b"].drop.interval != other.families["b"].drop.interval


# -- score intervals ---------------------------------------------------------------------------

TABLES = [
    (40, 5, 2, 13),
    (20, 0, 0, 0),
    (10, 3, 0, 4),
    (5, 0, 4, 9),
    (0, 6, 3, 2),
    (9.5, 0.5, 1.5, 3),
]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("drop", [-0.5, 0.05, 0.4])
def test_constrained_cells_maximise_the_likelihood(table, drop):
    kept, lost, gained, never = table
    ratio = 1 - drop

    def likelihood(cells):
        loss, total = cells
        gain = (loss + (ratio - 1) * total) / ratio
        stay = total - loss - gain
        parts = [(kept, stay), (lost, loss), (gained, gain), (never, 1 - total)]
        if any(p < -1e-12 or (p <= 0 and n > 0) for n, p in parts):
            return math.inf
        return -sum(n * math.log(p) for n, p in parts if n > 0)

    loss, gain = constrained_cells(*table, ratio)
    total = (kept + lost + gained) / sum(table)
    best = likelihood((loss, total))
    grid = np.linspace(1e-6, 1 - 1e-6, 160)
    coarse = min((likelihood((x * t, t)), x * t, t) for x in grid for t in grid)
    fine = optimize.minimize(likelihood, coarse[1:], method="Nelder-Mead", tol=1e-10)
    assert best <= fine.fun + 1e-6
    assert (1 - total) + (kept and total - loss - gain) >= -1e-9
    # The constraint itself: right under the condition is ratio times right under the baseline.
    assert total - loss == pytest.approx(ratio * (total - gain))


def test_score_intervals_of_a_published_table():
    # 1, 7, 1, 12: airway hyper-responsiveness before and after stem cell transplantation (Bentur
    # 2009), as in Fagerland, Lydersen and Laake 2014: Tango's and Tang's intervals.
    assert difference_interval(1, 7, 1, 12, level=0.95) == pytest.approx((0.026, 0.517), abs=5e-4)
    low, high = ratio_interval(1, 7, 1, 12, level=0.95)
    assert (1 - high, 1 - low) == pytest.approx((0.065, 0.907), abs=5e-4)


@pytest.mark.parametrize("table", TABLES)
def test_score_limits_are_where_the_statistic_is_z(table):
    kept, lost, gained, never = table
    n, z = sum(table), stats.norm.ppf(0.95)

    def tango(d):
        def loglik(q):
            cells = [(lost, q + d), (gained, q), (kept + never, 1 - 2 * q - d)]
            if any(p < 0 or (p == 0 and m > 0) for m, p in cells):
                return math.inf
            return -sum(m * math.log(p) for m, p in cells if m > 0)

        low, high = max(0.0, -d), (1 - d) / 2
        q = optimize.minimize_scalar(loglik, bounds=(low, high), options={"xatol": 1e-12}).x
        return (lost - gained - n * d) / math.sqrt(n * (2 * q + d - d * d))

    low, high = difference_interval(*table, level=0.9)
    for end, value in ((low, z), (high, -z)):
        if abs(end) < 1:
            assert tango(end) == pytest.approx(value, abs=2e-3)
    drop_low, drop_high = ratio_interval(*table, level=0.9)
    for drop, value in ((drop_low, z), (drop_high, -z)):
        if math.isfinite(drop) and drop < 1:
            cells = constrained_cells(*table, 1 - drop)
            top = (1 - drop) * (kept + lost) - kept - gained
            assert top / math.sqrt(n * (1 - drop) * sum(cells)) == pytest.approx(value, abs=1e-6)
    assert drop_low <= (lost - gained) / (kept + lost) <= drop_high


def test_wilson_and_clopper_pearson_equal_scipy():
    for right, total in ((0, 20), (3, 20), (20, 20)):
        test = stats.binomtest(right, total)
        wilson, exact = (test.proportion_ci(0.9, m) for m in ("wilson", "exact"))
        assert proportion_interval(right, total, level=0.9) == pytest.approx(tuple(wilson))
        assert exact_upper(right, total, level=0.9) == pytest.approx(exact.high)


# -- nothing, or little, changed ---------------------------------------------------------------


def unchanged(n, **options):
    return FamilyScores(np.ones(n), np.ones(n), side="control", **options)


@pytest.mark.parametrize(
    ("n", "held"), [(20, False), (55, False), (58, False), (59, True), (200, True)]
)
def test_no_loss_shows_what_its_documents_can_show(n, held):
    result = specificity({"recall": unchanged(n)}, resamples=200)
    assert result.controls_held is held
    # No loss in n: the exact bound at 5%, 1 - 0.05^(1/n), or the score interval's.
    upper = max(1 - 0.05 ** (1 / n), 2.7055 / (n + 2.7055))
    assert result.controls.drop.interval.high == pytest.approx(upper, abs=1e-4)
    assert result.families["recall"].drop.interval.method == "score"
    assert (result.controls.reason is None) is held


def test_copies_of_one_document_show_no_more_than_one():
    clustered = specificity(
        {"recall": unchanged(200, clusters=np.arange(200) // 10)}, resamples=200
    )
    assert not clustered.controls_held
    twenty = specificity({"recall": unchanged(20)}, resamples=200)
    assert clustered.controls.drop.interval == twenty.controls.drop.interval


def test_unchanged_graded_scores_have_no_interval_of_width_0():
    graded = np.linspace(0.2, 0.9, 30)
    result = specificity({"f": FamilyScores(graded, graded, side="control")}, resamples=200)
    interval = result.families["f"].drop.interval
    assert interval.low < 0 < interval.high
    assert not result.controls_held


def test_a_constant_ratio_has_no_interval_of_width_0():
    graded = np.linspace(0.2, 0.9, 40)
    result = specificity({"f": FamilyScores(graded, 0.9 * graded)}, resamples=200)
    drop = result.families["f"].drop
    assert drop.interval.method == "score"
    assert drop.interval.low < 0.1 - 0.02 < 0.1 + 0.02 < drop.interval.high


def test_sides_with_a_sparse_family_join_by_squares():
    families = {"a": scores(1, n=60), "b": unchanged(80)}
    result = specificity(families, resamples=300)
    one, two = (result.families[n].drop for n in families)
    found = result.specificity.interval
    assert found.method == "mover"
    middle = one.value - two.value
    assert middle - found.low == pytest.approx(
        math.hypot(one.value - one.interval.low, two.interval.high - two.value)
    )
    assert found.high - middle == pytest.approx(
        math.hypot(one.interval.high - one.value, two.value - two.interval.low)
    )


# -- few clusters ------------------------------------------------------------------------------

KINDS = ("drop", "difference", "baseline", "condition")


def needles(lost, size, base=None):
    """Binary scores: of each needle's `size` documents (or sizes) so many are lost."""
    sizes = np.broadcast_to(size, len(lost))
    right = sizes if base is None else base
    labels = np.repeat(np.arange(len(lost)), sizes)
    place = np.concatenate([np.arange(n) for n in sizes])
    before = place < np.asarray(right)[labels]
    return FamilyScores(before, before & (place >= np.asarray(lost)[labels]), labels)


def slow_few_clusters(family, kind, level):
    """(t interval, score interval at the design effect left) by loops over documents."""
    documents = [
        (float(b), float(c), int(g))
        for b, c, g in zip(family.baseline, family.condition, family.codes, strict=True)
    ]
    groups = sorted({g for *_, g in documents})
    count, n = len(groups), len(documents)

    def of(rows):
        return slow_statistic([(b, c) for b, c, _ in rows], kind)

    value = of(documents)
    left = [of([d for d in documents if d[2] != g]) for g in groups]
    error = math.sqrt((count - 1) / count * sum((x - np.mean(left)) ** 2 for x in left))
    weight = [sum(b if kind == "drop" else 1 for b, _, h in documents if h == g) for g in groups]
    freedom = sum(weight) ** 2 / sum(w**2 for w in weight) - 1
    t, z = stats.t.ppf((1 + level) / 2, freedom), stats.norm.ppf((1 + level) / 2)

    total = sum(b for b, *_ in documents)
    residual = {
        "drop": lambda b, c: (b - c - value * b) / total,
        "difference": lambda b, c: (b - c - value) / n,
        "baseline": lambda b, c: (b - value) / n,
        "condition": lambda b, c: (c - value) / n,
    }[kind]
    alone = math.fsum(residual(b, c) ** 2 for b, c, _ in documents)
    share = min(1.0, alone / error**2 * (z / t) ** 2)
    pairs = [(b, c) for b, c, _ in documents]
    cells = [share * sum(p == q for p in pairs) for q in ((1, 1), (1, 0), (0, 1), (0, 0))]
    kept, lost, gained, _ = cells
    if kind == "drop":
        low, high = ratio_interval(*cells, level=level)
        high = max(high, exact_upper(max(lost - gained, 0), kept + lost, level=level))
    elif kind == "difference":
        low, high = difference_interval(*cells, level=level)
    else:
        right = kept + (lost if kind == "baseline" else gained)
        low, high = proportion_interval(right, sum(cells), level=level)
    return (value - t * error, value + t * error), (low, high)


def few(seed, clusters, size, alike=0.1, gain=0.05):
    """Binary scores of a few clusters of unequal sizes, with losses and gains."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), rng.integers(size // 2, 2 * size, clusters))
    one, two = (rng.beta(p / alike, (1 - p) / alike, clusters)[labels] for p in (0.7, 0.5))
    base = rng.random(len(labels)) < one
    cond = np.where(base, rng.random(len(labels)) >= two, rng.random(len(labels)) < gain)
    return FamilyScores(base, cond, labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_few_clusters_take_the_wider_of_t_and_score_interval(kind, level):
    wider = {"t": 0, "score": 0}
    for seed, clusters in enumerate((4, 5, 6, 7, 8, 9)):
        family = few(seed, clusters, 40)
        by_t, by_score = slow_few_clusters(family, kind, level)
        sample = Sample.of(family, "f", resamples=200)
        found = estimate([sample], [1.0], kind, level=level)
        assert found.interval.method == "t"
        most = (math.inf, 1) if kind == "drop" else (1 if kind == "difference" else 0, 1)
        low = max(min(by_t[0], by_score[0]), -most[0])
        high = min(max(by_t[1], by_score[1]), most[1])
        assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=1e-9)
        z = stats.norm.ppf((1 + level) / 2)
        assert found.standard_error == pytest.approx((high - low) / (2 * z))
        for t, other in zip((by_t[0], -by_t[1]), (by_score[0], -by_score[1]), strict=True):
            wider["t" if t < other else "score"] += 1
    assert all(wider.values())  # either reaches further at times


def test_the_standard_error_and_the_clusters_that_count():
    sample = Sample.of(needles([10, 20, 15], [30, 30, 60]), "f", resamples=200)
    left = [1 - 55 / 90, 1 - 65 / 90, 1 - 30 / 60]
    spread = sum((x - sum(left) / 3) ** 2 for x in left)
    assert jackknife_error(sample, "drop") == pytest.approx(math.sqrt(2 / 3 * spread))
    assert effective_clusters(sample, "drop") == pytest.approx(120**2 / (2 * 30**2 + 60**2))
    uneven = Sample.of(needles([5, 5], 50, base=[10, 40]), "f", resamples=200)
    assert effective_clusters(uneven, "difference") == pytest.approx(2)
    assert effective_clusters(uneven, "drop") == pytest.approx(50**2 / (10**2 + 40**2))


def test_equal_clusters_count_as_independent_documents_and_no_more():
    family = needles([12] * 6, 20)
    found = specificity({"f": family}, resamples=200).families["f"].drop
    apart = ratio_interval(48, 72, 0, 0, level=0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx(
        (apart[0], max(apart[1], exact_upper(72, 120, level=0.95)))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9
    ),
    st.sampled_from(KINDS),
    st.sampled_from([0.9, 0.95]),
)
def test_few_clusters_are_never_narrower_than_their_documents_apart(parts, kind, level):
    sizes = [n for n, *_ in parts]
    base = [max(1, round(n * b)) for n, b, _ in parts]
    lost = [round(r * x) for r, (*_, x) in zip(base, parts, strict=True)]
    sample = Sample.of(needles(lost, sizes, base), "f", resamples=200)
    found = few_clusters_interval(sample, kind, level=level)
    if found is None:
        return
    apart = score_interval(sample, kind, 1.0, level=level)
    assert found[0] <= apart[0] + 1e-9
    assert found[1] >= apart[1] - 1e-9
    assert found[0] < sample.value(kind) < found[1]
    assert found[1] <= 1
    assert found[0] >= {"drop": -math.inf, "difference": -1}.get(kind, 0)


@pytest.mark.parametrize(
    "family",
    [
        needles([0, 0, 0, 25, 0, 0], 50),  # one of six changed
        needles([40, 0, 30, 0, 20, 0], 50),  # half of them
        needles([50] * 7, 50),  # nothing else left: are needles alike?
        needles([0] * 7, 50),
        needles([50, 0, 50, 50, 0, 50, 50], 50),  # wholly alike: 7 documents
        needles([1] * 4, 50),  # 4 losses
        FamilyScores(  # as many gains as losses
            ([1] * 40 + [0] * 10) * 6,
            ([0] * 2 + [1] * 38 + [0] * 8 + [1] * 2) * 6,
            sorted([*range(6)] * 50),
        ),
        FamilyScores([1] * 9, [0, 0, 0, 0, 0, 1, 1, 1, 1]),  # documents are their own clusters
    ],
)
def test_clusters_that_do_not_show_how_they_vary_count_as_documents(family):
    sample = Sample.of(family, "f", resamples=300)
    assert few_clusters_interval(sample, "drop", level=0.95) is None
    found = estimate([sample], [1.0], "drop").interval
    copies = score_interval(sample, "drop", sample.clusters / sample.documents, level=0.95)
    assert found.method == "score"
    assert found.low <= copies[0] + 1e-9
    assert found.high >= copies[1] - 1e-9


def test_few_needles_show_a_large_drop():
    rng, low = np.random.default_rng(4), []
    controls = {
        name: FamilyScores(np.ones(n), np.ones(n), side="control")
        for name, n in (("recall", 60), ("arithmetic", 200))
    }
    for _ in range(20):
        result = specificity(
            {"nolima": needles(rng.binomial(33, 0.6, 6), 33), **controls}, resamples=200
        )
        assert result.specificity.interval.method == "mover"
        low.append(result.specificity.interval.low)
    assert min(low) > 0.3


def test_a_claim_of_no_effect_counts_a_cluster_as_one_document():
    # Two of 200 documents lost in each of 8 needles: a drop of 0.01, but 8 needles show no less
    # than 8 documents do.
    family = needles([2] * 8, 200)
    sample = Sample.of(family, "f", resamples=300)
    assert estimate([sample], [1.0], "drop", level=0.9).interval.high < 0.05
    found = estimate([sample], [1.0], "drop", level=0.9, cautious=True).interval
    assert found.method == "score"
    assert found.high >= 1 - 0.05 ** (1 / 8)


# -- floors, ceilings, one cluster, empty sides ------------------------------------------------


def finite(value):
    if isinstance(value, dict):
        return all(finite(v) for v in value.values())
    if isinstance(value, list):
        return all(finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


def test_a_baseline_at_its_floor_has_no_drop_and_never_passes():
    zero = FamilyScores(np.zeros(50), np.ones(50), side="control")
    weak = FamilyScores([1] + [0] * 49, np.zeros(50), side="control")
    chance = FamilyScores([1, 0, 0, 0] * 12, [1, 0, 0, 0] * 12, floor=0.2, side="control")
    good = unchanged(300)
    for bad in (zero, weak, chance):
        result = specificity({"bad": bad, "good": good, "r": scores(1)}, resamples=300)
        family = result.families["bad"]
        assert family.status == FLOOR
        assert family.drop.value is None
        assert family.drop.interval is None
        assert family.difference.value is not None
        assert "floor" in family.drop.reason
        assert not result.controls_held
        assert "bad" in result.controls.reason
        assert result.control_drop.value == 0
        assert "bad" in result.control_drop.reason
        content = result.as_dict()
        assert finite(content)
        assert json.loads(json.dumps(content, allow_nan=False)) == content
    alone = specificity(
        {"bad": zero, "r": scores(1)},
        random=[{"bad": zero.baseline, "r": scores(1).baseline}],
        resamples=300,
    )
    assert alone.specificity.value is None
    assert alone.p_random is None
    assert not alone.controls_held
    assert finite(alone.as_dict())


def test_above_the_floor_the_same_scores_have_a_drop():
    family = FamilyScores([1, 0, 0, 0] * 12, [1, 0, 0, 0] * 12, floor=0.05)
    assert specificity({"f": family}, resamples=300).families["f"].status == OK


def test_the_ceiling_is_reported():
    result = specificity({"a": unchanged(20), "b": scores(1)}, resamples=200)
    assert result.families["a"].status == CEILING
    assert result.families["b"].status == OK
    assert result.families["a"].drop.value == 0


def test_one_cluster_has_no_interval_and_does_not_pass():
    result = specificity({"f": unchanged(300, clusters=["needle"] * 300)}, resamples=200)
    drop = result.families["f"].drop
    assert (drop.value, drop.interval, drop.detectable) == (0.0, None, None)
    assert "1 cluster" in drop.reason
    assert drop.documents_needed(0.1) is None
    assert not result.controls_held
    assert "1 cluster" in result.controls.reason


def test_an_empty_side_has_no_value():
    result = specificity({"f": scores(1)}, resamples=200)
    assert result.retrieval_drop.value is not None
    assert result.control_drop.value is None
    assert result.specificity.value is None
    assert not result.controls_held
    assert result.random is None
    assert finite(result.as_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1, 0]), r"score 2\.0 of document 1 is not in \[0, 1\]"),
        (([1, math.nan], [1, 0]), "score nan of document 1"),
        (([1, 0], [1, -1]), r"condition: score -1\.0"),
        (([1, 0], [1]), "condition: 1 values for 2 documents"),
        (([1, 0], [1, 0], ["a"]), "clusters: 1 values for 2 documents"),
        (([], []), "shape"),
        (([[1]], [[1]]), "shape"),
        ((["x"], [1]), "not numbers"),
        (([1], [1], None, "both"), "side='both'"),
        (([1], [1], None, "control", 1.0), r"floor=1\.0"),
    ],
)
def test_scores_that_cannot_be_used_say_why(arguments, message):
    with pytest.raises(DataError, match=message):
        FamilyScores(*arguments)


def test_settings_and_random_conditions_that_cannot_be_used_say_why():
    families = {"f": scores(1)}
    with pytest.raises(DataError, match="none given"):
        specificity({})
    with pytest.raises(DataError, match="resamples=5"):
        specificity(families, resamples=5)
    with pytest.raises(DataError, match=r"margin=1\.5"):
        specificity(families, margin=1.5)
    with pytest.raises(DataError, match=r"random\[0\]: no scores of f"):
        specificity(families, random=[{}], resamples=200)
    with pytest.raises(DataError, match=r"random\[1\]\[f\]: 2 scores for 40"):
        specificity(families, random=[{"f": np.ones(40)}, {"f": [1, 0]}], resamples=200)


# -- tests and sizes ---------------------------------------------------------------------------


def test_mcnemar_is_the_two_sided_binomial():
    assert mcnemar(0, 0) == 1
    assert mcnemar(8, 1) == pytest.approx(2 * sum(math.comb(9, i) for i in (0, 1)) / 2**9)
    family = FamilyScores([1] * 9 + [0], [0] * 8 + [1, 1])
    result = specificity({"f": family}, resamples=200).families["f"]
    assert (result.lost, result.gained, result.test) == (8, 1, "mcnemar")
    assert result.p == pytest.approx(mcnemar(8, 1))


def test_clustered_documents_are_counted_by_cluster():
    # Cluster a loses 3, b loses 1 and gains 2, c gains 1 and loses 1.
    base, cond = [1, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]
    result = specificity({"f": FamilyScores(base, cond, list("aaabbbcc"))}, resamples=200)
    family = result.families["f"]
    assert (family.lost, family.gained) == (5, 3)
    assert family.p == mcnemar(1, 1) == 1
    assert family.test == "sign test over clusters"
    assert specificity({"f": scores(1)}, resamples=200).families["f"].p is None


def test_holm_steps_down():
    assert holm({"a": 0.01, "b": 0.04, "c": None, "d": 0.03}) == {
        "a": pytest.approx(0.03),
        "b": pytest.approx(0.06),
        "c": None,
        "d": pytest.approx(0.06),
    }
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    with pytest.raises(DataError, match=r"p-value of 'a': 1\.5"):
        holm({"a": 1.5})


def test_holm_across_conditions_counts_every_family():
    results = {
        k: specificity(
            {"a": scores(k, binary=True), "b": scores(k + 9, binary=True)}, resamples=200
        )
        for k in (1, 2)
    }
    across = holm_across(results)
    flat = {(k, n): f.p for k, r in results.items() for n, f in r.families.items()}
    expected = holm(flat)
    assert {(k, n): f.p_holm for k, r in across.items() for n, f in r.families.items()} == expected
    smallest = min(flat, key=flat.get)
    assert expected[smallest] == pytest.approx(min(1, 4 * flat[smallest]))
    inside = results[smallest[0]].families[smallest[1]]
    assert inside.p_holm == pytest.approx(min(1, 2 * inside.p))


def test_random_control():
    retrieval, control = scores(1), scores(2, n=50, drop=0.1, side="control")
    families = {"r": retrieval, "c": control}
    random = [
        {"r": retrieval.baseline, "c": control.baseline},
        {"r": retrieval.condition, "c": control.condition},
        {"r": retrieval.baseline * 0.9, "c": control.baseline * 0.5},
    ]
    result = specificity(families, random=random, resamples=200)
    assert result.random.values == pytest.approx([0, result.specificity.value, 0.1 - 0.5])
    assert result.random_specificity == pytest.approx(np.mean(result.random.values))
    assert result.p_random == (1 + 1) / (1 + 3)
    assert permutation_p(1.0, [0.2] * 19) == 1 / 20
    # Equal but for rounding counts as reached.
    assert permutation_p(0.1 + 0.2, [0.3]) == 1.0


def test_detectable_effect_and_the_documents_for_less():
    assert detectable_effect(0.1) == pytest.approx((1.959964 + 0.841621) * 0.1, abs=1e-6)
    assert detectable_effect(0.1, level=0.9, power=0.5) == pytest.approx(0.1644854, abs=1e-6)
    asked = detectable_effect(0.1) / 2
    assert documents_needed(50, 0.1, asked) == 200
    assert documents_needed(50, 0.1, -asked) == 200
    found = specificity({"f": scores(1)}, resamples=200).families["f"].drop
    assert found.documents_needed(found.detectable) == 40
    with pytest.raises(DataError, match="effect=0"):
        documents_needed(50, 0.1, 0)
    for tiny in (1e-200, 2.2e-309, 5e-324):
        assert documents_needed(120, 0.05, tiny) == 10**18


def test_documents_for_less_where_nothing_changed():
    assert documents_needed(40, 0.1, detectable_effect(0.1) / 3, constant=True) == 120
    results = {
        n: specificity({"a": unchanged(n), "b": unchanged(n)}, resamples=200).controls
        for n in (20, 60)
    }
    less, many = (results[n].drop for n in (20, 60))
    assert less.constant
    assert not results[20].held
    needed = less.documents_needed(0.05)
    assert 2 * 41 <= needed <= 120  # 41 in each do, if nothing changes again
    assert results[60].held
    assert many.documents_needed(0.05) == pytest.approx(needed, rel=0.03)
    changed = specificity({"a": unchanged(20), "b": scores(1)}, resamples=200)
    assert not changed.specificity.constant
    assert changed.families["a"].drop.constant
    assert changed.families["a"].baseline.constant
    assert not changed.families["b"].baseline.constant


def test_estimates_say_how_many_clusters_their_documents_come_in():
    families = {"a": needles([12] * 6, 20), "b": unchanged(80)}
    result = specificity(families, resamples=200)
    assert result.retrieval_drop.clusters == 6
    assert (result.specificity.clusters, result.specificity.documents) == (86, 200)
    content = result.as_dict()["specificity"]
    assert (content["clusters"], content["constant"]) == (86, False)
    assert Estimate(0.5).clusters == 0
    one = specificity({"f": unchanged(30, clusters=["needle"] * 30)}, resamples=200)
    assert one.families["f"].drop.clusters == 1


# -- invariants --------------------------------------------------------------------------------

unit = st.floats(0, 1, width=16)
families_ = st.integers(12, 30).flatmap(
    lambda n: st.tuples(
        st.lists(unit, min_size=n, max_size=n),
        st.lists(unit, min_size=n, max_size=n),
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
    )
)


@settings(max_examples=30, deadline=None)
@given(families_, families_)
def test_swapping_the_sides_negates_specificity(one, two):
    def run(first, second):
        pair = {
            "a": FamilyScores(*one, side=first),
            "b": FamilyScores(*two, side=second),
        }
        return specificity(pair, resamples=200)

    there, back = run("retrieval", "control"), run("control", "retrieval")
    for name in ("specificity", "specificity_difference"):
        x, y = getattr(there, name), getattr(back, name)
        if x.value is None:
            assert y.value is None
            continue
        assert x.value == pytest.approx(-y.value, abs=1e-12)
        assert (x.interval is None) == (y.interval is None)
        if x.interval:
            assert x.interval.low <= x.value + 1e-9 or x.interval.method == "percentile"
            assert (x.interval.low, x.interval.high) == pytest.approx(
                (-y.interval.high, -y.interval.low), abs=1e-7
            )
    assert finite(there.as_dict())


@settings(max_examples=30, deadline=None)
@given(families_, families_)
def test_a_condition_equal_to_the_baseline_has_specificity_0(one, two):
    families = {
        "a": FamilyScores(one[0], one[0], one[2]),
        "b": FamilyScores(two[0], two[0], two[2], side="control"),
    }
    result = specificity(families, resamples=200)
    assert result.specificity_difference.value == 0
    if result.specificity.value is not None:
        assert result.specificity.value == 0
        if result.specificity.interval:
            assert result.specificity.interval.low < 0 < result.specificity.interval.high
    assert not result.controls_held  # at most 30 documents


@settings(max_examples=30, deadline=None)
@given(families_, st.sampled_from([0.25, 2.0, 64.0]))
def test_the_unit_of_the_scores_scales_differences_only(one, unit):
    base, cond, labels = one
    plain = specificity({"a": FamilyScores(base, cond, labels)}, resamples=200).families["a"]
    scaled = specificity(
        {"a": FamilyScores(np.multiply(base, unit), np.multiply(cond, unit), labels, ceiling=unit)},
        resamples=200,
    ).families["a"]
    assert scaled.drop == plain.drop
    assert scaled.difference.value == pytest.approx(unit * plain.difference.value)
    if plain.difference.interval:
        assert scaled.difference.interval.high == pytest.approx(
            unit * plain.difference.interval.high
        )


@settings(max_examples=30, deadline=None)
@given(families_, st.randoms(use_true_random=False))
def test_the_order_of_documents_and_the_labels_type_do_not_matter(one, random):
    order = list(range(len(one[0])))
    random.shuffle(order)
    plain = specificity({"a": FamilyScores(*one)}, resamples=200).families["a"]
    moved = specificity(
        {
            "a": FamilyScores(
                *([x[i] for i in order] for x in one[:2]), [f"{one[2][i]}" for i in order]
            )
        },
        resamples=200,
    ).families["a"]
    assert moved.status == plain.status
    assert moved.difference.value == pytest.approx(plain.difference.value)
    if plain.difference.interval:
        assert moved.difference.interval.low == pytest.approx(plain.difference.interval.low)


# -- simulation --------------------------------------------------------------------------------

REPLICATIONS = 400
RESAMPLES = 1000


def labels_of(rng, n, mean):
    """Cluster labels of n documents, cluster sizes 1 + Poisson(mean - 1)."""
    sizes = 1 + rng.poisson(mean - 1, n)
    return np.repeat(np.arange(n), sizes)[:n]


def graded(rng, n, drop, mean):
    """Continuous scores; clusters differ in level and in drop, whose expectation is `drop`."""
    label = labels_of(rng, n, mean)
    level = rng.beta(3, 2, n)[label]
    base = rng.beta(4 * level + 0.3, 4 * (1 - level) + 0.3)
    share = rng.beta(6 * drop, 6 * (1 - drop), n)[label]
    return base, base * (1 - rng.beta(5 * share + 1e-9, 5 * (1 - share) + 1e-9)), label


def answers(rng, n, right, drop, gain, mean):
    """Binary scores: P(right) of the baseline, P(gained), and P(lost) = drop * right + gain."""
    label = labels_of(rng, n, mean)
    p = rng.beta(6 * right, 6 * (1 - right), n)[label] if right < 1 else np.ones(n)
    base = rng.random(n) < p
    loss = drop + gain / right
    if mean > 1:
        loss = rng.beta(4 * loss, 4 * (1 - loss), n)[label]
    u = rng.random(n)
    return base, np.where(base, u > loss, u < gain / max(1 - right, 1e-9)), label


def simulated(seed, makers, weights, level=0.95, cautious=False, replications=REPLICATIONS):
    """(replications, 2) interval ends of the weighted drops."""
    rng = np.random.default_rng(seed)
    ends = []
    for r in range(replications):
        samples = [
            Sample.of(FamilyScores(*make(rng, *args)), str(i), resamples=RESAMPLES, seed=r)
            for i, (make, *args) in enumerate(makers)
        ]
        found = estimate(samples, weights, "drop", level=level, cautious=cautious).interval
        ends.append((found.low, found.high))
    return np.array(ends)


@pytest.mark.parametrize(
    ("makers", "weights", "truth"),
    [
        ([(graded, 60, 0.3, 3)], [1.0], 0.3),
        ([(graded, 120, 0.5, 4)], [1.0], 0.5),
        ([(answers, 60, 0.7, 0.4, 0.02, 1)], [1.0], 0.4),
        ([(answers, 150, 0.7, 0.4, 0.02, 3)], [1.0], 0.4),
        ([(answers, 100, 0.95, 0.05, 0.02, 1)], [1.0], 0.05),
        ([(graded, 80, 0.5, 3), (graded, 60, 0.1, 2)], [1.0, -1.0], 0.4),
        ([(answers, 80, 0.6, 0.5, 0.05, 2), (answers, 100, 0.95, 0.02, 0.01, 1)], [1, -1], 0.48),
        (
            [
                (graded, 100, 0.5, 3),
                (answers, 100, 0.6, 0.4, 0.02, 3),
                (answers, 150, 0.9, 0.05, 0.03, 1),
                (answers, 200, 0.97, 0.03, 0.01, 1),
            ],
            [0.5, 0.5, -0.5, -0.5],
            0.41,
        ),
    ],
)
def test_coverage_of_the_95_percent_interval(makers, weights, truth):
    ends = simulated(11, makers, weights, replications=2 * REPLICATIONS)
    covered = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    assert 0.93 <= covered <= 0.97


def few_answers(rng, sizes, right, drop, alike):
    """Binary scores of clusters of given sizes, whose intraclass correlation is `alike`."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    shares = [np.full(len(sizes), p) for p in (right, drop)]
    if alike:
        more = 1 / alike - 1
        shares = [rng.beta(p * more, (1 - p) * more, len(sizes)) for p in (right, drop)]
    base = rng.random(len(label)) < shares[0][label]
    return base, base & (rng.random(len(label)) >= shares[1][label]), label


UNEQUAL = (10, 20, 30, 40, 50, 60)


@pytest.mark.parametrize(
    ("makers", "weights", "truth", "most"),
    [
        ([(few_answers, [33] * 6, 0.95, 0.6, 0.1)], [1.0], 0.6, 0.97),
        ([(few_answers, [200] * 8, 0.95, 0.3, 0.1)], [1.0], 0.3, 0.97),
        ([(few_answers, UNEQUAL, 0.6, 0.6, 0.1)], [1.0], 0.6, 0.985),
        ([(few_answers, [30] * 9, 0.6, 0.3, 0.3)], [1.0], 0.3, 0.985),
        ([(few_answers, [33] * 6, 0.95, 0.6, 0.0)], [1.0], 0.6, 0.99),
        # Few clusters, lopsided: the score interval stands in, and covers more.
        ([(few_answers, [200] * 6, 0.95, 0.1, 0.3)], [1.0], 0.1, 1.0),
        ([(few_answers, [200] * 6, 0.95, 0.9, 0.1)], [1.0], 0.9, 1.0),
        (
            [
                (few_answers, [50] * 7, 0.9, 0.6, 0.1),
                (answers, 60, 0.95, 0.02, 0.0, 1),
                (answers, 200, 0.95, 0.02, 0.0, 1),
            ],
            [1.0, -0.5, -0.5],
            0.58,
            0.985,
        ),
    ],
)
def test_coverage_with_few_clusters(makers, weights, truth, most):
    ends = simulated(14, makers, weights)
    covered = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    assert 0.93 <= covered <= most


@pytest.mark.parametrize(
    "makers",
    [
        [(answers, 60, 1.0, 0.05, 0.0, 1)],
        [(answers, 100, 0.97, 0.05, 0.01, 1)],
        [(answers, 200, 0.95, 0.05, 0.03, 1)],
        [(answers, 150, 0.8, 0.05, 0.05, 3)],
        [(graded, 100, 0.05, 3)],
        [(answers, 120, 0.95, 0.05, 0.02, 1), (answers, 120, 0.8, 0.05, 0.05, 1)],
        [(answers, 100, 1.0, 0.0, 0.0, 1), (answers, 100, 1.0, 0.1, 0.0, 1)],
        [(few_answers, [200] * 8, 0.9, 0.05, 0.1)],
        [(few_answers, [200] * 9, 0.9, 0.05, 0.0), (answers, 200, 1.0, 0.05, 0.0, 1)],
    ],
)
def test_controls_at_the_margin_pass_at_most_once_in_twenty(makers):
    ends = simulated(12, makers, [1 / len(makers)] * len(makers), level=0.9, cautious=True)
    held = int((ends[:, 1] < 0.05).sum())
    # More passes than 400 trials at 5% give with probability 0.99 would be a liberal gate.
    assert held <= stats.binom.ppf(0.99, REPLICATIONS, 0.05)


def test_controls_that_hold_pass():
    ends = simulated(13, [(answers, 200, 0.95, 0.0, 0.005, 1)], [1.0], level=0.9, cautious=True)
    assert np.mean(ends[:, 1] < 0.05) > 0.9


def test_what_a_mean_leaves_out_is_of_its_own_side():
    one, none = [1.0, 0.0] * 10, [0.0] * 20
    found = specificity(
        {
            "nolima": FamilyScores(none, none),
            "musique": FamilyScores(one, none),
            "parametric": FamilyScores(one, one, side="control"),
            "arithmetic": FamilyScores(none, none, side="control"),
        },
        resamples=100,
    )
    said = {name: getattr(found, name).reason for name in ("retrieval_drop", "control_drop")}
    assert ("nolima" in said["retrieval_drop"], "arithmetic" in said["retrieval_drop"]) == (1, 0)
    assert ("nolima" in said["control_drop"], "arithmetic" in said["control_drop"]) == (0, 1)
    assert "nolima, arithmetic" in found.specificity.reason
