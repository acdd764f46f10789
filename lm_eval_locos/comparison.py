"""Two runs on the same documents: what changed, by how much, and how sure that is.

    >>> found = compare(load(["out/a"]), load(["out/b"]))
    >>> one = found.tasks[0]
    >>> one.name, one.a, one.b, one.change.value, one.p_holm
    ('nolima', 0.82, 0.41, -0.41, 0.0001)

Documents are paired by the harness's hash. Runs of a task on different documents are refused;
prompts may differ (two models have two chat templates), which is noted. All intervals and tests are
those of `lm_eval_locos.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lm_eval_locos.errors import DataError
from lm_eval_locos.reporting.pairing import Entry, both, describe_models, entries, model_key
from lm_eval_locos.reporting.results import Run, Task, known_form
from lm_eval_locos.reporting.task_rows import by_family
from lm_eval_locos.statistics import Estimate, FamilyScores, Interval, specificity


@dataclass(frozen=True)
class TaskComparison:
    """One task under both runs.

    Attributes:
        name: of the task.
        metric: compared.
        documents: scored by both.
        clusters: that they come in.
        skipped: documents left out because a side has no score for them.
        a: mean score of A.
        b: mean score of B, on the same documents.
        change: b - a, with its interval and the change that this sample would detect.
        gained: ids of documents whose score is higher in B.
        lost: ids of documents whose score is lower in B.
        p: exact two-sided p-value where every score is 0 or 1, else None.
        test: "mcnemar", or "sign test over clusters" where documents share clusters.
        p_holm: `p` adjusted over the tasks.
        bundled: whether the documents are the package's sample.
    """

    name: str
    metric: str
    documents: int
    clusters: int
    skipped: int
    a: float
    b: float
    change: Estimate
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    p: float | None
    test: str | None
    p_holm: float | None
    bundled: bool


@dataclass(frozen=True)
class Side:
    """One of the two runs: its model, condition and files."""

    model: str
    condition: str
    ranking: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs and every task that both have.

    Attributes:
        a: the first run.
        b: the second.
        tasks: in the order of A's file.
        notes: what to know: tasks left out, prompts that differ.
        level: of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """

    a: Side
    b: Side
    tasks: tuple[TaskComparison, ...]
    notes: tuple[str, ...] = field(default=())
    level: float = 0.95
    resamples: int = 10_000
    seed: int = 0


