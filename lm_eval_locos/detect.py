"""Detection in one call: probes, one pass over them, a ranking for every method.

    >>> found = detect(model, tokenizer, data="nolima", num_trials=100, output="out")
    >>> found.rankings["locos"].top(3)
    (Head(layer=28, head=0), Head(layer=23, head=2), Head(layer=23, head=1))

In ``output`` there are then one JSON a method, ``detect.json`` (settings and every trial) and
``README.md``, the card.
"""

from __future__ import annotations

import hashlib
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
from lm_eval_locos.detection.generate import Engine, TrialResult
from lm_eval_locos.detection.steps import MAX_NEW_TOKENS
from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.files import check_folder, clear_temporaries, replacing
from lm_eval_locos.ranking import HeadRanking

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


def detect(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: str = "nolima",
    num_trials: int | None = None,
    lengths: Sequence[float] | None = None,
    depths: Sequence[float] | None = None,
    needle_set: str = "needle_set.json",
    methods: Sequence[str] = scores.METHODS,
    seed: int = 42,
    chat_template: bool | None = None,
    batch_size: int | Literal["auto"] = "auto",
    share: bool = True,
    max_new_tokens: int = MAX_NEW_TOKENS,
    output: str | Path | None = None,
    resume: bool = False,
    name: str | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Detection:
    """Scores every head of a model.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one.
        tokenizer: its tokenizer.
        data, num_trials, lengths, depths, needle_set, seed, chat_template: see
            `lm_eval_locos.probes.load`.
        methods: of `METHODS` and `scores.VARIANTS`.
        batch_size: most trials at a time; ``auto`` by free memory.
        share: whether the text before the needle is prefilled once for all trials that share it.
        max_new_tokens: limit of each generation.
        output: folder for results and checkpoints; None keeps everything in memory.
        resume: go on with what ``output`` has, which is an error otherwise.
        name: what the rankings call the model; default its name or path.
        revision: the model's, for the record.
        progress: whether to show a bar.

    Raises:
        DataError: wrong data, no trial passes, ``output`` holds another run.
        ModelError: unsupported model.
    """
    known = (*METHODS, *scores.VARIANTS)
    for method in methods:
        if method not in known:
            raise LocosError(f"method {method!r} is not known. Use some of {', '.join(known)}.")
    if not methods:
        raise LocosError(f"no method. Use some of {', '.join(known)}.")
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
    _check_lengths(model, found, max_new_tokens)
    shown = {key: source.pop(key) for key in _SHOWN}
    meta = {
        "model": name or getattr(base_model(model).config, "_name_or_path", "") or "unnamed",
        "revision": revision or getattr(base_model(model).config, "_commit_hash", None),
        "dtype": str(base_model(model).dtype).removeprefix("torch."),
        "fingerprint": engine.architecture.fingerprint,
        "model_identity": model_identity(model),
        "tokenizer_sha256": _tokenizer_hash(tokenizer),
        **shown,
        "data": source,
        "max_new_tokens": max_new_tokens,
        "plugin_version": __version__,
        "versions": rankings.versions(),
    }
    folder = Path(output) if output is not None else None
    identity = {key: meta[key] for key in _IDENTITY} | {"methods": list(methods)}
    state = runner.processes()
    main = state is None or state.is_main_process
    if folder is not None:
        if resume and (folder / RECORD).exists():
            return _finished(folder, found, identity)
        if main:
            _check_folder(folder, resume)
            clear_temporaries(folder)
        if state is not None:
            state.wait_for_everyone()
    results = runner.run(
        engine,
        trials,
        batch_size=batch_size,
        share=share,
        with_cri="cri" in methods,
        checkpoint=folder / "checkpoint" if folder is not None else None,
        identity=identity,
        progress=progress,
    )
    if set(methods) != {"headkv"}:
        runner.check_passed(trials, results)
    ids = [probe.id for probe in found]
    layers = tuple(engine.architecture.layers)
    made = {method: rankings.ranking(method, layers, ids, results, meta) for method in methods}
    detection = Detection(made, found, results)
    if folder is not None and main:
        _write(folder, detection, meta | {"methods": list(methods)})
    return detection


_SHOWN = ("dataset", "split", "seed", "chat_template", "trials_sha256")
_IDENTITY = ("model_identity", "tokenizer_sha256", "trials_sha256", "dtype", "max_new_tokens")


def _finished(folder: Path, found: list[sources.Probe], identity: dict[str, Any]) -> Detection:
    """What a finished run wrote; the results are without the trials' own scores."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        meta = dict(record["meta"])
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


def _check_folder(folder: Path, resume: bool) -> None:
    check_folder(folder)
    if (folder / RECORD).exists():
        raise DataError(
            f"{folder} holds the results of a finished run. Choose another --output, or delete it."
        )
    if (folder / "checkpoint").exists() and not resume:
        raise DataError(
            f"{folder} holds an unfinished run. Add --resume to go on with it, or choose another "
            "--output."
        )


def _check_lengths(model: nn.Module, found: Sequence[sources.Probe], new: int) -> None:
    config = base_model(model).config.get_text_config(decoder=True)
    room = getattr(config, "max_position_embeddings", None)
    for probe in found:
        if room and len(probe.trial.ids) + new > room:
            raise DataError(
                f"trial {probe.id}: the prompt has {len(probe.trial.ids)} tokens and needs {new} "
                f"for the answer; the model takes {room}. Use shorter --lengths."
            )


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary, the chat template and how a text is cut."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "chat_template": tokenizer.chat_template,
        "class": type(tokenizer).__name__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
