"""Rows of tasks that compare baseline and condition themselves, such as ``locos_specificity``.

Such a task's metrics are specificity, retrieval_drop, control_drop, controls_held, p_random and,
per family, ``FAMILY_baseline``, ``FAMILY_ablated`` and ``FAMILY_drop``. Its metadata have the
conditions and all statistics with their intervals; without them the metrics are shown alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm_eval_locos.conditions import Condition
from lm_eval_locos.errors import LocosError
from lm_eval_locos.reporting.board import Cell, Pairs, RandomResult, Row
from lm_eval_locos.reporting.results import Run, Task
from lm_eval_locos.reporting.samples import Sample
from lm_eval_locos.reporting.text import number
from lm_eval_locos.statistics import Controls, Estimate, Interval


def is_own_row(task: Task) -> bool:
    """Whether the task computed a specificity itself."""
    return bool(task.own) or "retrieval_drop" in task.metrics


def own_rows(run: Run, model: str, rankings: Mapping[str, str]) -> list[Row]:
    """A row for each such task of a run."""
    tasks = sorted(run.tasks.items())
    return [_row(task, run, model, rankings) for _, task in tasks if is_own_row(task)]


def measured(own: Mapping[str, Any], run: Run) -> tuple[Condition, tuple[str, ...]]:
    """The condition that such a task measured, and its heads; ``own`` is what it recorded.

    The model's own condition is another one where the task's metadata chose k.
    """
    _, ablated, *_ = [*(own.get("conditions") or ("baseline", run.condition))]
    heads = (run.locos.get("conditions") or {}).get(str(ablated))
    heads = run.locos.get("heads") or () if heads is None else heads
    return Condition.parse(str(ablated)), tuple(map(str, heads))


def _row(task: Task, run: Run, model: str, rankings: Mapping[str, str]) -> Row:
    baseline, ablated, *random = [*(task.own.get("conditions") or ("baseline", run.condition))]
    condition, heads = measured(task.own, run)
    sha = run.ranking.get("sha256")
    held = task.metrics.get("controls_held")
    shown = [name.removesuffix("_ablated") for name in task.metrics if name.endswith("_ablated")]
    names = list(dict.fromkeys([*(task.own.get("families") or ()), *shown]))
    statistics = task.own.get("statistics") or {}
    metrics = {f: (of or {}).get("metric") for f, of in (task.own.get("families") or {}).items()}
    pairs = {name: _pairs(task, name, str(baseline), str(ablated), metrics) for name in names}
    return Row(
        model=model,
        ranking=rankings.get(str(sha), ""),
        ranking_path=run.ranking.get("path"),
        ranking_sha256=sha,
        condition=str(condition),
        kind=condition.kind,
        k=condition.k or len(heads),
        site=run.locos.get("site"),
        mode=run.locos.get("mode"),
        heads=heads,
        cells={name: _cell(task, name, statistics, metrics, pairs[name]) for name in names},
        retrieval_drop=_estimate(task, "retrieval_drop", statistics.get("retrieval_drop")),
        control_drop=_estimate(task, "control_drop", statistics.get("control_drop")),
        specificity=_estimate(task, "specificity", statistics.get("specificity")),
        controls=_controls(statistics.get("controls")),
        controls_held=None if held is None else held >= 0.5,
        random=_random(task, statistics.get("random") or {}, random),
        source=task.name,
        bundled=task.bundled,
        notes=(f"computed by the task {task.name}",),
        runs=(run.path,),
    )


def _cell(
    task: Task,
    family: str,
    statistics: Mapping[str, Any],
    metrics: Mapping[str, str | None],
    pairs: Pairs,
) -> Cell:
    of = (statistics.get("families") or {}).get(family) or {}
    known = of.get("documents")
    return Cell(
        tasks=(task.name,),
        metric=metrics.get(family) or "score",
        documents=known if isinstance(known, int) else None,
        score=_estimate(task, f"{family}_ablated", of.get("condition")),
        bundled=task.bundled,
        baseline=_estimate(task, f"{family}_baseline", of.get("baseline")),
        drop=_estimate(task, f"{family}_drop", of.get("drop")),
        difference=_read(of["difference"]) if of.get("difference") else None,
        status=of.get("status") or ("ok" if f"{family}_drop" in task.metrics else ""),
        paired=True,
        p=number(of.get("p")),
        lost=of.get("lost"),
        gained=of.get("gained"),
        pairs=pairs,
    )


def _pairs(
    task: Task, family: str, baseline: str, ablated: str, metrics: Mapping[str, str | None]
) -> Pairs:
    """The family's documents with their answers without and with ablation."""
    metric = metrics.get(family) or "score"
    found = [
        (_under(sample, baseline, metric), _under(sample, ablated, metric))
        for sample in sorted(task.samples or (), key=lambda sample: sample.document)
        if sample.family == family
    ]
    return tuple((before, after) for before, after in found if before and after)


