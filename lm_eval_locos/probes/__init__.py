"""Probe prompts for detection: NoLiMa, a literal needle in a haystack, or a user's own file.

    >>> probes, source = load("nolima", tokenizer, num_trials=100, seed=42)
    >>> probes[0].id, probes[0].trial.needle, probes[0].facts["depth"]
    ('0403_T02_onehop_Hugo_rand_book_2.txt_350_25', (180, 196), 25.0)

Each source gives documents with ``prompt``, ``needle_start``, ``needle_end`` (characters in the
prompt) and ``answers``; this module tokenises them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.prompts import has_chat_template, tokenised
from lm_eval_locos.errors import DataError
from lm_eval_locos.families import nolima
from lm_eval_locos.families.grids import numbers
from lm_eval_locos.files import shown
from lm_eval_locos.probes import jsonl, niah

NUM_TRIALS = 100
"""Trials of NoLiMa and niah where no number is given; a file's rows are all used."""
Grid = str | float | Sequence[float]
"""Lengths or depths: numbers, one number, ``START:STOP:COUNT`` or ``500,1000``."""


@dataclass(frozen=True)
class Probe:
    """A trial with its name.

    Attributes:
        id: unique among the probes of a run.
        trial: tokens, needle, gold answer.
        facts: what is known about it (length, depth, book, ...), JSON-able.
    """

    id: str
    trial: Trial
    facts: dict[str, Any] = field(default_factory=dict, compare=False)


def check(
    data: str | Path,
    *,
    num_trials: int | None = None,
    lengths: Grid | None = None,
    depths: Grid | None = None,
    seed: int = 42,
) -> dict[str, tuple[float, ...] | None]:
    """Refuses what `load` would, as far as that can be known without a model; the grids, read.

    Args:
        data, num_trials, lengths, depths, seed: see `load`.

    Returns:
        ``lengths`` (whole numbers) and ``depths``, None where not given.

    Raises:
        DataError: unknown data, a wrong row in a file, a wrong grid or number of trials.
    """
    if num_trials is not None and num_trials < 1:
        raise DataError(f"num_trials={num_trials}: expected at least 1.")
    grid = {
        "lengths": numbers("lengths", lengths, least=1, whole=True),
        "depths": numbers("depths", depths, most=100),
    }
    name = os.fspath(data)
    if name not in ("nolima", "niah"):
        if not _is_file(name):
            raise DataError(
                f"data={name[:500]}: expected nolima, niah, or the path of a JSONL file."
            )
        jsonl.plan(Path(name), num_trials, seed, **grid)
    return grid


def load(
    data: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_trials: int | None = None,
    lengths: Grid | None = None,
    depths: Grid | None = None,
    seed: int = 42,
    chat_template: bool | None = None,
    needle_set: str = "needle_set.json",
) -> tuple[list[Probe], dict[str, Any]]:
    """Probes, and where they come from.

    Args:
        data: ``nolima``, ``niah``, or the path of a JSONL file with the columns context, needle,
            question, answer.
        tokenizer: of the model; it measures contexts.
        num_trials: how many; default `NUM_TRIALS`, for a file all rows.
        lengths: context lengths in tokens, rounded to whole ones; default the paper's (short ones
            on the bundled sample).
        depths: needle depths in percent of the context; default the paper's.
        seed: of the choice of trials.
        chat_template: whether prompts go through it; default: if the tokenizer has one.
        needle_set: NoLiMa's file.

    Raises:
        DataError: missing or wrong data, more trials than there are, a needle that gets lost.
    """
    if chat_template is None:
        chat_template = has_chat_template(tokenizer)
    grid = check(data, num_trials=num_trials, lengths=lengths, depths=depths, seed=seed)
    data = os.fspath(data)
    count = num_trials or NUM_TRIALS
    if data == "nolima":
        found, source = nolima.detection(tokenizer, count, seed, needle_set=needle_set, **grid)
    elif data == "niah":
        found, source = niah.detection(tokenizer, count, seed, **grid)
    else:
        found, source = jsonl.detection(Path(data), tokenizer, num_trials, seed, **grid)
    name = data if data in ("nolima", "niah") else shown(Path(data).name)
    probes = [_probe(document, tokenizer, chat_template) for document in found]
    return probes, {
        "dataset": name,
        **source,
        "seed": seed,
        "chat_template": chat_template,
        "trials_sha256": fingerprint(probes),
    }


def _is_file(data: str) -> bool:
    try:
        return Path(data).is_file()
    except (OSError, ValueError):  # a name that is too long, or of no file
        return False


def _probe(document: dict[str, Any], tokenizer: Any, chat_template: bool) -> Probe:
    needle = (document["needle_start"], document["needle_end"])
    gold = document["answers"][0]
    try:
        trial = tokenised(tokenizer, document["prompt"], needle, gold, chat_template=chat_template)
    except DataError as error:
        raise DataError(f"trial {document['id']}: {error}") from error
    facts = {key: value for key, value in document.items() if key not in _NOT_KEPT}
    return Probe(document["id"], trial, facts | {"prompt_tokens": len(trial.ids)})


_NOT_KEPT = ("id", "prompt", "needle_start", "needle_end", "family", "answers")


def fingerprint(probes: Sequence[Probe]) -> str:
    """The sha256 of all prompts, needles and answers in their order."""
    digest = hashlib.sha256()
    for probe in probes:
        trial = probe.trial
        digest.update(json.dumps([probe.id, trial.ids, trial.needle, trial.gold]).encode())
    return digest.hexdigest()


def check_room(config: PretrainedConfig, probes: Sequence[Probe], new: int) -> None:
    """Raises DataError where a prompt with ``new`` generated tokens is longer than the model takes.

    Args:
        config: the model's.
        probes: of one run.
        new: most tokens that are generated.
    """
    room = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    # A file that has a row with its needle in place takes no --lengths.
    fixed = any("length" not in probe.facts for probe in probes)
    for probe in probes:
        if room and len(probe.trial.ids) + new > room:
            advice = "Use shorter contexts in the file" if fixed else "Use shorter --lengths"
            raise DataError(
                f"trial {probe.id}: the prompt has {len(probe.trial.ids)} tokens and needs {new} "
                f"for the answer; the model takes {room}. {advice}."
            )


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary, the chat template and how a text is cut."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "chat_template": tokenizer.chat_template,
        "class": type(tokenizer).__name__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
