"""Rows of a leaderboard: every condition against the baseline of the same model and documents.

    >>> board = leaderboard(load(["out/"]))
    >>> [(row.ranking, row.condition, row.specificity.value) for row in board.rows]
    [('', 'baseline', None), ('locos', 'top:20', 0.41), ('locos', 'top:50', 0.55)]

Numbers are those of `lm_eval_locos.statistics`. Without sample files drops are differences of means
and have no interval; such cells are marked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import FAMILIES
from lm_eval_locos.reporting.board import Board, Row, group_key
from lm_eval_locos.reporting.cells import Settings
from lm_eval_locos.reporting.pairing import (
    RANDOM,
    Entry,
    baseline_of,
    describe_models,
    entries,
    model_differences,
    model_key,
)
from lm_eval_locos.reporting.results import Run
from lm_eval_locos.reporting.rows import baseline_row, condition_row, random_row
from lm_eval_locos.reporting.task_rows import is_own_row, own_rows
from lm_eval_locos.statistics import holm

PREDICT_ONLY = "bypass"
"""What the harness calls the metric of ``--predict_only``; its value, 999, is no score."""

KINDS = ("baseline", "top", "bottom", "heads", "layer-random", "random")


def leaderboard(
    runs: Sequence[Run],
    *,
    baselines: Sequence[Run] = (),
    metrics: Mapping[str, str] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
    margin: float = 0.05,
) -> Board:
    """The leaderboard of these runs.

    Args:
        runs: from `results.load`.
        baselines: to compare with; by default those among `runs` that ablate nothing.
        metrics: metric to show by family; by default a task's first.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        level: confidence of the intervals.
        margin: largest control drop that counts as held.

    Raises:
        DataError: runs that cannot be compared; the message says which and why.
    """
    warnings: list[str] = []
    settings = Settings(dict(metrics or {}), resamples, seed, level, margin)
    named = bool(baselines)
    for run in baselines:
        if not run.is_baseline:
            raise DataError(
                f"--baseline {run.path} ran under {run.condition}. Give a run without ablation: "
                "--model hf, or locos-ablated with num_heads=0."
            )
    known = {run.sha256 for run in baselines}
    chosen = [run for run in (baselines or runs) if run.is_baseline and _compared(run)]
    chosen.sort(key=lambda run: (run.date, run.path))
    others = [run for run in runs if run.sha256 not in known]
    everything = [*baselines, *(run for run in others if not (named and run.is_baseline))]
    everything.sort(key=lambda run: (run.date, run.path))
    warnings += filter(None, map(_without_scores, everything))
    models = describe_models(everything)
    rankings = _ranking_names(everything)

    def labels(entry: Entry) -> dict[str, str]:
        sha = str(entry.run.ranking.get("sha256"))
        ranking = rankings.get(sha, "") if entry.condition.needs_ranking else ""
        return {"model": models[model_key(entry.run)], "ranking": ranking}

    rows: list[Row] = []
    found = entries(filter(None, map(_compared, everything)), warnings)
    drawn: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    for entry in found:
        if entry.condition.kind in RANDOM:
            drawn[_draw_key(entry)].append(entry)
    for entry in found:
        if entry.condition.kind == "baseline":
            rows.append(baseline_row(entry, settings, **labels(entry)))
            continue
        if entry.condition.kind in RANDOM:
            continue
        mine = baseline_of(entry, chosen, named)
        if not mine:
            warnings.append(_no_baseline(entry, chosen))
        draws = [drawn.get(_draw_key(entry, kind), []) for kind in ("layer-random", "random")]
        control = max(draws, key=len) if entry.condition.kind == "top" else []
        rows.append(condition_row(entry, mine, control, settings, warnings, **labels(entry)))
    for seeds in drawn.values():
        mine = baseline_of(seeds[0], chosen, named)
        rows.append(random_row(seeds, mine, settings, **labels(seeds[0])))
    for run in everything:
        rows += own_rows(_scored(run), models[model_key(run)], rankings)
    rows = _adjusted(rows)
    if not rows:
        raise DataError(
            "none of the results files has a score. Run them again to their end, without "
            "--predict_only."
        )
    rows.sort(key=_order)
    families = {family for row in rows for family in row.cells}
    extra = tuple(sorted(families - set(FAMILIES)))
    return Board(
        rows=tuple(rows),
        families=tuple(f for f in FAMILIES if f in families) + extra,
        warnings=tuple(dict.fromkeys(warnings)),
        runs=tuple(everything),
        resamples=resamples,
        seed=seed,
        level=level,
        margin=margin,
    )


def _compared(run: Run) -> Run | None:
    """The run without tasks that make rows of their own or have no score; None if none is left."""
    scored = _scored(run).tasks.items()
    kept = {name: t for name, t in scored if t.metrics and not is_own_row(t)}
    return replace(run, tasks=kept) if kept else None


def _scored(run: Run) -> Run:
    """The run without tasks that were answered but not scored."""
    kept = {name: task for name, task in run.tasks.items() if PREDICT_ONLY not in task.metrics}
    return replace(run, tasks=kept)


def _without_scores(run: Run) -> str | None:
    """What to say of a run's tasks that have answers alone."""
    names = [name for name in run.tasks if name not in _scored(run).tasks]
    if not names:
        return None
    return (
        f"{run.path} ({run.condition}): no score for {', '.join(names)} (--predict_only). Run it "
        "again without --predict_only."
    )