def compare(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    metric: str | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compares two runs; each may be spread over several results files.

    Args:
        a: from `reporting.results.load`: one model under one condition.
        b: the other.
        metric: to compare; by default each task's first. Tasks without it are left out.
        level: confidence of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        DataError: several runs on one side, no task in common, a task on different documents, no
            sample files, or no task with the metric.
    """
    sides = _one(a, "A"), _one(b, "B")
    notes: list[str] = []
    shared = [name for name in sides[0].tasks if name in sides[1].tasks]
    for letter, entry, other in (("A", *sides), ("B", *reversed(sides))):
        alone = [name for name in entry.tasks if name not in other.tasks]
        if alone and shared:
            notes.append(f"only in {letter}: {', '.join(alone)}.")
    if not shared:
        raise DataError(
            f"no task is in both runs: A has {', '.join(sides[0].tasks) or 'none'}, B has "
            f"{', '.join(sides[1].tasks) or 'none'}. Run both with the same --tasks."
        )
    scores: dict[str, FamilyScores] = {}
    found: dict[str, TaskComparison] = {}
    for name in shared:
        one = _paired(name, sides, metric, notes)
        if one is not None:
            found[name], scores[name] = one
    if not found:
        raise DataError(
            f"nothing to compare: {' '.join(notes)} Give runs with a metric in common, and with "
            "--log_samples."
        )
    result = specificity(scores, level=level, resamples=resamples, seed=seed)
    tasks = []
    for name, one in found.items():
        of = result.families[name]
        tasks.append(
            replace(
                one,
                change=_negated(of.difference),
                clusters=of.clusters,
                p=of.p,
                test=of.test,
                p_holm=of.p_holm,
            )
        )
    models = describe_models([*a, *b])
    return Comparison(
        *(_side(entry, models) for entry in sides),
        tuple(tasks),
        tuple(notes),
        level,
        resamples,
        seed,
    )


def _one(runs: Sequence[Run], letter: str) -> Entry:
    with known_form(f"{letter}: a task recorded its conditions in a form"):
        found = entries([by_family(run) for run in runs], [])
    if len(found) > 1:
        shown = [f"{entry.run.path} ({entry.condition})" for entry in found[:3]]
        listed = "; ".join(shown + ["..."] * (len(found) > 3))
        raise DataError(
            f"{letter} holds {len(found)} runs: {listed}. Give the results file of one of them."
        )
    return found[0]


def _side(entry: Entry, models: Mapping[str, str]) -> Side:
    needs = entry.condition.needs_ranking
    return Side(
        models[model_key(entry.run)],
        str(entry.condition),
        str(entry.run.locos.get("method") or "") if needs else "",
        tuple(run.path for run in entry.runs),
    )


def _paired(
    name: str, sides: tuple[Entry, Entry], metric: str | None, notes: list[str]
) -> tuple[TaskComparison, FamilyScores] | None:
    """A task's documents side by side; None, and a note, where they cannot be compared."""
    a, b = (entry.tasks[name] for entry in sides)
    common = [known for known in a.metrics if known in b.metrics]
    if metric is not None and metric not in common:
        notes.append(f"{name} has no {metric}; it has {', '.join(common) or 'no metric'}.")
        return None
    if not common:
        notes.append(f"{name}: the runs have no metric in common.")
        return None
    chosen = metric or common[0]
    for entry, task in zip(sides, (a, b), strict=True):
        if task.samples is None:
            raise DataError(
                f"{name}: no sample file beside {entry.source[name].path}, so documents cannot be "
                "paired. Run lm_eval with --log_samples."
            )
    _same_documents(name, sides)
    pairs = both(a, b, chosen)
    if not pairs:
        notes.append(f"{name}: the sample files have no scores a document of {chosen}.")
        return None
    before, after = ([pair[i].scores[chosen] for pair in pairs] for i in (0, 1))
    if not all(0 <= score <= 1 for score in (*before, *after)):
        notes.append(f"{name}: {chosen} has scores outside 0 to 1, which are not compared here.")
        return None
    _note_settings(name, a, b, notes)
    scores = FamilyScores(before, after, clusters=[pair[0].cluster for pair in pairs])
    one = TaskComparison(
        name=name,
        metric=chosen,
        documents=len(pairs),
        clusters=0,
        skipped=len(a.samples or ()) - len(pairs),
        a=float(scores.baseline.mean()),
        b=float(scores.condition.mean()),
        change=Estimate(None),
        gained=tuple(x.id for x, y in pairs if y.scores[chosen] > x.scores[chosen]),
        lost=tuple(x.id for x, y in pairs if y.scores[chosen] < x.scores[chosen]),
        p=None,
        test=None,
        p_holm=None,
        bundled=a.bundled or b.bundled,
    )
    return one, scores


def _same_documents(name: str, sides: tuple[Entry, Entry]) -> None:
    a, b = ({s.document: s for s in entry.tasks[name].samples or ()} for entry in sides)
    only = [a[key] for key in a if key not in b], [b[key] for key in b if key not in a]
    if not any(only):
        return
    examples = " and ".join(
        f"{found[0].id} only in {letter}" for letter, found in zip("AB", only, strict=True) if found
    )
    paths = " and ".join(entry.source[name].path for entry in sides)
    raise DataError(
        f"{name}: {paths} are on different documents: {len(only[0])} of {len(a)} are only in A, "
        f"{len(only[1])} of {len(b)} only in B (for example {examples}). Run both with the same "
        "--limit, --metadata and data; NoLiMa's lengths in tokens need the same tokenizer."
    )


def _note_settings(name: str, a: Task, b: Task, notes: list[str]) -> None:
    """What is made differently although the documents are the same."""
    differ = [
        f"{what} {a.settings[what]} and {value}"
        for what, value in b.settings.items()
        if what in a.settings and a.settings[what] != value
    ]
    there = {s.document: s.prompt for s in a.samples or ()}
    prompts = sum(there[s.document] != s.prompt for s in b.samples or ())
    if prompts:
        differ.append(f"the prompts of {prompts} of {len(there)} documents")
    if differ:
        notes.append(f"{name}: different in A and B: {'; '.join(differ)}.")


def _negated(found: Estimate) -> Estimate:
    """A - B turned into B - A."""
    interval = found.interval
    return replace(
        found,
        value=None if found.value is None else 0.0 - found.value,
        interval=interval
        and Interval(0.0 - interval.high, 0.0 - interval.low, interval.level, interval.method),
    )
