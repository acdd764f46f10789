"""Sample files of the harness: a line a document (``lm_eval --log_samples``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.reporting.text import clean, number


@dataclass(frozen=True)
class Sample:
    """One document of a task and its answer.

    Attributes:
        document: the harness's hash of the document.
        prompt: the harness's hash of the prompt.
        id: the document's own id, or its number.
        cluster: documents of one cluster (a needle, a story) do not vary independently.
        scores: by metric name; empty where the prompt was skipped.
        question: asked, "" where the document has none of its own.
        answers: that are right.
        response: the model's.
        length: context length of a NoLiMa document, in the grid's unit, or None.
        depth: of its needle in percent, or None.
        family: that the document says it is of, or "".
        conditions: (answer, score) by condition, of a task that asked under several; None for a
            skipped prompt.
    """

    document: str
    prompt: str
    id: str
    cluster: str
    scores: Mapping[str, float]
    question: str
    answers: tuple[str, ...]
    response: str
    length: float | None
    depth: float | None
    family: str = ""
    conditions: Mapping[str, tuple[str | None, float | None]] = field(default_factory=dict)


def read_samples(path: Path, filter_name: str, metrics: set[str]) -> tuple[Sample, ...]:
    """The documents of a sample file under one filter, in the order of the file.

    Raises:
        DataError: a line that is not a sample, or a document that occurs twice.
    """
    found: dict[str, Sample] = {}
    place = 1
    try:
        with path.open(encoding="utf-8") as lines:
            for place, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if entry.get("filter", filter_name) != filter_name:
                    continue
                sample = _sample(clean(entry), metrics)
                if sample.document in found:
                    raise DataError(
                        f"{path}, line {place}: document {sample.id} occurs twice. Were two runs "
                        "appended to one file? Run it again with another --output_path."
                    )
                found[sample.document] = sample
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Make it readable, or delete it to "
            "compare without samples."
        ) from error
    except DataError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {place}: not a sample of the harness "
            f"({type(error).__name__}: {error}). Was the run cut off? Run it again, or delete "
            "the file to compare without samples."
        ) from None
    return tuple(found.values())


def _sample(entry: Mapping[str, Any], metrics: set[str]) -> Sample:
    doc = entry.get("doc")
    doc = doc if isinstance(doc, dict) else {}
    scores = {m: v for m in metrics if (v := number(entry.get(m))) is not None}
    answers = doc.get("answers")
    asked = (doc.get("locos") or {}).get("conditions") or {}
    target = [str(a) for a in answers] if isinstance(answers, list) else [str(entry["target"])]
    return Sample(
        document=str(entry["doc_hash"]),
        prompt=str(entry["prompt_hash"]),
        id=str(doc.get("id", entry["doc_id"])),
        cluster=str(doc.get("cluster", doc.get("id", entry["doc_id"]))),
        scores=scores,
        question=str(doc.get("question", "")),
        answers=tuple(target),
        response=_first(entry.get("filtered_resps")),
        length=number(doc.get("length")) if doc.get("family") == "nolima" else None,
        depth=number(doc.get("depth")) if doc.get("family") == "nolima" else None,
        family=str(doc.get("family", "")),
        conditions={name: (one["answer"], number(one["score"])) for name, one in asked.items()},
    )


def _first(found: Any) -> str:
    """The text of the first response; of a task of multiple choice there is none."""
    while isinstance(found, list):
        found = found[0] if found else ""
    return found if isinstance(found, str) else ""
