"""The random control of a row, and rows without samples, whose drops are of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_eval_locos.errors import DataError
from lm_eval_locos.reporting.board import UNPAIRED, Cell, RandomResult, Row
from lm_eval_locos.reporting.cells import Settings, families_of, mean_of, metric_of
from lm_eval_locos.reporting.pairing import Entry, refusal
from lm_eval_locos.reporting.text import SIDES
from lm_eval_locos.statistics import FLOOR, Estimate, permutation_p


def usable(
    entry: Entry, random: Sequence[Entry], ours: Mapping[str, Cell], warnings: list[str]
) -> list[Entry]:
    """The seeds that ran every task of the condition, on its documents."""
    needed = [name for cell in ours.values() for name in cell.tasks]
    usable = []
    for seed in sorted(random, key=lambda e: e.condition.seed):
        lacking = [name for name in needed if name not in seed.tasks]
        if lacking:
            warnings.append(
                f"{seed.run.path} ({seed.condition}) has no {', '.join(lacking)} and is no part of "
                f"the random control of {entry.condition}."
            )
            continue
        for name in needed:
            if reason := refusal(entry.tasks[name], seed.tasks[name]):
                raise DataError(
                    f"{name}: the random control {seed.source[name].path} ({seed.condition}) "
                    f"cannot be compared with {entry.source[name].path} ({entry.condition}): "
                    f"{reason}. Run both with the same --tasks and --limit."
                )
        usable.append(seed)
    if usable and len(usable) < 10:
        warnings.append(
            f"{entry.condition}: the random control has {len(usable)} seeds; its p-value cannot be "
            f"below {1 / (1 + len(usable)):.2g}. Run at least 10."
        )
    return usable


def values_of(seed: Entry, cell: Cell) -> list[float]:
    """A random condition's scores of the cell's documents, in their order."""
    scores = {
        sample.document: sample.scores.get(cell.metric)
        for name in cell.tasks
        for sample in seed.tasks[name].samples or ()
    }
    found = [scores.get(before.document) for before, _ in cell.pairs]
    if None in found:
        raise DataError(
            f"{seed.run.path} ({seed.condition}): {found.count(None)} documents of "
            f"{', '.join(cell.tasks)} have no score. Run it with --log_samples and the same "
            "on_overlength as the others."
        )
    return [value for value in found if value is not None]


def unpaired_row(row: Row, seeds: Sequence[Entry], settings: Settings) -> Row:
    """Drops of means, without intervals; the random control from means as well."""
    row = with_drops(row, UNPAIRED)
    value = row.specificity and row.specificity.value
    if not seeds or value is None:
        return row
    found = []
    for seed in seeds:
        cells = {}
        for family, tasks in families_of(seed).items():
            if (mine := row.cells.get(family)) and mine.baseline and mine.baseline.value:
                before = mine.baseline.value
                after = mean_of(tasks, metric_of(family, tasks, settings))
                cells[family] = replace(mine, drop=Estimate((before - after) / before))
        mean = with_drops(replace(row, cells=cells), "").specificity
        if mean is not None and mean.value is not None:
            found.append(mean.value)
    if not found:
        return row
    control = RandomResult(
        seeds[0].condition.kind,
        len(found),
        math.fsum(found) / len(found),
        tuple(found),
        permutation_p(value, found),
    )
    return replace(row, random=control)


def with_drops(row: Row, reason: str) -> Row:
    sides: dict[str, list[float]] = {"retrieval": [], "control": []}
    for family, cell in row.cells.items():
        if family in SIDES and cell.drop and cell.drop.value is not None and cell.status != FLOOR:
            sides[SIDES[family]].append(cell.drop.value)
    retrieval, control = (average(sides[s], reason) for s in ("retrieval", "control"))
    value = None
    if retrieval.value is not None and control.value is not None:
        value = retrieval.value - control.value
    return replace(
        row,
        retrieval_drop=retrieval,
        control_drop=control,
        specificity=Estimate(value, reason=reason),
        notes=(*row.notes, reason) if reason else row.notes,
    )


def average(values: Sequence[float | None], reason: str = "mean over seeds") -> Estimate:
    known = [value for value in values if value is not None]
    return Estimate(math.fsum(known) / len(known) if known else None, reason=reason)
