"""A user's own probes: one JSON object a line with context, needle, question and answer.

    {"context": "...", "needle": "Yuki lives next to the Louvre.",
     "question": "Who lives in Paris?", "answer": "Yuki"}

A context that has the needle, once, is taken as it is. One without it is a haystack: the needle is
placed at a sentence end, at the lengths and depths that are asked for, any number of trials being
balanced over them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
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
    if not times and _plain(row["needle"]) in _plain(row["context"]):
        raise DataError(
            f"{where}: the context has the needle {row['needle'][:60]!r} with other blanks or "
            "capitals, so that it would be there twice after it is placed. Copy the needle exactly "
            "from the context, or take it out there."
        )
    return found


def _plain(text: str) -> str:
    """The text without what a copy by hand changes: blanks, line breaks, capitals."""
    return " ".join(text.split()).casefold()


def _in_place(row: dict[str, str]) -> bool:
    return row["needle"] in row["context"]


Cell = tuple[float | None, float]
"""A length in tokens, None for the context's own, and a depth in percent."""


def plan(
    path: Path,
    count: int | None,
    seed: int,
    *,
    lengths: Sequence[float] | None = None,
    depths: Sequence[float] | None = None,
) -> list[tuple[dict[str, str], Cell | None]]:
    """The rows of a run's trials in their order, each with its cell of the grid.

    Rows, lengths, depths and cells take turns: of any number of trials none of them has two more
    than another of its kind, and no row meets a cell twice. The seed shuffles rows and grid.

    Args:
        path, count, seed, lengths, depths: see `detection`.

    Returns:
        Rows with cells; None for a row whose needle is in its place.

    Raises:
        DataError: a wrong row, a grid for needles in their places, too many trials.
    """
    rows = read(path)
    random.Random(f"{seed}-jsonl").shuffle(rows)
    given = lengths is not None or depths is not None
    in_place = [row for row in rows if _in_place(row)]
    if given and in_place:
        raise DataError(
            f"{path}: row {in_place[0]['id']} has its needle in its context, where no length or "
            "depth can be chosen. Leave out --lengths and --depths, or take the needle out."
        )
    cells = _cells(lengths or (None,), depths or nolima.PAPER_DEPTHS, seed)
    most = len(rows) if in_place else len(rows) * len(cells)
    if count is not None and count > most:
        raise DataError(
            f"{count} trials were asked for, and {path} gives {most}. Ask for {most} or fewer, or "
            "add rows, lengths or depths."
        )
    if in_place:  # at most one trial a row
        turns = itertools.count()
        return [
            (row, None if _in_place(row) else cells[next(turns) % len(cells)])
            for row in rows[:count]
        ]
    return [(rows[i], cells[j]) for i, j in _pairs(len(rows), len(cells), count or len(rows))]


def _cells(lengths: Sequence[Any], depths: Sequence[float], seed: int) -> list[Cell]:
    """Every pair once; of any number from the first on, lengths and depths take turns."""
    rng = random.Random(f"{seed}-cells")
    lengths, depths = rng.sample(lengths, len(lengths)), rng.sample(depths, len(depths))
    together = math.lcm(len(lengths), len(depths))
    return [
        # Where both turns end together the depths move on by one: these pairs are new.
        (lengths[n % len(lengths)], depths[(n + n // together) % len(depths)])
        for n in range(len(lengths) * len(depths))
    ]


def _pairs(rows: int, cells: int, count: int) -> list[tuple[int, int]]:
    """``count`` different pairs of a row and a cell, both taking turns."""
    # Rows in an order that moves on by one each turn meet other lengths in the next turn, but for
    # many trials pairs would come again.
    moving = [((n + n // rows) % rows, n % cells) for n in range(count)]
    if len(set(moving)) == count:
        return moving
    together = math.lcm(rows, cells)
    return [((n + n // together) % rows, n % cells) for n in range(count)]


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
        count: how many, None for all rows (those without their needle at one length and depth
            each).
        seed: of the choice of rows and cells, see `plan`.
        lengths: for contexts without their needle; default: as long as they are.
        depths: likewise; default: the paper's five.

    Raises:
        DataError: see `plan`; a length without room for the needle.
    """
    planned = plan(path, count, seed, lengths=lengths, depths=depths)
    ruler = ruler_for({"tokenizer": tokenizer})
    found = []
    for row, cell in planned:
        facts: dict[str, Any] = {}
        if cell is None:
            start = row["context"].index(row["needle"])
            placed = Placement(row["context"], start, start + len(row["needle"]), 0, 0.0)
        else:
            book = Haystack.of(row["context"], ruler)
            length, depth = cell
            tokens = int(length or len(book) + ruler.count(" " + row["needle"]))
            placed = after_sentence(book, row["needle"], tokens=tokens, depth=depth)
            facts = {"length": tokens, "depth": depth}
        prompt, at = nolima.prompt_of(nolima.TEMPLATE, "", placed, row["question"])
        found.append(
            {
                "id": row["id"]
                if not facts
                else f"{row['id']}_{facts['length']}_{facts['depth']:g}",
                "prompt": prompt,
                "answers": [row["answer"]],
                "question": row["question"],
                "needle": row["needle"],
                "needle_start": at,
                "needle_end": at + len(row["needle"]),
                **facts,
            }
        )
    source: dict[str, Any] = {
        "source": "file",
        "file": shown(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "split": "as given",
    }
    if lengths:
        source["lengths"] = [int(n) for n in lengths]
    if any(cell for _, cell in planned):
        source["depths"] = [float(x) for x in depths or nolima.PAPER_DEPTHS]
    return found, source
