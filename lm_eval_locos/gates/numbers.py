"""From a leaderboard's row, or a task's documents, to numbers that a gate can judge."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lm_eval_locos.gates.records import UNDEFINED, Number, skipped
from lm_eval_locos.reporting.board import Row
from lm_eval_locos.reporting.results import Task
from lm_eval_locos.reporting.text import SIDES, title
from lm_eval_locos.statistics import FLOOR, Estimate, FamilyScores, specificity


def row_numbers(row: Row, problems: Mapping[str, str]) -> dict[str, Number]:
    """Every number of a leaderboard's row by metric."""
    found: dict[str, Number] = {}
    for family, cell in row.cells.items():
        flag, remark = cell.bundled, skipped({family: cell.skipped})
        if row.kind == "baseline":
            found[f"{family}_baseline"] = Number(cell.score, flag)
            continue
        found[f"{family}_ablated"] = Number(cell.score, flag, remark=remark)
        for name, estimate in (
            ("baseline", cell.baseline),
            ("drop", cell.drop),
            ("difference", cell.difference),
        ):
            if estimate is not None:
                found[f"{family}_{name}"] = Number(estimate, flag, remark=remark)
    wrong = [text for family, text in problems.items() if family in SIDES]
    floor = [f for f, cell in row.cells.items() if f in SIDES and cell.status == FLOOR]
    sides = {
        "retrieval_drop": ("retrieval",),
        "control_drop": ("control",),
        "specificity": ("retrieval", "control"),
    }
    for name, of in sides.items():
        estimate = getattr(row, name)
        if estimate is not None:
            left = [title(f) for f in floor if SIDES[f] in of]
            found[name] = Number(
                estimate,
                row.bundled,
                broken=wrong[0] if wrong else None,
                undefined=UNDEFINED.format(", ".join(left)) if left else None,
                remark=skipped({f: c.skipped for f, c in row.cells.items() if SIDES.get(f) in of}),
            )
    broken = wrong[0] if wrong else None
    held = row.control_drop if row.controls is None else row.controls.drop
    if held is not None:
        remark = found["control_drop"].remark if "control_drop" in found else None
        found["controls_held"] = Number(held, row.bundled, broken=broken, remark=remark)
    if row.random is not None:
        seeds = row.random.seeds
        found["p_random"] = Number(Estimate(row.random.p), row.bundled, broken=broken, seeds=seeds)
        found["random_specificity"] = Number(
            Estimate(row.random.specificity), row.bundled, broken=broken, seeds=seeds
        )
    return found


def task_number(
    task: Task, metric: str, level: float, *, resamples: int, seed: int
) -> Number | None:
    """A task's own metric; with an interval where it is the mean of the documents' scores."""
    value = task.metrics.get(metric)
    if value is None:
        return None
    scored = sorted((s for s in task.samples or () if metric in s.scores), key=lambda s: s.document)
    scores = [s.scores[metric] for s in scored]
    why = None
    if not scores:
        why = "no document's score was logged. Run with --log_samples."
    elif not all(0 <= score <= 1 for score in scores):
        why = 'scores outside 0 to 1 have no interval here. Use judge = "point".'
    elif abs(math.fsum(scores) / len(scores) - value) > 1e-6:
        why = (
            f"the logged scores' mean {math.fsum(scores) / len(scores):.4f} is not the "
            f'reported {value:.4f}, so there is no interval. Use judge = "point".'
        )
    if why:
        return Number(Estimate(value, documents=len(scores), reason=why), task.bundled)
    both = FamilyScores(scores, scores, clusters=[s.cluster for s in scored])
    result = specificity({task.name: both}, resamples=resamples, seed=seed, level=level)
    return Number(result.families[task.name].condition, task.bundled)