def _under(sample: Sample, condition: str, metric: str) -> Sample | None:
    """The document's answer and score under one condition; None where it was skipped."""
    answer, score = sample.conditions.get(condition, (None, None))
    if answer is None or score is None:
        return None
    return replace(sample, scores={metric: score}, response=answer, conditions={})


def by_family(run: Run) -> Run:
    """The run with a task a family in the place of each such task.

    Its answers and scores are those under the condition that the task measured.
    """
    tasks: dict[str, Task] = {}
    condition = run.condition
    for name, task in run.tasks.items():
        families = task.own.get("families")
        if not families:
            tasks[name] = task
            continue
        condition = str(measured(task.own, run)[0])
        for family, of in families.items():
            metric = of["metric"]
            asked = [s for s in task.samples or () if s.family == family]
            scored = [s for one in asked if (s := _under(one, condition, metric)) is not None]
            mean = math.fsum(s.scores[metric] for s in scored) / max(len(scored), 1)
            tasks[f"{name}:{family}"] = replace(
                task,
                name=f"{name}:{family}",
                family=family,
                metrics={metric: mean},
                own={},
                hash=None,
                samples=None if task.samples is None else tuple(scored),
            )
    return replace(run, tasks=tasks, condition=condition)


def _estimate(task: Task, metric: str, stated: Mapping[str, Any] | None) -> Estimate:
    """The task's own statistic; the metric with its standard error where it states none."""
    if stated:
        return _read(stated)
    return Estimate(
        task.metrics.get(metric),
        standard_error=task.stderr.get(metric),
        reason=f"computed by the task {task.name}",
    )


def _read(stated: Mapping[str, Any]) -> Estimate:
    """An `Estimate` from its JSON form."""
    ends = stated.get("interval")
    return Estimate(
        number(stated.get("value")),
        Interval(**ends) if ends else None,
        number(stated.get("standard_error")),
        number(stated.get("detectable")),
        stated.get("documents") or 0,
        stated.get("power") or 0.8,
        stated.get("reason"),
        **{name: stated[name] for name in ("clusters", "constant") if stated.get(name)},
    )


def _controls(stated: Mapping[str, Any] | None) -> Controls | None:
    if not stated:
        return None
    drop = _read(stated["drop"])
    return Controls(stated["held"], stated["margin"], drop, stated.get("reason"))


def _random(task: Task, stated: Mapping[str, Any], conditions: list[Any]) -> RandomResult | None:
    p = task.metrics.get("p_random")
    if p is None:
        return None
    try:
        kind = Condition.parse(str(conditions[0])).kind
    except (LocosError, IndexError):
        kind = "random"
    return RandomResult(
        kind=kind,
        seeds=len(conditions) or int(stated.get("seeds") or 0),
        specificity=task.metrics.get("random_specificity"),
        values=tuple(stated.get("values") or ()),
        p=p,
    )
