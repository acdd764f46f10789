"""Which runs belong together, and whether two may be compared document by document.

A condition is compared with a baseline of the same model on the same documents with the same
prompts. `refusal` says what is different; nothing here guesses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from lm_eval_locos.conditions import Condition
from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.reporting.results import Run, Task
from lm_eval_locos.reporting.samples import Sample

# Known only to some model types: compared where both runs state them.
_IF_STATED = frozenset(
    ("model_sha", "model_num_parameters", "model_dtype", "peft_sha", "delta_sha", "weights")
)
RANDOM = ("random", "layer-random")


@dataclass
class Entry:
    """The runs of one model under one condition: several commands may share its tasks.

    Attributes:
        runs: oldest first.
        condition: parsed.
        tasks: by name, of the newest run that has it.
        source: the run each task is from.
    """

    runs: list[Run]
    condition: Condition
    tasks: dict[str, Task] = field(default_factory=dict)
    source: dict[str, Run] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The newest run."""
        return self.runs[-1]

    @property
    def k(self) -> int:
        """Number of heads ablated."""
        heads = self.run.locos.get("heads")
        return self.condition.k or len(self.condition.heads) or len(heads or ())

    @property
    def method(self) -> tuple[Any, ...]:
        """What must be equal for two conditions to differ in their heads alone."""
        record = self.run.locos
        sha = self.run.ranking.get("sha256") if self.condition.needs_ranking else None
        return (sha, *(record.get(key) for key in ("site", "mode", "average")))


def entries(runs: Iterable[Run], warnings: list[str]) -> list[Entry]:
    """Runs put together by model and condition; a task that was repeated counts once, the newest.

    Raises:
        DataError: a condition that is not understood.
    """
    found: dict[str, Entry] = {}
    runs = list(runs)
    weights: dict[str, set[str]] = {}
    for run in runs:
        stated = run.identity.get("weights")
        weights.setdefault(model_key(run), set()).update([stated] if stated else [])
    for run in runs:
        try:
            condition = Condition.parse(run.condition)
        except LocosError as error:
            raise DataError(f"{run.path}: {error} Was it written by a later version?") from None
        entry = Entry([run], condition)
        method = ("baseline",) if condition.kind == "baseline" else (str(condition), *entry.method)
        # One path may have held several models. Plain hf runs do not state their weights.
        known = weights[model_key(run)]
        stated = run.identity.get("weights") if len(known) > 1 else None
        key = json.dumps([model_key(run), stated, method], sort_keys=True, default=str)
        entry = found.setdefault(key, entry)
        if entry.runs[-1] is not run:
            entry.runs.append(run)
        for name, task in run.tasks.items():
            if name in entry.tasks:
                warnings.append(
                    f"{name} of {run.model}, {condition}, is there twice: "
                    f"{entry.source[name].path} is passed over for the newer {run.path}."
                )
            entry.tasks[name], entry.source[name] = task, run
    return list(found.values())


def model_key(run: Run) -> str:
    """Equal for runs of one model; what only some model types state is left out."""
    stated = {k: v for k, v in run.identity.items() if k not in _IF_STATED}
    # Two models of one name and other weights must not be taken for each other.
    for key in ("model_dtype", "model_num_parameters"):
        stated[key] = run.identity.get(key)
    return json.dumps(stated, sort_keys=True, default=str)


def model_differences(base: Run, run: Run) -> list[str]:
    """What is different about two runs' models, as text; empty for the same model."""
    a, b = base.identity, run.identity
    keys = sorted({*a, *b}, key=lambda key: (key != "pretrained", key))
    return [
        f"{key} is {a.get(key, 'not given')} there and {b.get(key, 'not given')} here"
        for key in keys
        if a.get(key) != b.get(key) and not (key in _IF_STATED and not (key in a and key in b))
    ]


