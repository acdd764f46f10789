"""Which figures a leaderboard has: curves over k, rankings, NoLiMa by length and depth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from lm_eval_locos import figures
from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import LocosError
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.reporting import plots
from lm_eval_locos.reporting.board import Board, Row, group_key
from lm_eval_locos.reporting.details import surface
from lm_eval_locos.reporting.plots import Plot, Series, slug
from lm_eval_locos.reporting.text import BUNDLED_MARK, title
from lm_eval_locos.statistics import Estimate

_log = logging.getLogger(__name__)
_PANELS = 4  # conditions of one ranking whose surfaces are drawn, beside the baseline's


def figure_list(board: Board) -> list[Plot]:
    """Every figure, in the order of a page; names are unique."""
    found: list[Plot] = []
    taken: set[str] = set()
    for plot in (*_curves(board), *_heads(board), *_nolima(board)):
        name, number = plot.name, 2
        while plot.name in taken:
            plot = Plot(f"{name}-{number}", plot.section, plot.title, plot.save)
            number += 1
        taken.add(plot.name)
        found.append(plot)
    return found


def _plot(section: str, heading: str, draw: Callable[[], Figure], *name: object) -> Plot:
    """A figure drawn when it is saved, so that none is drawn for nothing."""
    return Plot(slug(*name), section, heading, lambda path: plots.save(draw(), path))


# -- over k --------------------------------------------------------------------------------


def _curves(board: Board) -> Iterator[Plot]:
    groups: dict[tuple[object, ...], list[tuple[Row, ...]]] = {}
    for row in board.rows:
        if row.kind in ("top", "bottom") and row.k and board.group(row)[0] is row:
            key = (row.model, row.site, row.mode, row.source)
            groups.setdefault(key, []).append(board.group(row))
    several = len({(site, mode) for _, site, mode, _ in groups}) > 1
    for (model, site, mode, source), lines in groups.items():
        if len({row.k for line in lines for row in line}) < 2:
            continue
        extra = [part for part in (site, mode) if several]
        where = ", ".join([str(model), *map(str, extra), *([source] if source != "runs" else [])])
        for family in board.families:
            series = [s for line in lines if (s := _score_series(board, line, family)).points]
            if not series:
                continue
            heading = _marked(f"{title(family)} score by heads ablated, {where}", board, family)
            draw = partial(
                plots.curves,
                series,
                _marked(title(family), board, family),
                f"score ({_metric(lines, family)})",
                limits=(-0.03, 1.03),
                baseline=_baseline(lines, family),
            )
            yield _plot("scores", heading, draw, "scores", where, family)
        series = [s for line in lines if (s := _specificity_series(board, line)).points]
        if series:
            heading = f"Specificity by heads ablated, {where}"
            mark = f" {BUNDLED_MARK}" if any(r.bundled for line in lines for r in line) else ""
            draw = partial(
                plots.curves, series, f"Specificity{mark}", "retrieval − control drop", zero=True
            )
            yield _plot("specificity", heading + mark, draw, "specificity", where)


def _score_series(board: Board, line: tuple[Row, ...], family: str) -> Series:
    points = [
        (r.k, r.cells[family].score)
        for r in line
        if family in r.cells and r.cells[family].score.value is not None
    ]
    band = [(r.k, *r.spread[family]) for r in _random(board, line) if family in r.spread]
    return Series(_label(line), tuple(points), tuple(band))


def _specificity_series(board: Board, line: tuple[Row, ...]) -> Series:
    points = [
        (r.k, r.specificity) for r in line if r.specificity and r.specificity.value is not None
    ]
    band = [
        (r.k, min(r.random.values), max(r.random.values))
        for r in line
        if r.random and r.random.values
    ]
    return Series(_label(line), tuple(points), tuple(band))


def _random(board: Board, line: tuple[Row, ...]) -> list[Row]:
    """The rows of random heads that belong to a line; of two kinds that with more seeds."""
    first = line[0]
    if first.kind != "top":
        return []
    found: dict[str, list[Row]] = {}
    for row in board.rows:
        same = (row.model, row.ranking, row.site, row.mode, row.source)
        if row.seeds and same == (
            first.model,
            first.ranking,
            first.site,
            first.mode,
            first.source,
        ):
            found.setdefault(row.kind, []).append(row)
    return max(found.values(), key=lambda rows: sum(len(r.seeds) for r in rows), default=[])


def _baseline(lines: list[tuple[Row, ...]], family: str) -> Estimate | None:
    for line in lines:
        for row in line:
            if family in row.cells and row.cells[family].baseline is not None:
                return row.cells[family].baseline
    return None


def _label(line: tuple[Row, ...]) -> str:
    name = line[0].ranking or "top k"
    return f"{name}, bottom" if line[0].kind == "bottom" else name


def _metric(lines: list[tuple[Row, ...]], family: str) -> str:
    return next(r.cells[family].metric for line in lines for r in line if family in r.cells)


def _marked(text: str, board: Board, family: str) -> str:
    bundled = any(r.cells[family].bundled for r in board.rows if family in r.cells)
    return f"{text} {BUNDLED_MARK}" if bundled else text


# -- rankings ------------------------------------------------------------------------------


def _heads(board: Board) -> Iterator[Plot]:
    """A heatmap a ranking, with the heads of its largest top k framed."""
    for row in _largest(board):
        ranking, reason = read_ranking(row)
        if ranking is None:
            _log.warning("%s", reason)
            continue
        heading = f"Score of every head, {row.ranking}, {row.model}; framed: {row.condition}"
        draw = partial(
            figures.heatmap,
            ranking,
            marked=[Head(*map(int, head.split("-"))) for head in row.heads],
            marked_label=f"ablated, {row.condition}",
            title=f"{row.ranking}\n{row.model}",
        )
        yield Plot(slug("heads", row.model, row.ranking), "heads", heading, _saver(draw))


def unreadable_rankings(board: Board) -> list[str]:
    """Why rankings have no heatmap, a line each."""
    return [reason for row in _largest(board) if (reason := read_ranking(row)[1])]


def _largest(board: Board) -> list[Row]:
    """Of each ranking the row with the most of its top heads ablated."""
    found: dict[tuple[str, str], Row] = {}
    for row in board.rows:
        if row.kind == "top" and row.ranking_sha256 and row.heads:
            key = (row.model, row.ranking_sha256)
            if key not in found or row.k > found[key].k:
                found[key] = row
    return list(found.values())


def _saver(draw: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: draw(path)


def read_ranking(row: Row) -> tuple[HeadRanking | None, str]:
    """A row's ranking; or None, and why: its file is gone, or is another by now."""
    path = str(row.ranking_path)
    places = [path]
    if not path.startswith("hf://") and not Path(path).is_absolute():
        places += [str(Path(run).parent / path) for run in row.runs[:1]]
    reason = ""
    for place in places:
        try:
            ranking = HeadRanking.load(place)
            figures.grid(ranking)
        except LocosError as error:
            reason = reason or str(error)
            continue
        if ranking.sha256 == row.ranking_sha256:
            return ranking, ""
        reason = f"{place} is not the file of the run any more: its sha256 differs."
    return None, f"No heatmap of {row.ranking}: {reason}"


