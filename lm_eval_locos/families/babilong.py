"""BABILong: where people and things are, in stories hidden in long text."""

from __future__ import annotations

import random
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
from lm_eval_locos.sources.lookup import SAMPLE, Found, locate, table

COLUMNS = ("input", "question", "target")
_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_YES_NO = ("no", "yes")
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13"), _ROOMS),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    **dict.fromkeys(("qa6", "qa9", "qa17", "qa18"), _YES_NO),
    "qa7": ("none", "one", "two", "three"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa10": ("maybe", "no", "yes"),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa19": ("n", "e", "s", "w"),
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
"""The possible answers of each task."""

_HOW = {
    "qa5": "Name the person or the thing.",
    "qa8": "If there are several, separate them with commas; if there is none, say nothing.",
    "qa19": "Give the two directions in order, as in s,e.",
}
PROMPT = (
    "Here is a text with facts about people, places and things in it.\n\n{input}\n\n"
    "Answer the question from the facts in the text; the latest fact counts. {how}"
    "Put the final answer, as short as possible, inside <answer> and </answer>.\n\n"
    "Question: {question}\nAnswer:"
)


def load(task: str, length: str, **kwargs: Any) -> Documents:
    """The questions of one BABILong task (``qa1`` ..) at one length (``0k`` ..)."""
    found = locate("babilong")
    rows = _rows(found, length, task)
    documents = [
        {
            "id": f"{task}_{length}_{i}",
            "family": "babilong",
            "cluster": f"{task}_{i}",
            "prompt": _prompt(task, row),
            "answers": [row["target"].strip()],
            "question": row["question"].strip(),
            "task": task,
            "length": length,
        }
        for i, row in enumerate(rows)
    ]
    return package(documents, source_of("babilong", found), split=task, length=length)


def _rows(found: Found, length: str, task: str) -> list[dict[str, str]]:
    rows = list(table("babilong", found, length, split=task, columns=COLUMNS))
    for number, row in enumerate(rows, 1):
        check_texts(row, COLUMNS, f"babilong {length} {task}, row {number}")
    return rows


def _prompt(task: str, row: dict[str, str]) -> str:
    if task not in LABELS:
        raise DataError(f"BABILong task {task!r} is not known. Use one of {', '.join(LABELS)}.")
    how = f"{_HOW[task]} " if task in _HOW else f"Choose from: {', '.join(LABELS[task])}. "
    filled = PROMPT.replace("{how}", how).replace("{question}", row["question"].strip())
    return filled.replace("{input}", row["input"].strip())


def score(doc: dict[str, Any], response: str) -> dict[str, float]:
    """``acc`` (the target as whole words and no other label) and ``tag_present``."""
    prediction, tagged = scoring.last_answer_tag(response)
    labels = LABELS[doc["task"]]
    return {
        "acc": scoring.label_match(doc["answers"][0], prediction, doc["question"], labels),
        "tag_present": float(tagged),
    }


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of qa1 to qa5 stories of our own: evaluation keeps all of the benchmark's.

    Only the bundled sample could share a story with them; a `DataError` if it does (its stories of
    length 0k: the longer ones differ in any case).
    """
    own = Found("bundled", SAMPLE / "babilong", None, "calibration stories are bundled")

    def turns(config: str) -> list[str]:
        return [
            _prompt(task, row)
            for task in ("qa1", "qa2", "qa3", "qa4", "qa5")
            for row in _rows(own, config, task)
        ]

    found = turns("calibration")
    check_disjoint("babilong", found, turns("0k"))
    random.Random(seed).shuffle(found)
    return found[:count], source_of("babilong", own)
