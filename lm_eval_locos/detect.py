"""Detection in one call: probes, one pass over them, a ranking for every method.

    >>> found = detect(model, tokenizer, data="nolima", num_trials=100, output="out")
    >>> found.rankings["locos"].top(3)
    (Head(layer=28, head=0), Head(layer=23, head=2), Head(layer=23, head=1))

In ``output`` there are then one JSON a method, ``detect.json`` (settings and every trial) and
``README.md``, the card.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedTokenizerBase

from lm_eval_locos import __version__
from lm_eval_locos import probes as sources
from lm_eval_locos.architecture import base_model
from lm_eval_locos.cache import model_identity
from lm_eval_locos.detection import rankings, runner, scores
from lm_eval_locos.detection.checkpoint import FOLDER, check_output
from lm_eval_locos.detection.generate import Engine, TrialResult
from lm_eval_locos.detection.steps import MAX_NEW_TOKENS
from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.files import clear_temporaries, replacing
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.settings import count

logger = logging.getLogger(__name__)

METHODS = (*scores.METHODS, "cri")
"""All methods; ``cri`` takes passes of its own."""
RECORD = "detect.json"
CARD = "README.md"


@dataclass(frozen=True)
class Detection:
    """What a detection found.

    Attributes:
        rankings: per method.
        probes: the trials.
        results: their results, in the same order.
    """

    rankings: dict[str, HeadRanking]
    probes: list[sources.Probe]
    results: list[TrialResult]

    @property
    def pass_rate(self) -> float:
        """The share of trials that pass."""
        return sum(result.passed for result in self.results) / len(self.results)


def chosen_methods(names: str | Sequence[str]) -> list[str]:
    """The methods that are meant, each once and in a fixed order.

    Args:
        names: of `METHODS`, `scores.VARIANTS` and ``all`` (`scores.METHODS`); commas and blanks
            separate several in one text.

    Raises:
        LocosError: an unknown name, or none.
    """
    known = (*METHODS, *scores.VARIANTS)
    texts = [names] if isinstance(names, str) else names
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise LocosError(f"methods={names!r}: expected names, some of all, {', '.join(known)}.")
    split = [name for text in texts for name in text.replace(",", " ").split()]
    meant = {method for name in split for method in (scores.METHODS if name == "all" else (name,))}
    if unknown := [name for name in split if name not in (*known, "all")]:
        raise LocosError(
            f"method {unknown[0]!r} is not known. Use all, or some of {', '.join(known)}."
        )
    if not meant:
        raise LocosError(f"no method. Use all, or some of {', '.join(known)}.")
    return sorted(meant, key=known.index)


def check(
    *,
    data: str | Path,
    num_trials: int | None,
    lengths: sources.Grid | None,
    depths: sources.Grid | None,
    methods: str | Sequence[str],
    batch_size: int | Literal["auto"],
    max_new_tokens: int,
    output: str | Path | None,
    resume: bool,
) -> list[str]:
    """The methods that are meant; LocosError for what can be refused before a model is loaded.

    All arguments are as for `detect`.
    """
    meant = chosen_methods(methods)
    count("max_new_tokens", max_new_tokens, 1)
    if batch_size != "auto":
        count("batch_size", batch_size, 1)
    sources.check(data, num_trials=num_trials, lengths=lengths, depths=depths)
    if output is not None:
        check_output(Path(output), RECORD, resume=resume)
    return meant


def detect(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: str | Path = "nolima",
    num_trials: int | None = None,
    lengths: sources.Grid | None = None,
    depths: sources.Grid | None = None,
    needle_set: str = "needle_set.json",
    methods: str | Sequence[str] = scores.METHODS,
    seed: int = 42,
    chat_template: bool | None = None,
    batch_size: int | Literal["auto"] = "auto",
    share: bool = True,
    max_new_tokens: int = MAX_NEW_TOKENS,
    output: str | Path | None = None,
    resume: bool = False,
    name: str | None = None,
    revision: str | None = None,
    peft: str | None = None,
    progress: bool = True,
) -> Detection:
    """Scores every head of a model.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one.
        tokenizer: its tokenizer.
        data, num_trials, lengths, depths, needle_set, seed, chat_template: see
            `lm_eval_locos.probes.load`.
        methods: see `chosen_methods`.
        batch_size: most trials at a time; ``auto`` by free memory.
        share: whether the text before the needle is prefilled once for all trials that share it.
        max_new_tokens: limit of each generation.
        output: folder for results and checkpoints; None keeps everything in memory.
        resume: go on with what ``output`` has, which is an error otherwise.
        name: what the rankings call the model; default its name or path.
        revision: that was asked for; the record has the commit that was loaded, where known.
        peft: where the model's adapter is from, for the record; default its name and kind.
        progress: whether to show a bar.

    Raises:
        LocosError: a wrong argument.
        DataError: wrong data, no trial passes, ``output`` holds another run.
        ModelError: unsupported model.
    """
    methods = check(
        data=data,
        num_trials=num_trials,
        lengths=lengths,
        depths=depths,
        methods=methods,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        output=output,
        resume=resume,
    )
    config = base_model(model).config
    engine = Engine(
        model,
        tokenizer,
        methods=[method for method in methods if method != "cri"],
        max_new_tokens=max_new_tokens,
    )
    found, source = sources.load(
        data,
        tokenizer,
        num_trials=num_trials,
        lengths=lengths,
        depths=depths,
        seed=seed,
        chat_template=chat_template,
        needle_set=needle_set,
    )
    trials = [probe.trial for probe in found]
    sources.check_room(config, found, max_new_tokens)
    shown = {key: source.pop(key) for key in _SHOWN}
    meta = {
        "model": name or getattr(config, "_name_or_path", "") or "unnamed",
        **rankings.provenance(model, revision, peft),
        "dtype": str(base_model(model).dtype).removeprefix("torch."),
        "fingerprint": engine.architecture.fingerprint,
        "model_identity": model_identity(model),
        "tokenizer_sha256": sources.tokenizer_sha256(tokenizer),
        **shown,
        "data": source,
        "max_new_tokens": max_new_tokens,
        "plugin_version": __version__,
        "versions": rankings.versions(),
    }
    folder = Path(output) if output is not None else None
    identity = {key: meta[key] for key in _IDENTITY} | {"methods": methods}
    state = runner.processes()
    main = state is None or state.is_main_process
    if folder is not None:
        if resume and (folder / RECORD).exists():
            return _finished(folder, found, identity)
        if main:
            clear_temporaries(folder)
        if state is not None:
            state.wait_for_everyone()
    results = runner.run(
        engine,
        trials,
        batch_size=batch_size,
        share=share,
        with_cri="cri" in methods,
        checkpoint=folder / FOLDER if folder is not None else None,
        identity=identity,
        progress=progress,
    )
    if not rankings.UNFILTERED.issuperset(methods):
        runner.check_passed(trials, results, data=str(data), tokenizer=tokenizer)
    ids = [probe.id for probe in found]
    layers = tuple(engine.architecture.layers)
    made = {method: rankings.ranking(method, layers, ids, results, meta) for method in methods}
    detection = Detection(made, found, results)
    if folder is not None and main:
        _write(folder, detection, meta | {"methods": methods})
    return detection


_SHOWN = ("dataset", "split", "seed", "chat_template", "trials_sha256")
_IDENTITY = ("model_identity", "tokenizer_sha256", "trials_sha256", "dtype", "max_new_tokens")


def _finished(folder: Path, found: list[sources.Probe], identity: dict[str, Any]) -> Detection:
    """What a finished run wrote; the results are without the trials' own scores."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        meta = dict(record["meta"])
        meta["methods"] = chosen_methods(meta["methods"])
        results = [
            TrialResult((), trial["generated"], tuple(trial["answer_steps"]), trial["passed"], {})
            for trial in record["trials"]
        ]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{folder / RECORD} is not what a detection writes ({type(error).__name__}: {error}). "
            "Choose another --output, or delete the folder."
        ) from error
    for key, value in identity.items():
        if meta.get(key) != value:
            raise DataError(
                f"{folder} holds another run's results: {key} was {meta.get(key)!r} and "
                f"is {value!r}. Choose another --output."
            )
    logger.warning("%s is finished already; nothing was run", folder)
    _clear(folder)
    made = {name: HeadRanking.load(folder / f"{name}.json") for name in identity["methods"]}
    return Detection(made, found, results)


def _write(folder: Path, detection: Detection, meta: dict[str, Any]) -> None:
    """Writes everything; the record last, since it says that the run is finished."""
    for method, ranking in detection.rankings.items():
        ranking.save(folder / f"{method}.json")
    with replacing(folder / CARD) as temporary:
        temporary.write_text(rankings.card(detection.rankings), encoding="utf-8")
    record = {
        "meta": meta,
        "pass_rate": detection.pass_rate,
        "trials": [
            {
                "id": probe.id,
                **probe.facts,
                "gold": probe.trial.gold,
                "needle_tokens": list(probe.trial.needle),
                "generated": result.text,
                "passed": result.passed,
                "answer_steps": list(result.steps),
            }
            for probe, result in zip(detection.probes, detection.results, strict=True)
        ],
    }
    with replacing(folder / RECORD) as temporary:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8")
    _clear(folder)


def _clear(folder: Path) -> None:
    """Removes what a finished run needs no more, also where it was killed before it could."""
    clear_temporaries(folder)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