# -- NoLiMa --------------------------------------------------------------------------------


def _nolima(board: Board) -> Iterator[Plot]:
    shown: set[tuple[object, ...]] = set()
    for row in board.rows:
        if row.kind in ("baseline", "random", "layer-random") or group_key(row) in shown:
            continue
        shown.add(group_key(row))
        line = [r for r in board.group(row) if "nolima" in r.cells and r.cells["nolima"].pairs]
        step = max(1, -(-len(line) // _PANELS))
        for one in line[::-1][::step][::-1]:  # the largest k is always among them
            cell = one.cells["nolima"]
            mark = f" {BUNDLED_MARK}" if cell.bundled else ""
            documents = (one.model, *(before.document for before, _ in cell.pairs))
            sides = [(1, one.condition)]
            if documents not in shown:
                shown.add(documents)
                sides.insert(0, (0, "baseline"))
            for side, name in sides:
                found = surface((pair[side] for pair in cell.pairs), cell.metric)
                if found is None:
                    continue
                what = ", ".join(filter(None, (one.ranking if side else "", name)))
                heading = f"NoLiMa by context length and needle depth, {one.model}, {what}{mark}"
                draw = partial(plots.length_by_depth, found, what + mark, cell.metric)
                ranking = one.ranking if side else ""
                yield _plot("nolima", heading, draw, "nolima", one.model, ranking, name)
