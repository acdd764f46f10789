"""Many ablations of one loaded model, each a results file of the harness's own.

    >>> runs = plan({"locos": ranking}, ks=[5, 10], controls=["random:2", "bottom"])
    >>> [run.name for run in runs]
    ['baseline', 'locos-top-5', 'locos-bottom-5', 'locos-random-5-0', 'locos-random-5-1', ...]

The model is loaded once, its means are measured once, the baseline runs once. A finished run is a
folder of its own, which appears whole or not at all, so that a sweep that was killed goes on.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from lm_eval_locos import __version__
from lm_eval_locos.conditions import Condition
from lm_eval_locos.errors import DataError, LocosError, RankingError
from lm_eval_locos.evaluation import evaluate
from lm_eval_locos.files import check_folder, clear_temporaries, replacing
from lm_eval_locos.ranking import HeadRanking

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lm_eval_locos.model import LocosAblatedLM

_log = logging.getLogger(__name__)
RECORD = "sweep.json"
CONTROLS = ("random", "layer-random", "bottom")


@dataclass(frozen=True)
class Run:
    """One evaluation: what is ablated, by which ranking (a name), and the folder's name."""

    name: str
    condition: Condition
    ranking: str | None


def plan(
    rankings: Mapping[str, HeadRanking], ks: Sequence[int], controls: Sequence[str] = ()
) -> list[Run]:
    """The runs of a sweep: the baseline, then for each ranking and k the top and its controls.

    Args:
        rankings: by the name that goes into the runs' names.
        ks: numbers of heads.
        controls: ``random:N`` (N draws without the top k), ``layer-random:N`` (the same, as many in
            each layer as the top k has), ``bottom``.

    Raises:
        LocosError: a control that is none of these, a k below 1 or above a ranking's heads.
    """
    draws = [_control(text) for text in dict.fromkeys(controls)]
    runs = [Run("baseline", Condition("baseline"), None)]
    for name, ranking in rankings.items():
        for k in dict.fromkeys(ks):
            if not 1 <= k <= len(ranking.order):
                raise RankingError(
                    f"k={k}: expected 1 to {len(ranking.order)}, the heads that {name} scores."
                )
            runs.append(Run(f"{name}-top-{k}", Condition("top", k), name))
            for kind, count in draws:
                if kind == "bottom":
                    runs.append(Run(f"{name}-bottom-{k}", Condition(kind, k), name))
                for seed in range(count):
                    run = f"{name}-{kind}-{k}-{seed}"
                    runs.append(Run(run, Condition(kind, k, seed), name))
    return runs


def _control(text: str) -> tuple[str, int]:
    kind, _, count = text.partition(":")
    if kind == "bottom" and not count:
        return kind, 0
    if kind in CONTROLS[:2] and count.isdecimal() and int(count) > 0:
        return kind, int(count)
    raise LocosError(
        f"control {text!r} is not known. Use random:N, layer-random:N (N draws) or bottom."
    )


def names(paths: Sequence[str]) -> dict[str, str]:
    """A short name for each ranking file: its stem, with its folder's where stems are equal.

    Raises:
        RankingError: the same file twice.
    """
    stems = [Path(path).stem for path in paths]
    found: dict[str, str] = {}
    for path, stem in zip(paths, stems, strict=True):
        name = stem if stems.count(stem) == 1 else f"{Path(path).parent.name}-{stem}"
        if name in found:
            raise RankingError(f"{path}: two rankings would both be called {name}. Rename one.")
        found[name] = path
    return found


