"""The leaderboard as one page that needs no network: tables, figures, examples, provenance.

The template escapes everything that is put into it. Only figures are put in as they are; their text
is escaped by matplotlib. The page's own script is the only one that its policy lets run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lm_eval_locos import __version__
from lm_eval_locos.reporting.best_k import Choice, best_k
from lm_eval_locos.reporting.board import Board
from lm_eval_locos.reporting.cards import cards, headlines
from lm_eval_locos.reporting.details import Example, examples
from lm_eval_locos.reporting.figure_list import figure_list, unreadable_rankings
from lm_eval_locos.reporting.grid import bundled_warning, notes
from lm_eval_locos.reporting.html_table import columns_of, row_of, sides_of
from lm_eval_locos.reporting.results import Run
from lm_eval_locos.reporting.tables import provenance
from lm_eval_locos.reporting.text import MISSING, fixed, title

_log = logging.getLogger(__name__)
_TEMPLATE = Path(__file__).with_name("report.html.j2")
_LONGEST = 600  # characters of an answer that are shown

_SECTIONS = {
    "scores": (
        "Scores by heads ablated",
        "Bars are intervals over documents; a shaded band is the range over all random sets of as "
        "many heads, its middle dashed.",
    ),
    "specificity": (
        "Specificity by heads ablated",
        "Mean drop of the retrieval families less that of the controls. 0 means that the heads "
        "matter to both alike.",
    ),
    "heads": (
        "Where the heads are",
        "The ranking's score of every head, layer by head; ablated heads are framed.",
    ),
    "nolima": (
        "NoLiMa by length and depth",
        "Mean score of the documents of each context length and needle depth.",
    ),
}


def page(board: Board) -> str:
    """The page, as HTML text."""
    source = _TEMPLATE.read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(source).render(**_content(board), script_hash=_hash(source))


def _hash(source: str) -> str:
    """Of the page's script, as its Content-Security-Policy names it."""
    script = source[source.index("<script>") + len("<script>") : source.index("</script>")]
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _content(board: Board) -> dict[str, Any]:
    choices = best_k(board)
    figures = _figures(board)
    shown = _examples(board, choices)
    sections = [("leaderboard", "Leaderboard"), *((f["id"], f["title"]) for f in figures)]
    sections += [("examples", "Answers before and after")] if shown else []
    models = sorted({row.model for row in board.rows})
    dates = sorted(run.date[:10] for run in board.runs if run.date)
    span = dates[:1] if dates[:1] == dates[-1:] else [f"{dates[0]} to {dates[-1]}"]
    runs = f"{len(board.runs)} run" + ("s" if len(board.runs) > 1 else "")
    return {
        "version": __version__,
        "heading": "Which heads retrieve, and what their removal damages",
        "subheading": " · ".join([", ".join(models), runs, *span]),
        "bundled": bundled_warning(board),
        "warnings": board.warnings,
        "sections": [*sections, ("provenance", "Provenance")],
        "cards": cards(board, choices),
        "sides": sides_of(board),
        "columns": columns_of(board),
        "rows": [row_of(board, row) for row in board.rows],
        "notes": notes(board, choices),
        "figures": figures,
        "examples": shown,
        "runs": [_run(run) for run in board.runs],
    }


def _figures(board: Board) -> list[dict[str, Any]]:
    plots = figure_list(board)
    missing = {"heads": unreadable_rankings(board)}
    return [
        {
            "id": key,
            "title": heading,
            "text": text,
            "missing": missing.get(key, []),
            "figures": [
                {"title": plot.title, "svg": Markup(plot.svg())}
                for plot in plots
                if plot.section == key
            ],
        }
        for key, (heading, text) in _SECTIONS.items()
        if any(plot.section == key for plot in plots) or missing.get(key)
    ]


def _examples(board: Board, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    groups = []
    for row in (headline.row for headline in headlines(board, choices)):
        for family in board.families:
            if family in row.cells and (found := examples(row.cells[family])):
                name = ", ".join(filter(None, (row.ranking, row.condition)))
                groups.append(
                    {
                        "title": f"{title(family)}: {name}, {row.model}",
                        "condition": row.condition,
                        "bundled": row.cells[family].bundled,
                        "examples": [_shown(example) for example in found],
                    }
                )
    return groups


def _shown(example: Example) -> dict[str, Any]:
    return {
        "id": example.id,
        "question": _cut(example.question),
        "answers": [_cut(answer) for answer in example.answers],
        "change": example.change,
        "before": _cut(example.before) or "(no answer)",
        "after": _cut(example.after) or "(no answer)",
        "scores": [f"score {fixed(score, 2)}" for score in example.scores],
    }


def _cut(text: str) -> str:
    text = re.sub(r"\n{3,}", "\n\n", text.strip())
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST].rstrip()} … ({len(text):,} characters)"


def _run(run: Run) -> dict[str, Any]:
    facts: list[tuple[str, Any]] = [("sha256 of the file", run.sha256)]
    facts += [(name, version) for name, version in run.versions.items()]
    facts += [("ranking", run.ranking.get("path")), ("its sha256", run.ranking.get("sha256"))]
    if run.locos:
        facts.append(("site, mode", f"{run.locos.get('site')}, {run.locos.get('mode')}"))
        facts.append(("heads, in order", _listed(run.locos.get("heads") or ())))
    for name, task in run.tasks.items():
        origin = " ".join(
            str(task.data[key])
            for key in ("source", "hub", "revision", "folder")
            if key in task.data
        )
        counted = MISSING if task.documents is None else f"{task.documents:,}"
        facts.append((name, f"{counted} documents, {origin or 'source not stated'}"))
    return {
        "condition": run.condition,
        "ranking": run.locos.get("method") or "",
        "bundled": any(task.bundled for task in run.tasks.values()),
        "model": run.model,
        "kind": run.kind,
        "date": run.date.partition(".")[0].replace("T", " "),
        "path": run.path,
        "facts": [(name, value) for name, value in facts if value],
        "json": json.dumps(provenance(run), indent=1, ensure_ascii=False),
    }


def _listed(heads: Sequence[object]) -> str:
    return " ".join(map(str, heads)) or "none"
