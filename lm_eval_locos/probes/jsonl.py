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
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import nolima
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.files import shown
from lm_eval_locos.sources.haystack import Haystack, Placement, after_sentence

COLUMNS = ("context", "needle", "question", "answer")
_HALF = re.compile(r"[\ud800-\udfff]")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, each with ``COLUMNS`` and ``id`` (its own, or the line's number).

    Raises:
        DataError: naming the line that is not such an object.
    """
    rows: list[dict[str, str]] = []
    try:
        # Not splitlines: JSON's text may hold U+2028 and others that it takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Give a JSONL file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line), f"{path}, line {number}", f"line{number}"))
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error}). Write one object a line, with "
                f"{', '.join(COLUMNS)}."
            ) from None
    if not rows:
        raise DataError(f"{path}: no rows. Expected one JSON object a line.")
    if len({row["id"] for row in rows}) < len(rows):
        raise DataError(f"{path}: two rows have the same id. Give each its own, or leave them out.")
    return rows


def _row(row: Any, where: str, name: str) -> dict[str, str]:
    """``COLUMNS`` and ``id`` of a decoded line; ``name`` is the id of a row without one."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with {', '.join(COLUMNS)}.")
    for column in COLUMNS:
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise DataError(
                f"{where}: {column} is {str(row.get(column))[:40]!r}, expected text. "
                f"Columns: {', '.join(COLUMNS)}; found: {', '.join(map(str, row))[:200]}."
            )
    name = name if row.get("id") is None else row["id"]
    if not isinstance(name, str | int):
        raise DataError(f"{where}: id is a {type(name).__name__}, expected text, or leave it out.")
    found = {column: row[column] for column in COLUMNS} | {"id": str(name)}
    for column, text in found.items():
        if half := _HALF.search(text):
            raise DataError(
                f"{where}: {column} has {half[0]!r}, half of a character that was written as two "
                "\\u escapes. Write both, or the character itself."
            )
    if (times := row["context"].count(row["needle"])) > 1:
        raise DataError(
            f"{where}: the context has the needle {times} times. Which one is meant? Keep one."
        )
    return found


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
        raise DataError(
            f"{count} trials were asked for, and {path} gives {most}. Ask for {most} or fewer, or "
            "add rows, lengths or depths."
        )
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
    return found, {"source": "file", "file": shown(path), "sha256": sha256, "split": "as given"}