def _draw_key(entry: Entry, kind: str | None = None) -> tuple[object, ...]:
    """Equal for random conditions that differ in their seed, and the condition they control."""
    kind = kind or entry.condition.kind
    return (model_key(entry.run), kind, entry.k, *entry.method)


def _no_baseline(entry: Entry, chosen: Sequence[Run]) -> str:
    what = f"{entry.run.model}, {entry.condition}: no baseline, so there are no drops."
    if not chosen:
        return (
            f"{what} Run the same tasks with --model hf, or with num_heads=0, and give its files "
            "too."
        )
    differences = "; ".join(model_differences(chosen[-1], entry.run))
    return f"{what} {chosen[-1].path} is of another model: {differences}."


def _ranking_names(runs: Sequence[Run]) -> dict[str, str]:
    """Name by hash: the method, else the file's name; with the hash where two have the same."""
    methods: dict[str, str] = {}
    for run in runs:
        if sha := run.ranking.get("sha256"):
            method = str(run.locos.get("method") or "unknown")
            stem = PurePath(str(run.ranking.get("path"))).stem
            methods[str(sha)] = stem if method == "unknown" else method
    names = list(methods.values())
    return {
        sha: f"{name} {sha[:7]}" if names.count(name) > 1 else name for sha, name in methods.items()
    }


def _adjusted(rows: Sequence[Row]) -> list[Row]:
    """The rows with p-values adjusted over the k (and families) of one ranking (Holm)."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_key(row)].append(row)
    adjusted = []
    for group in groups.values():
        families = holm(
            {(i, f): cell.p for i, row in enumerate(group) for f, cell in row.cells.items()}
        )
        random = holm({i: row.random.p if row.random else None for i, row in enumerate(group)})
        for i, row in enumerate(group):
            cells = {f: replace(cell, p_holm=families[i, f]) for f, cell in row.cells.items()}
            control = row.random and replace(row.random, p_holm=random[i])
            adjusted.append(replace(row, cells=cells, random=control))
    return adjusted


def _order(row: Row) -> tuple[object, ...]:
    kind = KINDS.index(row.kind) if row.kind in KINDS else len(KINDS)
    return (
        row.model,
        kind > 0,
        row.ranking,
        str(row.site),
        str(row.mode),
        row.source,
        kind,
        row.k,
        row.condition,
        row.runs,
    )
