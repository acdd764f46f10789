"""One evaluation of a loaded model, written as the ``lm_eval`` command writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lm_eval_locos.model import LocosAblatedLM


def evaluate(
    lm: LocosAblatedLM,
    folder: Path,
    *,
    tasks: Sequence[str],
    manager: TaskManager,
    model_args: Mapping[str, Any],
    limit: int | float | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any] | None:
    """Runs tasks; writes what ``--output_path folder --log_samples`` would.

    Args:
        lm: the model, under the condition that it has.
        folder: for the results file and the samples.
        tasks: names.
        manager: knows them, and has the metadata for their loaders.
        model_args: what the results file says of how the model was loaded.
        limit: as the harness's.
        apply_chat_template: likewise.

    Returns:
        the harness's results, in the first process; None in others.
    """
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(folder))
    results = simple_evaluate(
        model=lm,
        model_args=dict(model_args),
        tasks=list(tasks),
        limit=limit,
        log_samples=True,
        apply_chat_template=apply_chat_template,
        evaluation_tracker=tracker,
        task_manager=manager,
        bootstrap_iters=0,
    )
    if results is None:
        return None
    tracker.general_config_tracker.model_source = "locos-ablated"
    samples = results["samples"]
    written = {key: value for key, value in results.items() if key != "samples"}
    tracker.save_results_aggregated(results=written, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return results
