"""What a family's loader returns: the documents, and where they come from.

    def load(**kwargs) -> Documents:
        found = locate("musique")
        rows = table("musique", found, "answerable", split="validation", columns=[...])
        documents = [{"id": ..., "family": "musique", "cluster": ..., "prompt": ...,
                      "answers": [...]} for row in rows]
        return package(documents, source_of("musique", found), split="validation", hops=2)

`LocosTask` reads `Documents.provenance` to mark a bundled sample and to record the data's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.sources.lookup import HUB_IDS, Found

if TYPE_CHECKING:
    import datasets

SPLIT = "test"
"""The one split of every task (the YAML files say ``test_split: test``)."""

_REQUIRED = ("id", "family", "cluster", "prompt", "answers")


class Documents(dict):
    """``{"test": datasets.Dataset}`` with `provenance`, a JSON-able dict."""

    def __init__(self, rows: datasets.Dataset, provenance: dict[str, Any]) -> None:
        super().__init__({SPLIT: rows})
        self.provenance = provenance


def source_of(name: str, found: Found) -> dict[str, Any]:
    """The part of the provenance that says where data called `name` was found."""
    source: dict[str, Any] = {"source": found.kind}
    if found.kind == "hub":
        source |= {"hub": HUB_IDS[name], "revision": found.revision}
    elif found.kind == "local":
        source["folder"] = str(found.path)
    return source | {"reason": found.reason}


def package(
    documents: Sequence[Mapping[str, Any]], source: Mapping[str, Any], *, split: str, **grid: Any
) -> Documents:
    """The documents as a task's dataset, with their provenance.

    documents: the same keys in each: id (unique), family, cluster, prompt, answers, flat extras.
    source: from `source_of`, or ``{"source": "generated", ...}`` for generated documents.
    split: what the documents were taken from, for the record (evaluation, validation, ...).
    grid: whatever else chose them (lengths, depths, seed ...), JSON-able.
    Raises `DataError` when there is no document, a key is missing, an id occurs twice or an answer
    is empty.
    """
    import datasets

    if not documents:
        raise DataError(
            f"no documents: {dict(source)}, split {split}, {grid}. Give other --metadata, or add "
            "to the data."
        )
    keys = set(documents[0])
    seen: set[str] = set()
    for document in documents:
        missing = [key for key in _REQUIRED if key not in document]
        if missing or set(document) != keys:
            raise DataError(
                f"document {document.get('id')!r}: keys {sorted(document)}, expected "
                f"{sorted(keys.union(_REQUIRED))}."
            )
        if document["id"] in seen:
            raise DataError(f"two documents have the id {document['id']!r}. Give each its own.")
        if not document["answers"] or not all(answer.strip() for answer in document["answers"]):
            raise DataError(
                f"document {document['id']!r} has the answers {document['answers']}: an empty one "
                "would match anything. Give each document an answer, or leave it out."
            )
        seen.add(document["id"])
    provenance = {
        **source,
        "split": split,
        "documents": len(documents),
        "sha256": sha256_of(documents),
        **({"grid": grid} if grid else {}),
    }
    return Documents(datasets.Dataset.from_list([dict(d) for d in documents]), provenance)


def check_texts(row: Mapping[str, Any], columns: Iterable[str], where: str) -> None:
    """Raises `DataError` unless these columns of a row hold text; ``where`` names the row."""
    for column in columns:
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise DataError(
                f"{where}: {column} is {str(row.get(column))[:60]!r}, expected text. Copy the "
                "benchmark's file again, or leave the row out."
            )


def check_disjoint(family: str, calibration: Iterable[str], evaluated: Iterable[str]) -> None:
    """Raises `DataError` when a calibration prompt is one that is evaluated (same sha256)."""
    asked = {sha256_of([prompt]) for prompt in evaluated}
    shared = sorted({sha256_of([prompt]) for prompt in calibration} & asked)
    if shared:
        raise DataError(
            f"{family}: {len(shared)} calibration prompts are also evaluated (first sha256 "
            f"{shared[0]}). Give the calibration split documents of its own."
        )


def sha256_of(items: Iterable[Any]) -> str:
    """The hash of JSON-able items, in their order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, sort_keys=True, ensure_ascii=False).encode("utf-8"))
        digest.update(b"\n")
    return digest.hexdigest()
