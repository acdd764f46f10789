"""The leaderboard as text in rows and columns, before any format; with its notes.

Two tables: scores of the families (with drops), and what follows from them (specificity).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval_locos.reporting.best_k import Choice, best_k
from lm_eval_locos.reporting.board import UNPAIRED, Board, Cell, Row
from lm_eval_locos.reporting.text import (
    BUNDLED_MARK,
    MISSING,
    SIDES,
    fixed,
    p_value,
    percent,
    title,
)
from lm_eval_locos.statistics import FLOOR, Estimate

UNPAIRED_MARK = "†"
FLOOR_MARK = "‡"


@dataclass(frozen=True)
class Grid:
    """One table.

    Attributes:
        title: above it.
        headers: one a column.
        labels: so many of the first columns name the row and are set to the left.
        rows: texts, as many a row as there are headers.
    """

    title: str
    headers: tuple[str, ...]
    labels: int
    rows: tuple[tuple[str, ...], ...]


def grids(board: Board) -> list[Grid]:
    """The table of scores, and that of specificity where a row has any."""
    names, columns = _labels(board)
    marked = {f for f in board.families if _all_bundled(board, f)}
    headers = [f"{title(f)} {BUNDLED_MARK}" if f in marked else title(f) for f in board.families]
    rows = [
        (
            *(column[i] for column in columns),
            *(cell_text(row.cells.get(f), f not in marked) for f in board.families),
        )
        for i, row in enumerate(board.rows)
    ]
    tables = [Grid("Score (drop)", (*names, *headers), len(names), tuple(rows))]
    if judged := [(i, row) for i, row in enumerate(board.rows) if row.specificity is not None]:
        heads = ("Retrieval drop", "Control drop", "Specificity", "Controls held")
        heads += ("p (random)", "p (Holm)")
        if board.bundled:
            names = (*names, "Data")
        rows = []
        for i, row in judged:
            data = ((BUNDLED_MARK if row.bundled else MISSING),) if board.bundled else ()
            rows.append((*(column[i] for column in columns), *data, *_judgement(row)))
        tables.append(Grid("Specificity", (*names, *heads), len(names), tuple(rows)))
    return tables


def _labels(board: Board) -> tuple[tuple[str, ...], list[list[str]]]:
    """Names and texts of the columns that say which row it is; those alike everywhere go."""
    rows = board.rows
    columns = {"Model": [row.model for row in rows], "Ranking": [row.ranking for row in rows]}
    columns["Ablated"] = [row.name for row in rows]
    where = [f"{row.site}, {row.mode}" if row.site else "" for row in rows]
    if len(set(where) - {""}) > 1:
        columns["Site, mode"] = where
    if any(row.source != "runs" for row in rows):
        columns["From"] = [row.source for row in rows]
    if len(set(columns["Model"])) == 1:
        del columns["Model"]
    if len(set(columns["Ranking"]) - {""}) < 1:
        del columns["Ranking"]
    return tuple(columns), [[text or MISSING for text in c] for c in columns.values()]


def _all_bundled(board: Board, family: str) -> bool:
    cells = [row.cells[family] for row in board.rows if family in row.cells]
    return bool(cells) and all(cell.bundled for cell in cells)


def cell_text(cell: Cell | None, mark_bundled: bool = True) -> str:
    """Score and drop, ``0.300 (61.5%)``, with marks."""
    if cell is None:
        return MISSING
    text = fixed(cell.score.value)
    if cell.drop is not None:
        text += f" ({drop_text(cell)})"
    return f"{text} {BUNDLED_MARK}" if cell.bundled and mark_bundled else text


def drop_text(cell: Cell) -> str:
    """The drop in percent with its mark; the floor's mark alone where it is not defined."""
    if cell.drop is None:
        return MISSING
    if cell.drop.value is None:
        return FLOOR_MARK
    unpaired = cell.drop.reason and UNPAIRED in cell.drop.reason
    return percent(cell.drop.value) + (UNPAIRED_MARK if unpaired else "")


def estimate_text(found: Estimate | None) -> str:
    """``41.2% [25.1, 58.6] MDE 23.9%``, ``41.2% ± 3.0`` or ``41.2%†``."""
    if found is None or found.value is None:
        return MISSING
    text = percent(found.value)
    if found.interval is not None:
        low, high = fixed(100 * found.interval.low, 1), fixed(100 * found.interval.high, 1)
        return f"{text} [{low}, {high}] {detectable_text(found)}".strip()
    if found.standard_error is not None:
        return f"{text} ± {fixed(100 * found.standard_error, 1)}"
    return text + (UNPAIRED_MARK if found.reason and UNPAIRED in found.reason else "")


def detectable_text(found: Estimate | None, *, share: bool = True) -> str:
    """``MDE 23.9%`` (``MDE 0.239`` for no `share`) to stand beside an interval; or nothing."""
    if found is None or found.detectable is None or found.interval is None:
        return ""
    return f"MDE {percent(found.detectable) if share else fixed(found.detectable)}"


def held_text(held: bool | None) -> str:
    """Whether the controls held."""
    return MISSING if held is None else "yes" if held else "not shown"


def _judgement(row: Row) -> tuple[str, ...]:
    found = (row.retrieval_drop, row.control_drop, row.specificity)
    random = row.random
    return (
        *(estimate_text(one) for one in found),
        held_text(row.controls_held),
        p_value(random.p if random else None),
        p_value(random.p_holm if random else None),
    )


