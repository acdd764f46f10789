"""MuSiQue: questions whose answer takes several passages out of twenty."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import scoring
from lm_eval_locos.families.documents import (
    Documents,
    check_disjoint,
    check_texts,
    package,
    source_of,
)
from lm_eval_locos.sources.lookup import Found, locate, table

COLUMNS = ("id", "paragraphs", "question", "answer", "answer_aliases", "answerable")
PROMPT = (
    "Here are some passages.\n\n{passages}\n\n"
    "Answer the question from the passages. Reason step by step, then give the final answer, as "
    "short as possible, inside <answer> and </answer>.\n\nQuestion: {question}\nAnswer:"
)


def load(hops: int | None = None, **kwargs: Any) -> Documents:
    """The answerable validation questions; with ``hops`` only those of that many hops."""
    found = locate("musique")
    rows = _rows(found, "validation")
    documents = [_document(row) for row in rows if hops in (None, _hops(row["id"]))]
    if not documents:
        seen = sorted({_hops(row["id"]) for row in rows})
        raise DataError(
            f"hops={hops}: none of {len(rows)} MuSiQue questions has as many. Expected one of: "
            f"{', '.join(map(str, seen))}."
        )
    return package(documents, source_of("musique", found), split="validation", hops=hops or "all")


def _rows(found: Found, split: str) -> list[dict[str, Any]]:
    rows = table("musique", found, "answerable", split=split, columns=COLUMNS)
    return [
        _checked(row, f"musique {split}, row {number}")
        for number, row in enumerate(rows, 1)
        if row["answerable"]
    ]


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row; a `DataError` unless it has the types of the hub's."""
    check_texts(row, ("id", "question", "answer"), where)
    aliases, passages = row["answer_aliases"] or [], row["paragraphs"]
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(
            f"{where}: answer_aliases is {str(aliases)[:60]!r}, expected a list of texts."
        )
    if not isinstance(passages, list) or not all(
        isinstance(p, dict) and isinstance(p.get(key), str)
        for p in passages
        for key in ("title", "paragraph_text")
    ):
        raise DataError(
            f"{where}: paragraphs is {str(passages)[:60]!r}, expected a list of objects with the "
            "texts title and paragraph_text."
        )
    return row


def _hops(name: str) -> int:
    """The number of hops, with which an id begins (2hop__, 3hop1__)."""
    if not name[:1].isdecimal():
        raise DataError(f"MuSiQue id {name!r}: expected it to begin with the hops, as in 2hop__1.")
    return int(name[0])


def _prompt(paragraphs: Sequence[Mapping[str, Any]], question: str) -> str:
    passages = "\n\n".join(
        f"[{i}] {p['title']}\n{p['paragraph_text']}" for i, p in enumerate(paragraphs, 1)
    )
    # str.replace: passages may hold braces.
    return PROMPT.replace("{question}", question).replace("{passages}", passages)


def _document(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "family": "musique",
        # Questions over the same first passage share an id up to the last part.
        "cluster": row["id"].rpartition("_")[0] or row["id"],
        "prompt": _prompt(row["paragraphs"], row["question"]),
        # An empty one would be found in any response, or be one.
        "answers": [row["answer"], *(a for a in row["answer_aliases"] or () if a.strip())],
        "question": row["question"],
        "hops": _hops(row["id"]),
    }


def score(doc: dict[str, Any], response: str) -> dict[str, float]:
    """``acc`` (answer or alias inside the prediction), official ``f1`` and ``em``, ``tag_present``.

    The prediction is the inside of the last ``<answer>`` tag, the whole text without one.
    """
    prediction, tagged = scoring.last_answer_tag(response)
    return {
        "acc": scoring.sub_span(doc["answers"], prediction),
        "f1": scoring.token_f1(doc["answers"], prediction),
        "em": scoring.exact_match(doc["answers"], prediction),
        "tag_present": float(tagged),
    }


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of the train split, none of which is evaluated (else a `DataError`)."""
    found = locate("musique")
    rows = table("musique", found, "answerable", split="train", columns=COLUMNS)
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    chosen = (_checked(rows[i], f"musique train, row {i + 1}") for i in order)
    turns = [
        _prompt(row["paragraphs"], row["question"])
        for row in itertools.islice((row for row in chosen if row["answerable"]), count)
    ]
    evaluated = (_prompt(r["paragraphs"], r["question"]) for r in _rows(found, "validation"))
    check_disjoint("musique", turns, evaluated)
    return turns, source_of("musique", found)
