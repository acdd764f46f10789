"""Parametric recall: what the model knows without any context; and its data's arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.families.documents import Documents, check_texts, package, source_of
from lm_eval_locos.sources.lookup import SAMPLE, Found, locate, table

COLUMNS = ("question", "answer", "source")
INSTRUCTION = "Answer in less than ten words. Give only the answer.\n\n"
EXAMPLES = (
    ("Which country does Reykjavik belong to?", "Iceland"),
    ("What is the currency of Mongolia?", "Tugrik"),
    ("Who wrote The Good Soldier Svejk?", "Jaroslav Hasek"),
    ("What is (12 + 3) * 2?", "30"),
)
"""Unlike anything in the benchmark: a small city, a less popular book, a number of two digits."""


def prompt(question: str) -> str:
    """The user turn of a question, the same for examples and documents."""
    return f"{INSTRUCTION}Question: {question}\nAnswer:"


def examples() -> list[dict[str, Any]]:
    """Four example turns (a country, a currency, an author, a sum)."""
    return [{"prompt": prompt(question), "answers": [answer]} for question, answer in EXAMPLES]


def load(sources: Sequence[str] = ("city_country", "popqa"), **kwargs: Any) -> Documents:
    """The questions of these sources (``city_country``, ``popqa``, ``arithmetic``)."""
    found = locate("parametric")
    rows = _rows(found, "train")
    family = "arithmetic" if tuple(sources) == ("arithmetic",) else "parametric"
    chosen = [row for row in rows if row["source"] in sources]
    if not chosen:
        seen = sorted({row["source"] for row in rows})
        raise DataError(
            f"no questions of source {', '.join(sources)}. Expected some of: {', '.join(seen)}."
        )
    # Both kinds in turn, so that --limit takes of each.
    rank: dict[str, int] = {}
    order = []
    for i, row in enumerate(chosen):
        rank[row["source"]] = rank.get(row["source"], -1) + 1
        order.append((rank[row["source"]], sources.index(row["source"]), i))
    documents = [document(chosen[i], family, i) for _, _, i in sorted(order)]
    return package(documents, source_of("parametric", found), split="train", sources=list(sources))


def _rows(found: Found, split: str) -> list[dict[str, Any]]:
    """The rows; a `DataError` for one of other types than the hub's."""
    rows = list(table("parametric", found, split=split, columns=COLUMNS))
    for number, row in enumerate(rows, 1):
        where = f"parametric {split}, row {number}"
        check_texts(row, ("question", "source"), where)
        answer = row["answer"]
        for column, values in (
            ("answer", answer if isinstance(answer, list) else [answer]),
            ("aliases", row.get("aliases") or []),
        ):
            if (column == "answer" and not values) or not (
                isinstance(values, list)
                and all(isinstance(v, str | int | float) and str(v).strip() for v in values)
            ):
                raise DataError(
                    f"{where}: {column} is {str(row.get(column))[:60]!r}, expected text, a number "
                    "or a list of them."
                )
    return rows


def document(row: dict[str, Any], family: str, number: int) -> dict[str, Any]:
    """The document of a row.

    Other accepted answers may stand in a column ``aliases``, or all of them in a list ``answer``.
    """
    answer = row["answer"]
    listed = [*answer] if isinstance(answer, list) else [answer]
    answers = [str(accepted) for accepted in (*listed, *(row.get("aliases") or ()))]
    return {
        "id": f"{row['source']}_{number}",
        "family": family,
        "cluster": f"{row['source']}_{number}",
        "prompt": prompt(row["question"].strip()),
        "answers": answers,
        "question": row["question"].strip(),
        "source": row["source"],
    }


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().lower()


def score(doc: dict[str, Any], response: str) -> dict[str, float]:
    """``exact_match`` (lower-cased, without a final stop) and ``exact_match_tolerant``.

    The tolerant one looks at the last line that is not empty, after a colon or "is" that
    introduces the answer, without punctuation at its end.
    """
    golds = {_plain(answer) for answer in doc["answers"]}
    lines = [line for line in response.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    for opening in ("the answer is", "answer:", "answer is"):
        if last.lower().startswith(opening):
            last = last[len(opening) :]
    return {
        "exact_match": float(_plain(response) in golds),
        "exact_match_tolerant": float(last.strip(" \t.,;:!?*\"'").lower() in golds),
    }


def calibration_rows(family: str, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of our own questions, none of which the evaluation asks."""
    own = Found("bundled", SAMPLE / "parametric", None, "calibration questions are bundled")
    rows = _rows(own, "calibration")
    asked = {row["question"].strip().lower() for row in _rows(locate("parametric"), "train")}
    turns = [
        prompt(row["question"])
        for row in rows
        if (row["source"] == "arithmetic") == (family == "arithmetic")
        and row["question"].strip().lower() not in asked
    ]
    random.Random(seed).shuffle(turns)
    return turns[:count], source_of("parametric", own)


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of facts of our own."""
    return calibration_rows("parametric", count, seed)
