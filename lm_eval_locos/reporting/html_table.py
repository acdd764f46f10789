"""The page's table: what each heading and cell shows, and the number that it sorts by."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lm_eval_locos.reporting.board import Board, Cell, Row
from lm_eval_locos.reporting.grid import detectable_text, drop_text, held_text
from lm_eval_locos.reporting.text import MISSING, SIDES, fixed, p_value, percent, title
from lm_eval_locos.statistics import Estimate


def sides_of(board: Board) -> list[tuple[str, int]]:
    """(text, number of columns) of the upper line of headings, after the first two columns."""
    names = [SIDES.get(family, "other") for family in board.families]
    return [
        *((name, len(list(group))) for name, group in groupby(names)),
        ("specificity" if _judged(board) else "", 6 if _judged(board) else 0),
    ][: None if _judged(board) else -1]


def columns_of(board: Board) -> list[dict[str, Any]]:
    """The lower line of headings."""
    found = [_column("condition", "Ablated"), _column("k", "k")]
    for family in board.families:
        cells = [row.cells[family] for row in board.rows if family in row.cells]
        found.append(_column(family, title(family), all(cell.bundled for cell in cells)))
    if _judged(board):
        found += [
            _column("retrieval_drop", "Retrieval drop"),
            _column("control_drop", "Control drop"),
            _column("specificity", "Specificity"),
            _column("controls_held", "Controls held"),
            _column("p_random", "p (random)"),
            _column("p_holm", "p (Holm)"),
        ]
    return found


def _column(name: str, text: str, bundled: bool = False) -> dict[str, Any]:
    safe = "".join(c if (c.isalnum() and c.isascii()) or c in "_-" else "-" for c in name)
    return {"name": safe, "title": text, "bundled": bundled}


def row_of(board: Board, row: Row) -> dict[str, Any]:
    """One row."""
    several = len({r.model for r in board.rows}) > 1
    where = {(r.site, r.mode) for r in board.rows if r.site}
    lines = [row.model if several else "", row.ranking]
    lines.append(f"{row.site}, {row.mode}" if len(where) > 1 and row.site else "")
    lines.append(f"from {row.source}" if row.source != "runs" else "")
    if row.seeds:
        lines.append(f"mean of {len(row.seeds)} seeds")
    cells = [_number(row.k, str(row.k) if row.kind != "baseline" else MISSING)]
    marked = {column["name"] for column in columns_of(board) if column["bundled"]}
    cells += [_family(row, family, mark=family not in marked) for family in board.families]
    if _judged(board):
        found = (row.retrieval_drop, row.control_drop, row.specificity)
        cells += [_estimate(one) for one in found]
        cells.append(_held(row))
        random = row.random
        for p in (random.p, random.p_holm) if random else (None, None):
            cells.append(_number(p, p_value(p)))
    return {
        "kind": "random" if row.seeds else row.kind,
        "name": row.condition,
        "tag": row.bundled and not marked,
        "lines": [line for line in lines if line],
        "cells": cells,
    }


def _judged(board: Board) -> bool:
    return any(row.specificity is not None for row in board.rows)


def _number(value: float | None, text: str, **more: Any) -> dict[str, Any]:
    return {
        "value": value,
        "text": text,
        "style": "plain",
        "share": None,
        "lines": [],
        "hint": "",
        "tag": False,
    } | more


def _family(row: Row, family: str, mark: bool) -> dict[str, Any]:
    cell = row.cells.get(family)
    if cell is None:
        return _number(None, MISSING)
    value = cell.score.value
    share = None if value is None or not 0 <= value <= 1 else round(100 * value, 1)
    lines = [f"drop {drop_text(cell)}"] if cell.drop is not None else []
    ends = [interval_text(cell.drop), detectable_text(cell.drop)]
    if row.kind == "baseline":
        ends = [interval_text(cell.score, 1, 3), detectable_text(cell.score, share=False)]
    lines += filter(None, ends)
    if family in row.spread:
        low, high = row.spread[family]
        lines.append(f"{fixed(low)} to {fixed(high)}")
    return _number(
        value,
        fixed(value),
        style="score",
        share=share,
        lines=lines,
        hint=_hint(cell),
        tag=mark and cell.bundled,
    )


def _hint(cell: Cell) -> str:
    """What a pointer over the cell tells."""
    parts = [f"{cell.metric} of {', '.join(cell.tasks)}"]
    if cell.documents:
        parts.append(f"{cell.documents} documents")
    if cell.baseline is not None:
        parts.append(f"baseline {fixed(cell.baseline.value)}")
    if cell.difference is not None:
        parts.append(f"difference {fixed(cell.difference.value)}")
    if cell.lost is not None:
        parts.append(f"{cell.lost} lost, {cell.gained} gained")
    if cell.p is not None:
        parts.append(f"p {p_value(cell.p)}, Holm {p_value(cell.p_holm)}")
    if cell.drop is not None and cell.drop.reason:
        parts.append(cell.drop.reason)
    return "; ".join(parts)


def _estimate(found: Estimate | None) -> dict[str, Any]:
    if found is None or found.value is None:
        return _number(None, MISSING, hint=(found.reason or "") if found else "")
    lines = [text for text in (interval_text(found), detectable_text(found)) if text]
    return _number(found.value, percent(found.value), lines=lines, hint=found.reason or "")


def _held(row: Row) -> dict[str, Any]:
    value = None if row.controls_held is None else float(row.controls_held)
    reason = (row.controls.reason or "") if row.controls else ""
    style = "yes" if row.controls_held else "said"
    return _number(value, held_text(row.controls_held), style=style, hint=reason)


def interval_text(found: Estimate | None, scale: float = 100, digits: int = 1) -> str:
    """``[25.1, 58.6]`` in percent, ``± 3.0``, or nothing."""
    if found is None or found.value is None:
        return ""
    if found.interval is not None:
        low, high = (fixed(scale * x, digits) for x in (found.interval.low, found.interval.high))
        return f"[{low}, {high}]"
    if found.standard_error is not None:
        return f"± {fixed(scale * found.standard_error, digits)}"
    return ""
