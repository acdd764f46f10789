"""A table made narrow enough for a terminal, without breaking a number.

>>> grid = Grid("", ("Model", "Specificity"), 1, (("org/m", "41.3% [25.3, 58.7] MDE 16.9%"),))
>>> folded(grid, 20)[0].rows
(('org/m', '41.3%\\n[25.3, 58.7]\\nMDE 16.9%'),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm_eval_locos.reporting.grid import Grid, lines_of, widths

GAP = 2
"""Characters between columns."""

_NAME = 11  # characters that a name may be folded to


def folded(grid: Grid, width: int | None) -> tuple[Grid, Sequence[int | None]]:
    """The table, and the width of each column; None where whoever draws it is to choose.

    What does not fit gets its intervals and effects on lines of their own, then shorter lines of
    names, then all names of a row in one column. Where that is still too wide, numbers break.

    Args:
        grid: the table.
        width: characters of a line; None for as many as it takes.
    """
    free: list[int | None] = [None] * len(grid.headers)
    if width is None or _total(widths(grid)) <= width:
        return grid, free
    split = replace(
        grid,
        rows=tuple(
            (*row[: grid.labels], *("\n".join(lines_of(text)) for text in row[grid.labels :]))
            for row in grid.rows
        ),
    )
    for candidate in (split, _joined(split)):
        if (found := _widths(candidate, width)) is not None:
            return candidate, found
    return split, free


def _total(columns: Sequence[int]) -> int:
    return sum(columns) + GAP * len(columns)


def _widths(grid: Grid, width: int) -> list[int] | None:
    """Numbers whole, names as wide as there is room for; None where there is too little."""
    columns = list(zip(grid.headers, *grid.rows, strict=True))
    names = [max(len(line) for text in c for line in text.split("\n")) for c in columns]
    names = names[: grid.labels]
    numbers = [
        max(len(part) for part in (*column[0].split(), *"\n".join(column[1:]).split("\n")))
        for column in columns[grid.labels :]
    ]
    while _total([*names, *numbers]) > width:
        widest = max(range(len(names)), key=names.__getitem__)
        if names[widest] <= _NAME:
            return None
        names[widest] -= 1
    return [*names, *numbers]


def _joined(grid: Grid) -> Grid:
    """The same with all names of a row below each other in one column."""
    lines = [grid.headers, *grid.rows]
    headers, *rows = (("\n".join(line[: grid.labels]), *line[grid.labels :]) for line in lines)
    return replace(grid, headers=headers, labels=1, rows=tuple(rows))
