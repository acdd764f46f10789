"""The numbers that gates are about: a subject is a model under a condition, with its numbers.

Three sources: rows of the leaderboard (baseline and condition run apart, paired there), what the
task ``locos_specificity`` writes into the results file, and any task's own metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.gates.numbers import row_numbers, task_number
from lm_eval_locos.gates.records import Number, recorded
from lm_eval_locos.reporting.board import NO_BASELINE, Board, Row
from lm_eval_locos.reporting.cells import chosen_metric
from lm_eval_locos.reporting.leaderboard import leaderboard
from lm_eval_locos.reporting.pairing import (
    describe_models,
    entries,
    model_differences,
    model_key,
)
from lm_eval_locos.reporting.results import Run, Task
from lm_eval_locos.reporting.task_rows import is_own_row, measured
from lm_eval_locos.reporting.text import clean, family_of

RECORD = "locos_specificity"


@dataclass(frozen=True)
class Subject:
    """A model under a condition.

    Attributes:
        model: short name.
        ranking: every name that the ranking goes by; empty where none chose the heads.
        condition: as text.
        kind: of condition.
        k: number of heads ablated.
        source: "runs", or the task that computed the numbers.
        numbers: by metric.
        problems: what is wrong with the files behind it, by family (or "" for all).
        refused: why its baseline may not be used, or None.
    """

    model: str
    ranking: tuple[str, ...]
    condition: str
    kind: str
    k: int
    source: str
    numbers: Mapping[str, Number]
    problems: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None

    @property
    def label(self) -> str:
        """For a table."""
        names = [self.model, *self.ranking[:1], self.condition]
        return ", ".join(names + ([self.source] if self.source != "runs" else []))


@dataclass(frozen=True)
class Measures:
    """All there is in some results files; what is slow is computed once a confidence level.

    Attributes:
        runs: with those that only serve as a baseline.
        baselines: named by the user.
        metrics: metric by family that drops are computed from.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """

    runs: Sequence[Run]
    baselines: Sequence[Run] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)
    resamples: int = 10_000
    seed: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def subjects(self, level: float) -> list[Subject]:
        """The subjects with drops, the baselines among them.

        Raises:
            DataError: runs that may not be compared.
        """
        if level not in self._cache:
            self._cache[level] = self._recorded() + self._rows(level)
        return self._cache[level]

    def of_task(self, name: str, metric: str, level: float) -> list[Subject]:
        """A subject for every model and condition that ran a task, with one metric of it."""
        found = []
        models = describe_models(self._everything)
        for entry in entries(self._everything, []):
            task = entry.tasks.get(name)
            if task is None or self._record_of(entry.source[name], task) is not None:
                continue
            run = entry.source[name]
            number = task_number(task, metric, level, resamples=self.resamples, seed=self.seed)
            needs = entry.condition.needs_ranking
            found.append(
                Subject(
                    models[model_key(run)],
                    _ranking_names(run) if needs else (),
                    str(entry.condition),
                    entry.condition.kind,
                    entry.k,
                    "runs",
                    {f"{name}:{metric}": number} if number else {},
                    {
                        "": self._broken(run).get((name, metric))
                        or f"{name} has no metric {metric}; it has {', '.join(task.metrics)}."
                    },
                )
            )
        return found

    def task_names(self) -> list[str]:
        """Of every task in the files."""
        return sorted({name for run in self._everything for name in run.tasks})

    # -- files -----------------------------------------------------------------------------

    @property
    def _everything(self) -> list[Run]:
        known = {run.sha256 for run in self.baselines}
        return [*self.baselines, *(run for run in self.runs if run.sha256 not in known)]

    def _raw(self, run: Run) -> Mapping[str, Any]:
        """The file's content, in which NaN is still NaN."""
        if run.path not in self._cache:
            try:
                self._cache[run.path] = json.loads(Path(run.path).read_bytes())
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{run.path}: was read once and cannot be read again ({error}). Leave results "
                    "files as they are while they are checked."
                ) from error
        return self._cache[run.path]

    def _broken(self, run: Run) -> dict[tuple[str, str], str]:
        """(task, metric) of each metric that is no finite number, and what it is."""
        found = {}
        for name, result in self._raw(run)["results"].items():
            if clean(name) not in run.tasks or not isinstance(result, dict):
                continue
            for key, value in result.items():
                metric = key.partition(",")[0]
                if "," not in key or metric.endswith("_stderr"):
                    continue
                if isinstance(value, (int, float)) and math.isfinite(value):
                    continue
                shown = f"{name}'s {metric} is {value} in {run.path}, not a finite number."
                found[name, metric] = clean(shown)
        return found

    # -- what locos_specificity wrote ------------------------------------------------------

    def _record_of(self, run: Run, task: Task) -> Mapping[str, Any] | None:
        """What the task recorded, {} where nothing; None for a task of another kind."""
        config = self._raw(run)["configs"].get(task.name) or {}
        found = (config.get("metadata") or {}).get(RECORD)
        if isinstance(found, Mapping):
            return clean(dict(found))
        return {} if is_own_row(task) else None

    def _recorded(self) -> list[Subject]:
        models = describe_models(self._everything)
        found = []
        for run in self.runs:
            for task in run.tasks.values():
                record = self._record_of(run, task)
                if record is None:
                    continue
                condition, heads = measured(record, run)
                found.append(
                    Subject(
                        models[model_key(run)],
                        _ranking_names(run),
                        str(condition),
                        condition.kind,
                        condition.k or len(heads),
                        task.name,
                        recorded(task, record, self._raw(run)["results"][task.name], run.path),
                    )
                )
        return found

    # -- baseline and condition run apart --------------------------------------------------

    def _rows(self, level: float) -> list[Subject]:
        kept = [replace(run, tasks=self._usable(run)) for run in self._everything]
        if not any(task.metrics for run in kept for task in run.tasks.values()):
            return []
        named = {run.sha256 for run in self.baselines}
        board = leaderboard(
            [run for run in kept if run.sha256 not in named],
            baselines=[run for run in kept if run.sha256 in named],
            metrics=self.metrics,
            resamples=self.resamples,
            seed=self.seed,
            level=level,
        )
        whole = {run.path: run for run in self._everything}  # with the tasks whose score is NaN
        return [self._row(row, board, whole) for row in board.rows]

    def _usable(self, run: Run) -> dict[str, Task]:
        """The tasks that are paired here; one whose metric is NaN has no score: see `_broken`."""
        return {
            name: task
            for name, task in run.tasks.items()
            if self._record_of(run, task) is None
            and chosen_metric(task, self.metrics) not in task.not_finite
        }

    def _row(self, row: Row, board: Board, whole: Mapping[str, Run]) -> Subject:
        mine = [whole[run.path] for run in board.runs if run.path in row.runs]
        problems: dict[str, str] = {}
        bases = [whole[run.path] for run in board.runs if run.is_baseline]
        same = [run for run in bases if mine and not model_differences(run, mine[-1])]
        for run in (*mine, *same):
            for (name, _), text in self._broken(run).items():
                problems.setdefault(family_of(name), text)
        for family, cell in row.cells.items():
            if row.kind != "baseline" and cell.baseline is None and same:
                problems.setdefault(
                    family, f"the baseline ran no {', '.join(cell.tasks)}: run it, or leave it out."
                )
        ablated = {task.family for run in mine for task in run.tasks.values()}
        for task in (task for run in same for task in run.tasks.values()):
            if row.kind != "baseline" and task.family not in ablated:
                problems.setdefault(
                    task.family,
                    f"the baseline ran {task.name}, and {row.condition} did not: run it too, or "
                    "leave it out of both.",
                )
        refused = None
        if NO_BASELINE in row.notes and not row.seeds:
            if bases and mine:
                differences = "; ".join(model_differences(bases[-1], mine[-1]))
                refused = (
                    f"{mine[-1].path} ({row.condition}) and the baseline {bases[-1].path} are of "
                    f"different models: {differences}. Run the same tasks on the same model "
                    "without ablation, and give that run."
                )
            problems[""] = (
                "there is no baseline. Run the same tasks with --model hf or num_heads=0, and give "
                "its files too."
            )
        names = [row.ranking, row.ranking.partition(" ")[0], *_file_names(row.ranking_path)]
        return Subject(
            row.model,
            tuple(name for name in names if name) if row.ranking else (),
            row.condition,
            row.kind,
            row.k,
            row.source,
            row_numbers(row, problems),
            problems,
            refused,
        )


def _ranking_names(run: Run) -> tuple[str, ...]:
    names = [str(run.locos.get("method") or ""), *_file_names(run.ranking.get("path"))]
    return tuple(name for name in names if name)


def _file_names(path: Any) -> list[str]:
    return [str(path), Path(str(path)).name] if path else []
