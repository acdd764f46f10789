"""The JSON forms of a ranking, and rankings on the hub; `lm_eval_locos.ranking` is the front."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import RankingError

_HEAD = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")  # \d would be the digits of every script
_HALF = re.compile(r"[\ud800-\udfff]")  # half a character, which JSON can hold and no file can
_MOST_STEPS = 10**9  # of one trial; their sums fit 64 bits
_HUB = re.compile(r"hf://(?:(datasets)/)?([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")


class DuplicateError(Exception):
    """A key that occurs twice in one JSON object."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise DuplicateError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return content


def parse_head(text: str) -> Head | None:
    """The head written as ``LAYER-HEAD``, or None for any other text."""
    match = _HEAD.fullmatch(text.strip())
    return Head(int(match[1]), int(match[2])) if match else None


def fields_of(content: Any, path: str) -> dict[str, Any]:
    """The fields of HeadRanking in decoded JSON of any of the three forms."""
    if not isinstance(content, dict):
        raise _shape(path, f"a JSON {type(content).__name__} at the top")
    envelope = "scores" in content
    fields: dict[str, Any] = {"scores": _scores(content["scores"] if envelope else content, path)}
    if not envelope:
        return fields
    meta = content.get("meta", {})
    if not isinstance(meta, dict):
        raise _shape(path, f"meta is a {type(meta).__name__}, not an object")
    fields["meta"] = _writable(meta)
    if (ids := content.get("trial_ids")) is not None:
        if not isinstance(ids, list):
            raise _shape(path, f"trial_ids is a {type(ids).__name__}, not a list")
        fields["trial_ids"] = tuple(_writable(str(trial)) for trial in ids)
    if (steps := content.get("answer_steps")) is not None:
        if not isinstance(steps, list) or not all(
            type(n) is int and 0 < n <= _MOST_STEPS for n in steps
        ):
            raise _shape(path, "answer_steps is not a list of counts, each from 1 to a billion")
        fields["answer_steps"] = tuple(steps)
    if intervals := content.get("confidence_intervals"):
        # What a bootstrap over nothing gives, [NaN, NaN], is no interval.
        fields["confidence_intervals"] = {
            head: ends
            for head, ends in _scores(intervals, path).items()
            if not all(map(math.isnan, ends))
        }
    return fields


def _writable(value: Any) -> Any:
    """``value`` as a file can hold it: numbers that are not finite are None, half a character is
    U+FFFD."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_writable(item) for item in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return value


def _scores(content: Any, path: str) -> dict[Head, tuple[float, ...]]:
    if not isinstance(content, dict):
        raise _shape(path, f"scores is a {type(content).__name__}, not an object")
    scores: dict[Head, tuple[float, ...]] = {}
    for key, values in content.items():
        head = parse_head(key)
        if head is None:
            raise _shape(path, f"the key {key[:60]!r} is no head")
        if head in scores:
            raise RankingError(
                f"heads={path}: head {head} occurs twice (the second time as {key!r}). A ranking "
                "names each head once; remove one of the two."
            )
        if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
            raise _shape(path, f"head {head} has {str(values)[:60]!r}, not a list of numbers")
        try:
            scores[head] = tuple(float(value) for value in values)
        except OverflowError:
            raise _shape(path, f"head {head} has an integer too large for a score") from None
    return scores


def _shape(path: str, seen: str) -> RankingError:
    return RankingError(
        f"heads={path}: {seen}. Expected "
        '{"LAYER-HEAD": [score per trial, ...], ...}, or {"meta": {...}, "scores": {...}} with '
        "such an object in scores."
    )


def download(name: str) -> Path:
    """Fetches a ranking from the Hugging Face hub; the local path."""
    match = _HUB.fullmatch(name)
    if match is None:
        raise RankingError(
            f"heads={name}: not understood. Expected hf://datasets/OWNER/REPO/PATH.json or "
            "hf://OWNER/REPO/PATH.json, with @REVISION after REPO if one is wanted."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    kind, repository, revision, filename = match.groups()
    try:
        return Path(
            hf_hub_download(
                repository,
                filename,
                repo_type="dataset" if kind else "model",
                revision=revision,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise RankingError(
            f"heads={name}: cannot be fetched ({type(error).__name__}: {str(error)[:200]}). Check "
            "the name and the network, or give a local path."
        ) from error


def to_text(content: Mapping[str, Any]) -> str:
    """JSON with a line for every entry of an object at the top, such as a head's scores."""
    dumps = functools.partial(json.dumps, allow_nan=False)
    parts = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            entries = (f"  {dumps(name)}: {dumps(entry)}" for name, entry in value.items())
            text = "{\n" + ",\n".join(entries) + "\n }"
        else:
            text = dumps(value)
        parts.append(f" {dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
