"""Rows: a baseline, a condition against its baseline, random conditions put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_eval_locos.reporting.board import NO_BASELINE, Cell, RandomResult, Row
from lm_eval_locos.reporting.cells import (
    Settings,
    compared,
    families_of,
    family_scores,
    filled,
    plain_cell,
)
from lm_eval_locos.reporting.pairing import Entry, both
from lm_eval_locos.reporting.random_control import (
    average,
    unpaired_row,
    usable,
    values_of,
    with_drops,
)
from lm_eval_locos.reporting.results import Run
from lm_eval_locos.reporting.text import SIDES
from lm_eval_locos.statistics import Estimate, FamilyScores


def baseline_row(entry: Entry, settings: Settings, *, model: str, ranking: str) -> Row:
    """The row of a baseline: scores, with intervals where there are samples."""
    cells = {}
    for family, tasks in families_of(entry).items():
        cell = plain_cell(family, tasks, settings)
        pairs = [pair for task in tasks for pair in both(task, task, cell.metric)]
        if pairs and all(task.samples is not None for task in tasks):
            scores = family_scores(family, pairs, cell.metric)
            if scores is not None:
                result = settings.statistics({family: scores}).families[family]
                cell = replace(cell, score=result.condition, documents=result.documents)
            cell = replace(cell, pairs=tuple(pairs))
        cells[family] = cell
    return _row(entry, cells, model, ranking)


def condition_row(
    entry: Entry,
    baselines: Sequence[Run],
    random: Sequence[Entry],
    settings: Settings,
    warnings: list[str],
    *,
    model: str,
    ranking: str,
) -> Row:
    """The row of a condition.

    Args:
        entry: the condition.
        baselines: runs of the same model without ablation, newest first.
        random: its random control, an entry a seed.
        settings: of the statistics.
        warnings: gets what to tell the user.
        model: label.
        ranking: label.
    """
    cells: dict[str, Cell] = {}
    scores: dict[str, FamilyScores] = {}
    for family, tasks in families_of(entry).items():
        cells[family], found = compared(family, tasks, entry, baselines, settings)
        if found is not None:
            scores[family] = found
    row = _row(entry, cells, model, ranking)
    for family in scores.keys() - SIDES.keys():  # no part of specificity
        one = settings.statistics({family: scores[family]})
        cells[family] = filled(cells[family], one, family)
    ours = {f: c for f, c in cells.items() if f in SIDES and c.baseline is not None}
    whole = {family: scores[family] for family in ours if family in scores}
    if not ours:
        note = (NO_BASELINE,) if not baselines else ()
        return replace(row, cells=cells, notes=note)
    seeds = usable(entry, random, ours, warnings)
    if set(whole) == set(ours):
        samples = [{f: values_of(seed, cells[f]) for f in whole} for seed in seeds]
        result = settings.statistics(whole, random=samples)
        for family in whole:
            cells[family] = filled(cells[family], result, family)
        control = result.random and RandomResult(
            seeds[0].condition.kind,
            result.random.seeds,
            result.random.specificity,
            result.random.values,
            result.random.p,
        )
        return replace(
            row,
            cells=cells,
            retrieval_drop=result.retrieval_drop,
            control_drop=result.control_drop,
            specificity=result.specificity,
            controls=result.controls,
            controls_held=result.controls.held,
            random=control,
        )
    for family in whole:  # some families have samples, others not
        one = settings.statistics({family: whole[family]})
        cells[family] = filled(cells[family], one, family)
    return unpaired_row(replace(row, cells=cells), seeds, settings)


def random_row(
    seeds: Sequence[Entry],
    baselines: Sequence[Run],
    settings: Settings,
    *,
    model: str,
    ranking: str,
) -> Row:
    """One row for random conditions that differ in their seed: means over the seeds."""
    seeds = sorted(seeds, key=lambda entry: entry.condition.seed)
    every = [
        {
            family: compared(family, tasks, entry, baselines, settings, intervals=False)[0]
            for family, tasks in families_of(entry).items()
        }
        for entry in seeds
    ]
    shared = [family for family in every[0] if all(family in cells for cells in every)]
    cells, spread = {}, {}
    for family in shared:
        mine = [cells[family] for cells in every]
        values = [cell.score.value for cell in mine]
        spread[family] = (min(values), max(values))
        drops = [cell.drop.value for cell in mine if cell.drop]
        cells[family] = replace(
            mine[0],
            score=Estimate(math.fsum(values) / len(values), documents=mine[0].documents or 0),
            drop=average(drops) if drops else None,
            difference=average([c.difference.value for c in mine if c.difference])
            if drops
            else None,
            pairs=(),
        )
    last = _row(seeds[0], cells, model, ranking)
    row = replace(
        last,
        condition=f"{seeds[0].condition.kind}:{seeds[0].k}",
        heads=(),
        seeds=tuple(entry.condition.seed for entry in seeds),
        spread=spread,
        runs=tuple(run.path for entry in seeds for run in entry.runs),
    )
    return with_drops(row, "mean over seeds") if baselines else replace(row, notes=(NO_BASELINE,))


def _row(entry: Entry, cells: Mapping[str, Cell], model: str, ranking: str) -> Row:
    run, baseline = entry.run, entry.condition.kind == "baseline"
    by_ranking = entry.condition.needs_ranking
    heads = () if baseline else tuple(map(str, run.locos.get("heads") or ()))
    return Row(
        model=model,
        ranking=ranking,
        ranking_path=run.ranking.get("path") if by_ranking else None,
        ranking_sha256=run.ranking.get("sha256") if by_ranking else None,
        condition=str(entry.condition),
        kind=entry.condition.kind,
        k=0 if baseline else entry.k,
        site=None if baseline else run.locos.get("site"),
        mode=None if baseline else run.locos.get("mode"),
        heads=heads,
        cells=cells,
        bundled=any(cell.bundled for cell in cells.values()),
        runs=tuple(run.path for run in entry.runs),
    )