def sweep(
    lm: LocosAblatedLM,
    rankings: Mapping[str, HeadRanking],
    runs: Sequence[Run],
    *,
    tasks: Sequence[str],
    output: str | Path,
    model_args: Mapping[str, Any],
    limit: int | float | None = None,
    apply_chat_template: bool = False,
    metadata: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: bool = True,
    manager: TaskManager | None = None,
) -> list[Path]:
    """Runs what is not finished yet; the folders of all runs, in their order.

    Args:
        lm: the model.
        rankings: by name.
        runs: see `plan`.
        tasks: names of harness tasks.
        output: folder for everything.
        model_args: how the model was loaded; it goes into the results files, and to the tasks,
            which measure contexts with the model's tokenizer.
        limit: as the harness's.
        apply_chat_template: likewise.
        metadata: for the tasks, as ``--metadata``.
        resume: go on with what the folder has, which is an error otherwise.
        progress: whether to show a bar.
        manager: from `manager_of`, where that was called already.

    Raises:
        DataError: the folder holds another sweep, or this one without ``resume``.
        LocosError: an unknown task, or a ranking that does not fit the model.
    """
    check_limit(limit)
    manager = manager or manager_of(tasks, model_args, metadata)
    folder = Path(output)
    for ranking in rankings.values():
        ranking.check_fits(lm.architecture.fingerprint)
    identity = {
        "version": __version__,
        "model": json.loads(lm.cache_identity()) | {"ranking": None, "condition": None},
        "rankings": {
            name: hashlib.sha256(ranking.to_json().encode()).hexdigest()
            for name, ranking in rankings.items()
        },
        "tasks": list(tasks),
        "limit": limit,
        "apply_chat_template": apply_chat_template,
        "metadata": dict(metadata or {}),
    }
    _begin(folder, identity, resume)
    clear_temporaries(folder)
    for left in folder.glob(".run-*"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    finished = [folder / run.name for run in runs if (folder / run.name).is_dir()]
    with tqdm(
        total=len(runs), initial=len(finished), desc="Sweep", unit="run", disable=not progress
    ) as bar:
        for run in runs:
            if folder / run.name in finished:
                continue
            bar.set_postfix_str(run.name)
            lm.ablate_as(run.condition, rankings[run.ranking] if run.ranking else None)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as temporary:
                arguments = {**model_args, "num_heads": run.condition.k}
                if run.ranking:
                    arguments["heads"] = rankings[run.ranking].path
                evaluate(
                    lm,
                    Path(temporary) / "results",
                    tasks=tasks,
                    manager=manager,
                    model_args=arguments,
                    limit=limit,
                    apply_chat_template=apply_chat_template,
                )
                os.replace(Path(temporary) / "results", folder / run.name)
            bar.update()
    return [folder / run.name for run in runs]


def check_limit(limit: float | None) -> None:
    """Raises LocosError for a limit that leaves no document."""
    if limit is not None and limit <= 0:
        raise LocosError(f"--limit {limit:g}: expected a number of documents, or a share below 1.")


def manager_of(
    tasks: Sequence[str], model_args: Mapping[str, Any], metadata: Mapping[str, Any] | None
) -> TaskManager:
    """The harness's index of tasks, with what their loaders read; needs no model.

    Indexing takes seconds: once for all runs.

    Raises:
        LocosError: a task that is not known, or that asks under conditions of its own.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(metadata={**model_args, **(metadata or {})})
    for name in tasks:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            raise LocosError(
                f"--tasks {name}: no such task. {hint}lm_eval ls tasks lists what there is; add "
                "tasks with commas, such as nolima,locos_arithmetic."
            )
        if name.startswith("locos_specificity"):
            raise LocosError(
                f"--tasks {name}: it asks under conditions of its own. Run it with lm_eval --model "
                "locos-ablated, or sweep the families' tasks, such as --tasks locos."
            )
    return manager


def _begin(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    path = folder / RECORD
    check_folder(folder)
    started = any(child.is_dir() and not child.name.startswith(".") for child in folder.glob("*"))
    if not (path.exists() and started):  # of a sweep that failed in its first run nothing is kept
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}). Choose another --output.") from error
    for key, value in identity.items():
        if found.get(key) != value:
            raise DataError(
                f"{folder} holds another sweep ({key} was {str(found.get(key))[:80]}). Repeat the "
                "former arguments (k and controls may change), or choose another --output."
            )
    if not resume:
        raise DataError(
            f"{folder} holds this sweep already, whole or in part. Add --resume to run what is "
            "missing, or choose another --output."
        )
