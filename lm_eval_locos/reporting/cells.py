"""One family of one row: its score, and its drop against the baseline.

Everything with an interval comes from `lm_eval_locos.statistics`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lm_eval_locos.errors import DataError
from lm_eval_locos.reporting.board import UNPAIRED, Cell
from lm_eval_locos.reporting.pairing import Entry, both, match
from lm_eval_locos.reporting.results import Run, Task
from lm_eval_locos.reporting.text import SIDES
from lm_eval_locos.specificity_plan import MEMBERS
from lm_eval_locos.statistics import (
    FLOOR,
    OK,
    Estimate,
    FamilyScores,
    SpecificityResult,
    specificity,
)


@dataclass(frozen=True)
class Settings:
    """What the numbers are computed with; see `leaderboard.leaderboard`."""

    metrics: Mapping[str, str]
    resamples: int
    seed: int
    level: float
    margin: float

    def statistics(self, families: Mapping[str, FamilyScores], **more: object) -> SpecificityResult:
        """`specificity` with these settings."""
        return specificity(
            families,
            resamples=self.resamples,
            seed=self.seed,
            level=self.level,
            margin=self.margin,
            **more,
        )


def families_of(entry: Entry) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = defaultdict(list)
    for name in sorted(entry.tasks):
        found[entry.tasks[name].family].append(entry.tasks[name])
    return dict(found)


def chosen_metric(task: Task, metrics: Mapping[str, str]) -> str:
    """The metric that a task is shown by: the one asked for, or its family's usual one."""
    if task.family in metrics:
        return metrics[task.family]
    usual = MEMBERS[task.family].metric if task.family in MEMBERS else ""
    if usual in task.metrics or usual in task.not_finite:
        return usual
    return next(iter((*task.metrics, *task.not_finite)), usual)


def metric_of(family: str, tasks: Sequence[Task], settings: Settings) -> str:
    chosen = chosen_metric(tasks[0], settings.metrics)
    for task in tasks:
        if chosen in task.not_finite:
            others = f"--metric {family}={next(iter(task.metrics), 'NAME')}"
            raise DataError(
                f"{task.name}: {chosen} is NaN or infinite in a results file. Run it again, leave "
                f"the file out, or choose another metric with {others}."
            )
        if chosen not in task.metrics:
            raise DataError(
                f"{task.name} has no metric {chosen!r}; it has {', '.join(task.metrics)}. "
                f"Choose one with --metric {family}=NAME."
            )
    return chosen


def mean_of(tasks: Sequence[Task], metric: str) -> float:
    """The mean over the documents of all tasks, from the tasks' means."""
    weights = [task.documents or 1 for task in tasks]
    scores = [task.metrics[metric] for task in tasks]
    return math.fsum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)


def documents_of(tasks: Sequence[Task]) -> int | None:
    counts = [task.documents for task in tasks]
    return None if None in counts else sum(c for c in counts if c is not None)


def plain_cell(family: str, tasks: Sequence[Task], settings: Settings) -> Cell:
    """The score alone, as the harness computed it."""
    metric = metric_of(family, tasks, settings)
    error = tasks[0].stderr.get(metric) if len(tasks) == 1 else None
    count = documents_of(tasks)
    return Cell(
        tasks=tuple(task.name for task in tasks),
        metric=metric,
        documents=count,
        score=Estimate(mean_of(tasks, metric), standard_error=error, documents=count or 0),
        bundled=any(task.bundled for task in tasks),
    )


def compared(
    family: str,
    tasks: Sequence[Task],
    entry: Entry,
    baselines: Sequence[Run],
    settings: Settings,
    intervals: bool = True,
) -> tuple[Cell, FamilyScores | None]:
    """A family's cell, and its scores where every document of the baseline has its like."""
    cell = plain_cell(family, tasks, settings)
    matched = [match(task.name, entry, baselines) for task in tasks]
    bases = [base for base in matched if base is not None]
    if len(bases) < len(tasks):
        return cell, None
    for base in bases:
        metric_of(family, [base], replace(settings, metrics={family: cell.metric}))
    pairs = [
        pair
        for base, task in zip(bases, tasks, strict=True)
        for pair in both(base, task, cell.metric)
    ]
    sampled = all(t.samples is not None for t in (*bases, *tasks)) and bool(pairs)
    scores = family_scores(family, pairs, cell.metric) if sampled else None
    if scores is not None:
        before, after = float(scores.baseline.mean()), float(scores.condition.mean())
        documents: int | None = len(pairs)
    else:
        before, after = mean_of(bases, cell.metric), mean_of(tasks, cell.metric)
        documents = cell.documents
    all_documents = sum(len(task.samples or ()) for task in tasks)
    cell = replace(
        cell,
        documents=documents,
        score=replace(cell.score, value=after),
        baseline=Estimate(before, documents=documents or 0),
        difference=Estimate(before - after, reason=None if scores else UNPAIRED),
        drop=_drop(before, after, floor_of(family, cell.metric), None if scores else UNPAIRED),
        status=OK if before > floor_of(family, cell.metric) else FLOOR,
        skipped=all_documents - len(pairs) if scores is not None else 0,
        pairs=tuple(pairs) if sampled and intervals else (),
    )
    return cell, scores


def _drop(before: float, after: float, floor: float, reason: str | None) -> Estimate:
    if before > floor:
        return Estimate((before - after) / before, reason=reason)
    return Estimate(None, reason=f"{FLOOR}: the baseline {before:.3g} is not above {floor:.3g}.")


def family_scores(family: str, pairs: Sequence[tuple], metric: str) -> FamilyScores | None:
    """The statistics' input; None for a task of another kind whose metric is no share."""
    before, after = ([pair[i].scores[metric] for pair in pairs] for i in (0, 1))
    if family not in SIDES and not all(0 <= x <= 1 for x in (*before, *after)):
        return None
    clusters = [pair[0].cluster for pair in pairs]
    side = SIDES.get(family, "control")
    floor = floor_of(family, metric)
    return FamilyScores(before, after, clusters=clusters, side=side, floor=floor)


def floor_of(family: str, metric: str) -> float:
    """What guessing scores, known for a family's usual metric; else 0."""
    member = MEMBERS.get(family)
    return member.floor if member and member.metric == metric else 0.0


def filled(cell: Cell, result: SpecificityResult, family: str) -> Cell:
    of = result.families[family]
    return replace(
        cell,
        documents=of.documents,
        score=of.condition,
        baseline=of.baseline,
        drop=of.drop,
        difference=of.difference,
        status=of.status,
        paired=True,
        p=of.p,
        p_holm=of.p_holm,
        lost=of.lost,
        gained=of.gained,
    )