def notes(board: Board, choices: Sequence[Choice] | None = None) -> list[str]:
    """What a reader of the tables needs to know; each a sentence or two.

    Args:
        board: all there is.
        choices: its k*, where they are known already.
    """
    models = sorted({row.model for row in board.rows})
    metrics: dict[str, set[str]] = {f: set() for f in board.families}
    for row in board.rows:
        for family, cell in row.cells.items():
            metrics[family].add(cell.metric)
    listed = ", ".join(f"{title(f)} {'/'.join(sorted(m))}" for f, m in metrics.items() if m)
    found = [f"Model: {models[0]}."] if len(models) == 1 else []
    found.append(
        f"Scores are means over documents{f' ({listed})' if listed else ''}; a drop is (baseline − "
        "score) / baseline, on the same documents."
    )
    sides = {side: [title(f) for f in board.families if SIDES.get(f) == side] for side in _SIDES}
    if any(row.specificity for row in board.rows):
        found.append(
            "Specificity is the mean drop of the retrieval families "
            f"({', '.join(sides['retrieval']) or 'none'}) less that of the controls "
            f"({', '.join(sides['control']) or 'none'})."
        )
    drops = [(r.specificity, r.retrieval_drop, r.control_drop) for r in board.rows]
    if any(estimate and estimate.interval for row in drops for estimate in row):
        found.append(
            f"In square brackets {board.level:.0%} intervals over documents, paired and by "
            f"cluster (bootstrap of {board.resamples:,} resamples, seed {board.seed}; score "
            "intervals where few documents changed)."
        )
    if detectable := [e for row in drops for e in row if e and e.detectable is not None]:
        found.append(
            "MDE: minimum detectable effect, the smallest true drop or specificity that so many "
            f"documents would tell from 0 with {detectable[0].power:.0%} power."
        )
    if any(row.controls for row in board.rows):
        found.append(
            "Controls held: the upper end of the control drop's 90% interval is below "
            f"{percent(board.margin)}. “Not shown” is not “damaged”: it may be too few documents."
        )
    if any(row.random for row in board.rows):
        found.append(
            "p (random): share of random sets of as many heads at least as specific, "
            "(1 + #) / (1 + seeds); p (Holm): the same, adjusted over the k of one ranking."
        )
    found += best_k_lines(board, choices)
    texts = {text for table in grids(board) for row in table.rows for text in row}
    if any(UNPAIRED_MARK in text for text in texts):
        found.append(
            f"{UNPAIRED_MARK} Unpaired: without sample files there is no interval. Run again with "
            "--log_samples."
        )
    if any(FLOOR_MARK in text for text in texts):
        found.append(
            f"{FLOOR_MARK} {FLOOR.capitalize()}: the baseline cannot be told from a score that "
            "needs no ability, so a drop means nothing."
        )
    return found + skipped(board)


def best_k_lines(board: Board, choices: Sequence[Choice] | None = None) -> list[str]:
    """A sentence for the k* of each ranking; the model is named where there are several."""
    choices = best_k(board) if choices is None else choices
    labels = [(c.model, f"{c.site}, {c.mode}", c.source) for c in choices]
    # A part that is the same for all tells nothing apart.
    shown = [i for i in range(3) if len({label[i] for label in labels}) > 1]
    if len({row.model for row in board.rows}) > 1 and 0 not in shown:
        shown.insert(0, 0)
    found = []
    for choice, label in zip(choices, labels, strict=True):
        prefix = f"{', '.join(label[i] for i in shown)}: " if shown else ""
        held = "held" if choice.result.controls_held else "not shown to hold"
        found.append(
            f"{prefix}k* of {choice.ranking} = {choice.k}, the most specific on one half of the "
            f"documents; on the other half ({choice.documents} documents) its specificity is "
            f"{estimate_text(choice.result.specificity)}, controls {held}.{other_families(choice)}"
        )
    return found


def other_families(choice: Choice) -> str:
    """Which families only one of the halves has, so that the two numbers are not of one kind."""
    sides = (
        (choice.lost, "had a part in the choice of k, but has none on the other half"),
        (choice.gained, "had no part in the choice of k, but has one on the other half"),
    )
    said = [f" {title(f)} {what} ({why})." for side, what in sides for f, why in side.items()]
    return "".join(said)


_SIDES = ("retrieval", "control")
_PART = re.compile(r" (?=[\[(]|MDE )")


def skipped(board: Board) -> list[str]:
    """A line for each family that lost documents."""
    lines = []
    for row in board.rows:
        for family, cell in row.cells.items():
            if cell.skipped:
                lines.append(
                    f"{title(family)}, {row.ranking} {row.name}: {cell.skipped} documents have no "
                    "score on one side (skipped prompts) and are left out of both."
                )
    return lines


def bundled_warning(board: Board) -> str | None:
    """What stands above everything where a number is from the package's sample."""
    if not board.bundled:
        return None
    families = [
        title(f)
        for f in board.families
        if any(f in row.cells and row.cells[f].bundled for row in board.rows)
    ]
    return (
        f"{BUNDLED_MARK} {', '.join(families)}: these numbers are from the small sample that comes "
        "with the package, not from the benchmark. They show that everything works; they say "
        "nothing that can be compared with published results."
    )


def widths(grid: Grid) -> Sequence[int]:
    """Number of characters of each column."""
    return [max(map(len, column)) for column in zip(grid.headers, *grid.rows, strict=True)]


def lines_of(text: str) -> list[str]:
    """A cell's number, interval and minimum detectable effect, for a line each."""
    return _PART.split(text)
