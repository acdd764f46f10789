"""A user's own probes: one JSON object a line with context, needle, question and answer.

    {"context": "...", "needle": "Yuki lives next to the Louvre.",
     "question": "Who lives in Paris?", "answer": "Yuki"}

A context that has the needle, once, is taken as it is. One without it is a haystack: the needle is
placed at a sentence end, at the lengths and depths that are asked for.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import nolima
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.sources.haystack import Haystack, Placement, after_sentence

COLUMNS = ("context", "needle", "question", "answer")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, each with ``COLUMNS`` and ``id`` (its own, or the line's number).

    Raises:
        DataError: naming the line that is not such an object.
    """
    rows: list[dict[str, str]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Give a JSONL file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object with {', '.join(COLUMNS)}.")
        for column in COLUMNS:
            if not isinstance(row.get(column), str) or not row[column].strip():
                raise DataError(
                    f"{path}, line {number}: {column} is {str(row.get(column))[:40]!r}, expected "
                    f"text. Columns: {', '.join(COLUMNS)}; found: {', '.join(map(str, row))}."
                )
        if row["context"].count(row["needle"]) > 1:
            raise DataError(
                f"{path}, line {number}: the context has the needle "
                f"{row['context'].count(row['needle'])} times. Which one is meant? Keep one."
            )
        name = str(row.get("id", f"line{number}"))
        rows.append({column: row[column] for column in COLUMNS} | {"id": name})
    if not rows:
        raise DataError(f"{path}: no rows. Expected one JSON object a line.")
    if len({row["id"] for row in rows}) < len(rows):
        raise DataError(f"{path}: two rows have the same id. Give each its own, or leave them out.")
    return rows


def detection(
    path: Path,
    tokenizer: Any,
    count: int | None,
    seed: int,
    *,
    lengths: Sequence[float] | None = None,
    depths: Sequence[float] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Documents of a file, and their provenance.

    Args:
        path: the file.
        tokenizer: measures contexts.
        count: how many, None for all rows (in contexts without their needle: at one length and
            depth each, in turn).
        seed: which rows, and in which order.
        lengths: for contexts without their needle; default: as long as they are.
        depths: likewise; default: the paper's five.
    """
    rows = read(path)
    random.Random(f"{seed}-jsonl").shuffle(rows)
    given = lengths is not None or depths is not None
    in_place = [row for row in rows if row["needle"] in row["context"]]
    if given and in_place:
        raise DataError(
            f"{path}: row {in_place[0]['id']} has its needle in its context, where no length or "
            "depth can be chosen. Leave out --lengths and --depths, or take the needle out."
        )
    cells = [(n, d) for n in lengths or (None,) for d in depths or nolima.PAPER_DEPTHS]
    most = len(rows) if in_place else len(rows) * len(cells)
    if count is not None and count > most:
        raise DataError(f"{count} trials were asked for, and {path} gives {most}.")
    ruler = ruler_for({"tokenizer": tokenizer})
    found = []
    for i in range(count or len(rows)):
        turn, number = divmod(i, len(rows))
        row = rows[number]
        facts: dict[str, Any] = {}
        if row["needle"] in row["context"]:
            start = row["context"].index(row["needle"])
            placed = Placement(row["context"], start, start + len(row["needle"]), 0, 0.0)
        else:
            book = Haystack.of(row["context"], ruler)
            length, depth = cells[(number + turn) % len(cells)]
            tokens = int(length or len(book) + ruler.count(" " + row["needle"]))
            placed = after_sentence(book, row["needle"], tokens=tokens, depth=depth)
            facts = {"length": tokens, "depth": depth}
        prompt, at = nolima.prompt_of(nolima.TEMPLATE, "", placed, row["question"])
        found.append(
            {
                "id": row["id"] if not facts else f"{row['id']}_{facts['length']}_{depth:g}",
                "prompt": prompt,
                "answers": [row["answer"]],
                "question": row["question"],
                "needle": row["needle"],
                "needle_start": at,
                "needle_end": at + len(row["needle"]),
                **facts,
            }
        )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return found, {"source": "file", "file": str(path), "sha256": sha256, "split": "as given"}