def refusal(base: Task, task: Task) -> str | None:
    """Why two runs of a task cannot be compared, or None where they can."""
    for name, value in task.settings.items():
        other = base.settings.get(name)
        if value is not None and other is not None and other != value:
            return (
                f"the prompts or answers are made differently: {name} {other} there, {value} here"
            )
    if base.samples is None or task.samples is None:
        return _unlike(base, task)
    there, here = ({s.document: s.prompt for s in t.samples or ()} for t in (base, task))
    if there.keys() != here.keys():
        if sorted(there.values()) == sorted(here.values()):
            return (
                "the documents differ, though their prompts are the same (were the runs made by "
                "different versions of lm-eval-locos?)"
            )
        return (
            f"the documents differ: {len(there)} there, {len(here)} here, "
            f"{len(there.keys() & here.keys())} in both"
        )
    other = sum(there[document] != here[document] for document in here)
    if other:
        return f"the prompts of {other} of {len(here)} documents differ"
    return None


def _unlike(base: Task, task: Task) -> str | None:
    """The same without samples, from what the results files say."""
    stated = (
        ("the hash of the data", base.data.get("sha256"), task.data.get("sha256")),
        ("the number of documents", base.documents, task.documents),
        ("the hash of the documents and prompts", base.hash, task.hash),
    )
    for what, there, here in stated:
        if there is not None and here is not None and there != here:
            return f"the documents differ: {what} is {_short(there)} there, {_short(here)} here"
    return None


def _short(value: object) -> str:
    return f"{value:.12}" if isinstance(value, str) else str(value)


def baseline_of(entry: Entry, baselines: Sequence[Run], named: bool) -> list[Run]:
    """The baseline runs of an entry's model, newest first.

    Args:
        entry: a condition.
        baselines: runs without ablation.
        named: whether the user chose them, so that another model is an error.

    Raises:
        DataError: `named`, and none is of this model.
    """
    found = [run for run in baselines if not model_differences(run, entry.run)]
    if named and not found and baselines:
        run = baselines[-1]
        raise DataError(
            f"--baseline {run.path} and {entry.run.path} are of different models: "
            f"{'; '.join(model_differences(run, entry.run))}. Give a baseline of the same model "
            "(--baseline can be repeated)."
        )
    return found[::-1]


def match(name: str, entry: Entry, baselines: Sequence[Run]) -> Task | None:
    """The newest baseline's task that `entry`'s can be compared with; None where none has it.

    Raises:
        DataError: baselines have the task, but none on the same documents with the same prompts.
    """
    reasons = []
    for run in baselines:
        if base := run.tasks.get(name):
            reason = refusal(base, entry.tasks[name])
            if reason is None:
                return base
            reasons.append((run, reason))
    if not reasons:
        return None
    run, reason = reasons[0]
    raise DataError(
        f"{name}: {entry.source[name].path} ({entry.condition}) cannot be compared with its "
        f"baseline {run.path}: {reason}. Run both with the same --tasks, --limit, --num_fewshot, "
        "--metadata and chat template, or leave one of them out."
    )


def both(base: Task, task: Task, metric: str) -> list[tuple[Sample, Sample]]:
    """The documents that both scored, by document; samples must be there."""
    there = {s.document: s for s in base.samples or () if metric in s.scores}
    here = {s.document: s for s in task.samples or () if metric in s.scores}
    return [(there[document], here[document]) for document in sorted(there.keys() & here.keys())]


def describe_models(runs: Sequence[Run]) -> Mapping[str, str]:
    """A short name for each `model_key`; told apart by what differs where names are the same."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(model_key(run), run)
    short = {
        k: PurePath(r.model).name if r.model[:1] in "/~." else r.model for k, r in first.items()
    }
    names = {}
    for key, run in first.items():
        same = [other for k, other in first.items() if short[k] == short[key] and k != key]
        differ = {
            name: run.identity.get(name)
            for other in same
            for name in {*run.identity, *other.identity}
            if run.identity.get(name) != other.identity.get(name)
        }
        extra = ", ".join(f"{name} {value}" for name, value in sorted(differ.items()))
        names[key] = f"{short[key]} ({extra})" if extra else short[key]
    return names
