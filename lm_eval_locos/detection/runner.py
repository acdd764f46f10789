"""Runs a detection: batches, a checkpoint after each, several processes, a progress bar.

    >>> results = run(engine, trials, checkpoint=Path("out/checkpoint"), identity={"model": "..."})
    >>> sum(result.passed for result in results)
    41

Which trials form a batch depends on the trials and the batch size alone, so that neither a kill and
a resume nor the number of processes changes a result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.checkpoint import Checkpoint, recorded
from lm_eval_locos.detection.cri import cri
from lm_eval_locos.detection.generate import Engine, TrialResult
from lm_eval_locos.detection.steps import Stopping
from lm_eval_locos.errors import DataError


def processes() -> PartialState | None:
    """The processes that share the work (``accelerate launch``, ``torchrun``), None where there is
    one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import torch

    return PartialState(cpu=not torch.cuda.is_available())


def run(
    engine: Engine,
    trials: Sequence[Trial],
    *,
    batch_size: int | Literal["auto"] = "auto",
    share: bool = True,
    with_cri: bool = False,
    checkpoint: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> list[TrialResult]:
    """The results of all trials, in their order.

    Args:
        engine: with the model.
        trials: to run.
        batch_size: most trials in a batch.
        share: whether the text before the needle is prefilled once where that saves work.
        with_cri: whether trials that pass are patched causally too (score ``cri``).
        checkpoint: folder in which finished batches are kept, and from which they are taken.
        identity: what results depend on besides the settings here; a checkpoint of another run is
            refused.
        progress: whether to show a bar, in the first process.

    Raises:
        DataError: the checkpoint belongs to another run.
    """
    state = processes()
    rank, world = (0, 1) if state is None else (state.process_index, state.num_processes)
    if batch_size == "auto":
        # Free memory may have changed since the run began, or differ between processes.
        former = recorded(checkpoint) if checkpoint else None
        batch_size = (former or {}).get("batch_size") or engine.batch_size(_longest(trials))
        batch_size = _agreed(batch_size, state)
    settings = {"batch_size": batch_size, "share": share, "cri": with_cri}
    store = Checkpoint(checkpoint, {**settings, **(identity or {})}) if checkpoint else None
    if store and rank == 0:
        store.begin()
    if state is not None:
        state.wait_for_everyone()

    batches = engine.plan(trials, batch_size=batch_size, share=share)
    mine = [(number, batches[number]) for number in _own(batches, rank, world)]
    found: dict[int, TrialResult] = {}
    total = sum(len(batch.members) for _, batch in mine)
    with tqdm(total=total, unit="trial", desc="Detecting", disable=not progress or rank > 0) as bar:
        for number, batch in mine:
            results = store.load(number, batch.members) if store else None
            if results is None:
                results = _batch(engine, trials, batch, with_cri)
                if store:
                    store.save(number, results)
            found |= results
            passed = sum(result.passed for result in found.values())
            bar.set_postfix_str(f"passed {passed}/{len(found)}", refresh=False)
            bar.update(len(results))
    engine.release()
    if state is not None:
        found = {i: result for part in gather_object([found]) for i, result in part.items()}
    return [found[i] for i in range(len(trials))]


def _batch(
    engine: Engine, trials: Sequence[Trial], batch: Batch, with_cri: bool
) -> dict[int, TrialResult]:
    results = dict(zip(batch.members, engine.run(trials, batch), strict=True))
    if with_cri:
        for index, result in results.items():
            if result.passed:
                result.scores["cri"] = cri(
                    engine.model,
                    trials[index],
                    result.ids,
                    result.steps,
                    architecture=engine.architecture,
                )
    return results


def _own(batches: Sequence[Batch], rank: int, world: int) -> Iterable[int]:
    """The numbers of one process's batches. Those with a common prefix stay together."""
    unit = -1
    for number, batch in enumerate(batches):
        if not batch.shared or number == 0 or batch.shared != batches[number - 1].shared:
            unit += 1
        if unit % world == rank:
            yield number


def _longest(trials: Sequence[Trial]) -> int:
    return max((len(trial.ids) for trial in trials), default=1)


def _agreed(value: int, state: PartialState | None) -> int:
    """The first process's value, in all of them."""
    if state is None:
        return value
    values = [value]
    broadcast_object_list(values)
    return values[0]


_EASIER = {
    "nolima": "shorter --lengths, --data niah, another --needle-set, or a larger model",
    "niah": "shorter --lengths, or a larger model",
}
_EASIER_FILE = "shorter contexts, easier questions, or a larger model"


def check_passed(
    trials: Sequence[Trial],
    results: Sequence[TrialResult],
    *,
    data: str,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raises DataError, with three examples and what may help, when no trial passed.

    Args:
        trials: of the run.
        results: theirs.
        data: where they are from: nolima, niah, or a file.
        tokenizer: of the model.
    """
    if any(result.passed for result in results):
        return
    pairs = list(zip(trials, results, strict=True))
    thinking = sum(_cut_in_thinking(tokenizer, *pair) for pair in pairs)
    examples = "\n".join(
        f"  asked for {trial.gold!r}, "
        + (
            f"cut off while thinking, after {tokenizer.decode(result.ids)[-80:]!r}"
            if _cut_in_thinking(tokenizer, trial, result)
            else f"generated {result.text[:120]!r}"
        )
        for trial, result in pairs[:3]
    )
    advice = (
        f"In {thinking} trials the model was still thinking at the end: use a larger "
        "--max-new-tokens (such as 2000), or switch thinking off. "
        if thinking
        else ""
    )
    raise DataError(
        f"0 of {len(trials)} trials passed (pass rate 0.00), so that no head can be scored. For "
        f"example:\n{examples}\n{advice}Use trials that the model answers: "
        f"{_EASIER.get(data, _EASIER_FILE)}; look whether the chat template is right."
    )


def _cut_in_thinking(tokenizer: PreTrainedTokenizerBase, trial: Trial, result: TrialResult) -> bool:
    """Whether the generation ended before anything but thinking came."""
    generation = Stopping(tokenizer, (), len(result.ids) + 1).start(trial.ids)
    for token in result.ids:
        generation.add(token)
    return bool(result.ids) and generation.content == len(result.ids)
