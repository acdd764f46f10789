"""Whether reported numbers pass their gates, judged on the interval and not on the luck of a draw.

    >>> file = read_gates("gates.toml")
    >>> outcomes = evaluate(file, load(["out/"]))
    >>> [(outcome.gate.name, outcome.passed) for outcome in outcomes]
    [('specificity >= 0.3', True), ('control_drop <= 0.05', False)]

A gate is judged on every row that it is about, and passes where all of them do. By itself it is
about the conditions that ablate the top heads or named ones; a baseline, the bottom heads or random
ones have to be asked for by `condition`. Whatever cannot be judged fails: a number that is missing,
undefined or not finite, one without an interval, one from the package's sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from lm_eval_locos.errors import DataError
from lm_eval_locos.gates.gate import Gate, GateFile
from lm_eval_locos.gates.measure import Measures, Subject
from lm_eval_locos.gates.verdict import verdict
from lm_eval_locos.reporting.results import Run

_ASIDE = ("baseline", "bottom", "random", "layer-random")


@dataclass(frozen=True)
class Check:
    """A gate on one row.

    Attributes:
        row: model, ranking and condition, or "" where no row is behind it.
        value: of the number, or None.
        low: lower end of its interval, or None.
        high: upper end, or None.
        level: confidence of the interval, or None.
        passed: whether it does.
        reason: why not; where it does, what to know about it, or "".
    """

    row: str
    value: float | None
    low: float | None
    high: float | None
    level: float | None
    passed: bool
    reason: str


@dataclass(frozen=True)
class Outcome:
    """A gate and all that it was judged on, one row or more."""

    gate: Gate
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every row passes."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """Why it fails, row by row where there are several."""
        failed = [check for check in self.checks if not check.passed]
        several = len(self.checks) > 1
        return "\n".join(
            f"{check.row}: {check.reason}" if several else check.reason for check in failed
        )


def evaluate(
    file: GateFile,
    runs: Sequence[Run],
    *,
    baselines: Sequence[Run] = (),
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[Outcome, ...]:
    """Judges every gate.

    Args:
        file: the gates.
        runs: from `reporting.results.load`.
        baselines: to compare with; by default those among `runs` that ablate nothing.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        DataError: runs that may not be compared (other documents, prompts or models), or a gate
            that does not say whether it is about the baseline.
    """
    _check_metrics(file, [*runs, *baselines])
    measures = Measures(runs, baselines, file.metrics, resamples, seed)
    return tuple(Outcome(gate, _checks(gate, measures)) for gate in file.gates)


def _check_metrics(file: GateFile, runs: Sequence[Run]) -> None:
    for family, metric in file.metrics.items():
        tasks = [task for run in runs for task in run.tasks.values() if task.family == family]
        if not tasks:
            known = sorted({task.family for run in runs for task in run.tasks.values()})
            raise DataError(
                f"{file.path}: metrics.{family}: no run has this family. There are: "
                f"{', '.join(known)}."
            )
        for task in tasks:
            if task.metrics and metric not in task.metrics:
                raise DataError(
                    f"{file.path}: metrics.{family} = {metric!r}: {task.name} has no such metric. "
                    f"Use one of: {', '.join(task.metrics)}."
                )


def _checks(gate: Gate, measures: Measures) -> tuple[Check, ...]:
    task, sign, metric = gate.metric.partition(":")
    subjects = measures.of_task(task, metric, gate.level) if sign else []
    name = gate.metric
    if sign and not subjects:  # a task that makes its own row, or none
        own = [s for s in measures.subjects(gate.level) if s.source == task]
        if not own:
            known = measures.task_names()
            return (_missing(f"no run has the task {task}; there are: {', '.join(known)}."),)
        subjects, name, sign = own, metric, ""
    elif not sign:
        subjects = measures.subjects(gate.level)
    chosen = [subject for subject in subjects if _matches(gate, subject)]
    if not chosen:
        seen = dict.fromkeys(subject.label for subject in subjects)
        listed = "; ".join(seen) or "none with a score"
        return (_missing(f"no row matches {_chosen(gate)}. There are: {listed}."),)
    if gate.condition is None:
        chosen = _usual(gate, chosen, bool(sign))
    if not chosen:
        return (
            _missing(
                "no run has heads ablated, so nothing dropped. Run the same tasks with --model "
                "locos-ablated, or the task locos_specificity, and give its files too."
                + _problem(subjects, name)
            ),
        )
    if not sign:
        for subject in chosen:
            if subject.refused:
                raise DataError(f"gate {gate.name!r}: {subject.refused}")
    return tuple(_check(gate, subject, name) for subject in chosen)


def _usual(gate: Gate, subjects: list[Subject], of_task: bool) -> list[Subject]:
    """Of all rows those that a gate without `condition` is about."""
    ablated = [subject for subject in subjects if subject.kind not in _ASIDE]
    bases = [subject for subject in subjects if subject.kind == "baseline"]
    if of_task and ablated and bases:
        seen = dict.fromkeys(subject.condition for subject in subjects)
        raise DataError(
            f"gate {gate.name!r}: {gate.metric} was measured under {', '.join(seen)}. Say which is "
            'meant, such as condition = "baseline" or condition = "top".'
        )
    plain = of_task or gate.metric.endswith("_baseline")
    return ablated or (bases if plain else [])


def _matches(gate: Gate, subject: Subject) -> bool:
    asked = (
        (gate.model, (subject.model, subject.model.partition(" (")[0])),
        (gate.ranking, subject.ranking),
        (gate.condition, (subject.condition, subject.kind)),
    )
    return (gate.k is None or gate.k == subject.k) and all(
        pattern is None or any(fnmatchcase(name, pattern) for name in names)
        for pattern, names in asked
    )


def _chosen(gate: Gate) -> str:
    asked = ("model", "ranking", "condition", "k")
    found = [f"{key} = {getattr(gate, key)!r}" for key in asked if getattr(gate, key) is not None]
    return ", ".join(found) or gate.metric


def _missing(reason: str, row: str = "") -> Check:
    return Check(row, None, None, None, None, False, reason)


def _problem(subjects: Sequence[Subject], metric: str) -> str:
    """What is wrong in the files behind a number, if that is known."""
    family = metric.rpartition("_")[0]
    found = [s.problems.get(family) or next(iter(s.problems.values()), "") for s in subjects]
    return next((f" {text}" for text in found if text), "")


# -- one number ----------------------------------------------------------------------------


def _check(gate: Gate, subject: Subject, metric: str) -> Check:
    number = subject.numbers.get(metric)
    if number is None:
        return _missing(_lacking(subject, metric), subject.label)
    estimate = number.estimate
    interval = estimate.interval if gate.judge == "bound" else None
    passed, reason = verdict(gate, metric, number)
    shown = interval or estimate.interval
    value = estimate.value
    return Check(
        subject.label,
        value if value is not None and math.isfinite(value) else None,
        shown.low if shown else None,
        shown.high if shown else None,
        shown.level if shown else None,
        passed,
        reason,
    )


def _lacking(subject: Subject, metric: str) -> str:
    if ":" in metric:
        return subject.problems[""]
    if why := _problem([subject], metric).strip():
        return f"{metric} is missing: {why}"
    if metric in ("p_random", "random_specificity"):
        return (
            f"{metric} is missing: there is no random control. Run the same tasks with "
            "select=layer-random under at least 10 seeds, or the task locos_specificity."
        )
    close = get_close_matches(metric, subject.numbers, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    known = "" if meant else f" This row has: {', '.join(subject.numbers) or 'no number'}."
    return f"{metric} is missing.{meant}{known}"
